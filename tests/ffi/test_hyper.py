"""Hyper-connections: the mix, its strengths, a branch's output joining the streams."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops
from tests.ffi.rows import TILED, check_close, check_rows, drawn
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

SIZES = [(4, 48, 16), (3, 37, 7), (2, 64, 320), (5, 17, 31), (1, 33, 264), (4, 2080, 40)]


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Any:
    with ops.implementation("kernel"):
        yield


def weights(count: int, hidden: int, low: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    width = count * hidden
    shapes = ((low, width), (width, low), (count, width))
    scales = (2 / width**0.5, 2 / low**0.5, 2 / width**0.5)
    return [
        jnp.asarray(drawn(i, *shape) * s, dtype)
        for i, (shape, s) in enumerate(zip(shapes, scales, strict=True))
    ]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def exact(normed: np.ndarray, given: list[jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    down, up, inject = (np.asarray(w, np.float64) for w in given)
    count = normed.shape[-2]
    flat = normed.reshape(len(normed), -1).astype(np.float64)
    low = flat @ down.T / count
    gate = sigmoid(low * sigmoid(low) @ up.T).reshape(normed.shape)
    return (gate * normed).mean(axis=1), 2 * sigmoid(flat @ inject.T / count)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_mix_against_float64(size: tuple[int, int, int], dtype: Any) -> None:
    count, hidden, _ = size
    normed, given = drawn(5, 11, count, hidden), weights(*size, dtype)
    mixed, strength = ops.hyper_mix(jnp.asarray(normed), *given)
    wanted, taken = exact(normed, given)
    check_close(mixed, wanted, 1 + np.abs(normed).max(), 32)
    check_close(strength, taken, 2, 32)
    alone, none = ops.hyper_mix(jnp.asarray(normed), *given[:2])
    assert_same_bits(alone, mixed)
    assert none is None
    with pytest.raises(AssertionError):
        check_close(mixed, exact(normed[::-1], given)[0], 1 + np.abs(normed).max(), 32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [(4, 48, 16), (3, 37, 7), (2, 20, 320)])
def test_a_mixed_row_is_a_row(size: tuple[int, int, int], dtype: Any) -> None:
    given = weights(*size, dtype)
    check_rows(lambda x: ops.hyper_mix(x, *given), [drawn(6, *size[:2])], [*range(1, 9), *TILED])
    with pytest.raises(AssertionError):
        check_rows(lambda x: ops.hyper_mix(x + 0 * x[:1], *given), [drawn(6, *size[:2])])


def test_a_low_rank_that_takes_smaller_tiles() -> None:
    """The staged rows of one tile stay below 48 KiB of shared memory."""
    given = weights(2, 9, 5000)
    check_rows(lambda x: ops.hyper_mix(x, *given), [drawn(7, 2, 9)], (1, 2, 3, 8))


@pytest.mark.parametrize("hidden", [1, 33, 1024, 1025, 2560])
def test_combine(hidden: int) -> None:
    streams, branch, strength = drawn(8, 9, 3, hidden), drawn(9, 9, hidden), drawn(10, 9, 3)
    got = ops.hyper_combine(*(jnp.asarray(x) for x in (streams, branch, strength)))
    product = strength.astype(np.float64)[..., None] * branch[:, None]  # exact in float64
    np.testing.assert_array_equal(got, (streams + product).astype(np.float32))
    check_rows(ops.hyper_combine, [streams[0], branch[0], strength[0]], (1, 2, 8, 9))
    with pytest.raises(AssertionError):
        check_rows(
            lambda s, b, g: ops.hyper_combine(s, b + 0 * b[:1], g),
            [streams[0], branch[0], strength[0]],
        )


def test_transformations() -> None:
    given = weights(4, 48, 16)
    normed = jnp.asarray(drawn(11, 2, 3, 4, 48))
    wanted = ops.hyper_mix(normed, *given)
    for run in (jax.vmap, lambda f: f, lambda f: jax.jit(jax.vmap(jax.vmap(f)))):
        for got, value in zip(run(lambda x: ops.hyper_mix(x, *given))(normed), wanted, strict=True):
            assert_same_bits(got, value)


def test_instruction_sets_agree() -> None:
    code = """
        import jax.numpy as jnp
        from hipjax.ffi import ops
        x, down, up, inject = (jnp.asarray(given[n]) for n in ("x", "down", "up", "inject"))
        results["mixed"], results["strength"] = ops.hyper_mix(x, down, up, inject)
        results["joined"] = ops.hyper_combine(x, results["mixed"], results["strength"])
    """
    down, up, inject = weights(4, 48, 320)
    x = drawn(12, 9, 4, 48)
    given = {"x": x, "down": down, "up": up, "inject": inject}
    mixed, _ = ops.hyper_mix(jnp.asarray(x), down, up, inject)
    for name in instruction_sets():
        found = bits_under(name, code, None, **given)
        assert_same_bits(found["mixed"], np.asarray(mixed))


def test_refusals() -> None:
    """As a user sees them: in a process where annotations go unchecked."""
    code = """
        import jax.numpy as jnp
        from hipjax.ffi import ops
        x, down, up = jnp.ones((2, 4, 48)), jnp.ones((16, 192)), jnp.ones((192, 16))
        inject = jnp.ones((4, 192))
        calls = {
            "normed": lambda: ops.hyper_mix(x.astype(jnp.bfloat16), down, up, inject),
            "up": lambda: ops.hyper_mix(x, down, up[:, 1:], inject),
            "inject": lambda: ops.hyper_mix(x, down, up, inject[:3]),
            "branch": lambda: ops.hyper_combine(x, jnp.ones((2, 47)), jnp.ones((2, 4))),
            "strength": lambda: ops.hyper_combine(x, jnp.ones((2, 48)), jnp.ones((2, 3))),
        }
        for name, call in calls.items():
            try:
                call()
            except (TypeError, ValueError) as error:
                results[name] = str(error)
    """
    found = bits_under(instruction_sets()[-1], code)
    assert {name: str(said) for name, said in found.items()} == {
        "normed": "normed has dtype bfloat16; it must be float32",
        "up": "up has shape (192, 15); it must be (192, 16)",
        "inject": "inject has shape (3, 192); it must be (4, 192)",
        "branch": "branch has shape (2, 47); it must be (2, 48)",
        "strength": "strength has shape (2, 3); it must be (2, 4)",
    }
