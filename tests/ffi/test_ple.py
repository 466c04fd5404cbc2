"""The n-gram embedding's gate, norm and convolution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops
from tests.ffi.rows import TILED, check_close, check_rows, drawn
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

EPS = 1e-6
SIZES = [(4, 48), (3, 37), (1, 1), (2, 256), (2, 300), (4, 2560)]


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Any:
    with ops.implementation("kernel"):
        yield


def norms(count: int, hidden: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(drawn(i, count * hidden) * 0.2, dtype) for i in range(3))


def normed(x: np.ndarray, weight: Any) -> np.ndarray:
    scale = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)
    return x * scale * (1 + np.asarray(weight, np.float64).reshape(x.shape[-2:]))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def exact_gate(key: Any, streams: Any, value: Any, weights: Any, scale: float = 1.0) -> Any:
    key, streams, value = (np.asarray(x, np.float64) for x in (key, streams, value))
    met = normed(key * scale, weights[0]) * normed(streams, weights[1])
    score = met.sum(axis=-1) / np.sqrt(key.shape[-1])
    score = np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))
    gated = sigmoid(score)[..., None] * (value * scale)[..., None, :]
    return gated, normed(gated, weights[2])


def rows(count: int, hidden: int, number: int = 9) -> list[np.ndarray]:
    shapes = ((number, count, hidden), (number, count, hidden), (number, hidden))
    return [drawn(10 + i, *shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_gate_against_float64(size: tuple[int, int], dtype: Any) -> None:
    given, weights = rows(*size), norms(*size, dtype)
    operands = [jnp.asarray(x) for x in given]
    for scale in (None, jnp.asarray([0.37]), jnp.asarray(0.37, jnp.bfloat16)):
        got = ops.ple_gate(*operands, weights, EPS, scale)
        factor = 1.0 if scale is None else float(scale.reshape(()))
        for one, wanted in zip(got, exact_gate(*given, weights, factor), strict=True):
            check_close(one, wanted, 1 + np.abs(wanted), 64)
    with pytest.raises(AssertionError):
        wanted = exact_gate(given[0], -given[1], given[2], weights, factor)[0]
        check_close(got[0], wanted, 1 + np.abs(wanted), 64)


def test_a_key_that_does_not_meet_its_stream() -> None:
    """A score of zero has no sign: the gate is one half."""
    weights = norms(2, 40)
    streams, value = jnp.asarray(drawn(1, 1, 2, 40)), jnp.asarray(drawn(2, 1, 40))
    gated, _ = ops.ple_gate(jnp.zeros_like(streams), streams, value, weights, EPS)
    np.testing.assert_array_equal(gated, jnp.broadcast_to(value[:, None] / 2, gated.shape))


@pytest.mark.parametrize("size", [(4, 48), (3, 37), (2, 300)])
def test_a_gated_row_is_a_row(size: tuple[int, int]) -> None:
    weights, one = norms(*size), [x[0] for x in rows(*size)]
    check_rows(lambda k, s, v: ops.ple_gate(k, s, v, weights, EPS), one, [*range(1, 9), *TILED])
    with pytest.raises(AssertionError):
        check_rows(lambda k, s, v: ops.ple_gate(k, s + 0 * s[:1], v, weights, EPS), one)


def convolved(columns: np.ndarray, weight: Any, dilation: int, length: int) -> np.ndarray:
    taps = np.asarray(weight, np.float64)[:, 0].reshape(*columns.shape[2:], -1)
    columns = columns.astype(np.float64)
    parts = [
        columns[:, i * dilation : i * dilation + length] * taps[..., i]
        for i in range(taps.shape[-1])
    ]
    return np.sum(parts, axis=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("taps", "dilation"), [(4, 3), (1, 1), (3, 2), (9, 1)])
@pytest.mark.parametrize("length", [1, 5, 8, 9, 17])
def test_output(taps: int, dilation: int, length: int, dtype: Any) -> None:
    streams, gated = drawn(1, 2, length, 3, 37), drawn(2, 2, length, 3, 37)
    columns = drawn(3, 2, (taps - 1) * dilation + length, 3, 37)
    weight = jnp.asarray(drawn(4, 111, 1, taps), dtype)
    operands = [jnp.asarray(x) for x in (streams, gated, columns)]
    got = ops.ple_output(*operands, weight, dilation)
    y = convolved(columns, weight, dilation, length)
    wanted = streams.astype(np.float64) + gated + y * sigmoid(y)
    check_close(got, wanted, 8 + np.abs(y), 16)
    # A row reads its own column and earlier ones: those after it may hold anything.
    for last in range(min(length, 8)):
        spoilt = [operands[0].at[:, last + 1 :].set(jnp.nan), operands[1]]
        spoilt.append(operands[2].at[:, (taps - 1) * dilation + last + 1 :].set(jnp.inf))
        found = ops.ple_output(*spoilt, weight, dilation)
        assert_same_bits(found[:, : last + 1], got[:, : last + 1])
        alone = [x[:, last : x.shape[1] - length + last + 1] for x in operands]
        alone[0], alone[1] = operands[0][:, last : last + 1], operands[1][:, last : last + 1]
        assert_same_bits(ops.ple_output(*alone, weight, dilation)[:, 0], got[:, last])
    if taps > 1:
        other = ops.ple_output(*operands[:2], operands[2][:, ::-1], weight, dilation)
        assert not np.array_equal(other, got)


def test_transformations() -> None:
    weights, given = norms(3, 37), [jnp.asarray(x) for x in rows(3, 37, 6)]
    wanted = ops.ple_gate(*given, weights, EPS)
    folded = [x.reshape(2, 3, *x.shape[1:]) for x in given]
    found = jax.jit(jax.vmap(lambda k, s, v: ops.ple_gate(k, s, v, weights, EPS)))(*folded)
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a.reshape(b.shape), b)
    weight = jnp.asarray(drawn(4, 111, 1, 4))
    x, columns = jnp.asarray(drawn(5, 2, 3, 5, 3, 37)), jnp.asarray(drawn(6, 2, 3, 14, 3, 37))
    found = jax.vmap(lambda x, c: ops.ple_output(x, x, c, weight, 3))(x, columns)
    for i in range(2):
        assert_same_bits(found[i], ops.ple_output(x[i], x[i], columns[i], weight, 3))


def test_instruction_sets_agree() -> None:
    code = """
        import jax.numpy as jnp
        from hipjax.ffi import ops
        k, s, v, n, w = (jnp.asarray(given[x]) for x in ("k", "s", "v", "n", "w"))
        gated, normed = ops.ple_gate(k, s, v, (n, n, n), 1e-6)
        results["gated"], results["normed"] = gated, normed
        columns = jnp.concatenate([s[:3], normed])[None]
        results["out"] = ops.ple_output(s[None], gated[None], columns, w, 1)
    """
    k, s, v = rows(3, 300)
    given = {"k": k, "s": s, "v": v, "n": drawn(0, 900), "w": drawn(1, 900, 1, 4)}
    runs = [bits_under(name, code, None, **given) for name in instruction_sets()]
    n = jnp.asarray(given["n"])
    here = ops.ple_gate(*(jnp.asarray(x) for x in (k, s, v)), (n, n, n), EPS)
    assert_same_bits(runs[0]["normed"], np.asarray(here[1]))
    for run in runs[1:]:
        for name, value in run.items():
            assert_same_bits(value, runs[0][name])


def test_refusals() -> None:
    k, s, v = (jnp.asarray(x) for x in rows(3, 37))
    with pytest.raises(ValueError, match=r"norm_key has shape \(110,\); it must hold 111 values"):
        ops.ple_gate(k, s, v, norms(2, 55), EPS)
    with pytest.raises(ValueError, match=r"scale has shape \(2,\); it must hold 1 values"):
        ops.ple_gate(k, s, v, norms(3, 37), EPS, jnp.ones(2))
    x = jnp.ones((2, 5, 3, 37))
    with pytest.raises(ValueError, match=r"columns has shape \(2, 13, 3, 37\); it must be \(2, 14"):
        ops.ple_output(x, x, jnp.ones((2, 13, 3, 37)), jnp.ones((111, 1, 4)), 3)
    with pytest.raises(ValueError, match=r"weight has shape \(110, 1, 4\); it must hold 444"):
        ops.ple_output(x, x, jnp.ones((2, 14, 3, 37)), jnp.ones((110, 1, 4)), 3)
