"""The greedy choice: ties, values that are not finite, long rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops
from tests.ffi.rows import check_rows, drawn
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

WIDTHS = (1, 5, 31, 32, 33, 255, 257, 8191, 8192, 8193, 20000, 248320)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Any:
    with ops.implementation("kernel"):
        yield


def expected(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shown = np.where(np.isfinite(logits), logits, -np.inf)
    lost = ~np.isfinite(logits).any(axis=-1)
    return np.where(lost, 0, shown.argmax(axis=-1)).astype(np.int32), lost


def check(logits: np.ndarray) -> None:
    got, lost = ops.argmax(jnp.asarray(logits))
    best, without = expected(logits)
    assert got.dtype == jnp.int32 and lost.dtype == jnp.bool_
    np.testing.assert_array_equal(got, best)
    np.testing.assert_array_equal(lost, without)


@pytest.mark.parametrize("width", WIDTHS)
def test_any_width(width: int) -> None:
    logits = drawn(width, 11, width)
    check(logits)
    check(np.round(logits))  # many ties
    check(-np.abs(logits) - 1)  # padding would win
    with pytest.raises(AssertionError):
        wrong = ops.argmax(jnp.asarray(logits[:, ::-1]))[0] + (width == 1)
        np.testing.assert_array_equal(wrong, expected(logits)[0])


@pytest.mark.parametrize("width", [1, 40, 300, 8193, 20000])
def test_what_is_not_finite_never_wins(width: int) -> None:
    logits = drawn(1, 8, width)
    logits[0] = np.nan
    logits[1] = np.inf
    logits[2] = -np.inf
    logits[3, : width - 1] = np.nan  # the last alone is finite
    logits[4, width // 2] = np.inf
    logits[5, ::2] = -np.inf
    logits[6] = -np.finfo(np.float32).max
    logits[7, width // 2] = np.nan
    check(logits)
    assert list(expected(logits)[1][:4]) == [True, True, True, False]


def test_lowest_of_equals() -> None:
    for places in ([3, 40], [39, 40], [8191, 8192], [5, 19999], [9000, 17000, 18000]):
        logits = np.zeros((1, 20000), np.float32)
        logits[0, places] = 7
        assert int(ops.argmax(jnp.asarray(logits))[0][0]) == places[0]
    assert int(ops.argmax(jnp.asarray([[-1.0, -0.0, 0.0, -0.0]]))[0][0]) == 1
    assert int(ops.argmax(jnp.asarray([[0.0, 1e-45, 3e-45, 0.0]]))[0][0]) == 2  # denormals count


@pytest.mark.parametrize("width", [40, 20000])
def test_a_row_is_a_row(width: int) -> None:
    check_rows(ops.argmax, [drawn(2, width)], [*range(1, 9), 33])


def test_transformations() -> None:
    logits = jnp.asarray(drawn(3, 2, 3, 9000))
    best, lost = ops.argmax(logits)
    assert best.shape == lost.shape == (2, 3)
    for run in (jax.vmap(ops.argmax), jax.jit(ops.argmax), jax.vmap(jax.vmap(ops.argmax))):
        assert_same_bits(run(logits)[0], best)
        assert_same_bits(run(logits)[1], lost)


def test_instruction_sets_agree() -> None:
    code = """
        import jax.numpy as jnp
        from hipjax.ffi import ops
        results["best"], results["lost"] = ops.argmax(jnp.asarray(given["logits"]))
    """
    logits = np.round(drawn(4, 3, 20000))
    for name in instruction_sets():
        found = bits_under(name, code, None, logits=logits)
        assert_same_bits(found["best"], expected(logits)[0])


def test_refusals() -> None:
    with pytest.raises(TypeError):
        ops.argmax(jnp.ones((2, 5), jnp.int32))
    with pytest.raises(ValueError, match="its last axis must hold at least one value"):
        ops.argmax(jnp.ones((2, 0)))
