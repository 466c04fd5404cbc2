"""The router's kernel: exact choice, softmax weights, one row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

SIZES = [(1, 1), (8, 2), (16, 2), (33, 5), (100, 16), (512, 10)]
INF, NAN = np.float32(np.inf), np.float32(np.nan)


@jax.jit
def _ten(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ops.route(logits, 10, True)


@pytest.fixture(autouse=True)
def _kernels():
    with ops.implementation("kernel"):
        yield


def logits_of(rows: int, experts: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(rows, experts))).astype(np.float32)


def expected(logits: np.ndarray, chosen: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """In float64: a stable sort by descending logit keeps lower experts first."""
    experts = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")[..., :chosen]
    grown = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    weights = np.take_along_axis(grown / grown.sum(-1, keepdims=True), experts, -1)
    return experts, weights / weights.sum(-1, keepdims=True) if renormalise else weights


@pytest.mark.parametrize(("experts", "chosen"), SIZES)
@pytest.mark.parametrize("renormalise", [True, False])
def test_choice_and_weights(experts: int, chosen: int, renormalise: bool):
    logits = logits_of(5, experts)
    got, weights = ops.route(jnp.asarray(logits), chosen, renormalise)
    wanted, exact = expected(logits, chosen, renormalise)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_allclose(weights, exact, rtol=3e-6)
    if experts > chosen:  # the other setting gives other weights
        other = expected(logits, chosen, not renormalise)[1]
        assert not np.allclose(weights, other, rtol=3e-6, atol=0)


def test_ties_go_to_the_lower_expert():
    logits = np.random.default_rng(1).integers(-2, 3, size=(40, 100)).astype(np.float32)
    logits[::2] *= np.float32(-0.0)  # zeros of both signs are equal
    got, _ = ops.route(jnp.asarray(logits), 16, True)
    np.testing.assert_array_equal(got, expected(logits, 16, True)[0])
    highest_first = 99 - expected(logits[:, ::-1], 16, True)[0]
    assert (np.asarray(got) != highest_first).any()


def test_logits_decide_where_probabilities_are_equal():
    """Two logits far below the greatest both have the probability 0."""
    logits = np.array([[0.0, -300.0, -200.0, -200.00002]], np.float32)
    got, weights = ops.route(jnp.asarray(logits), 3, True)
    np.testing.assert_array_equal(got, [[0, 2, 3]])
    np.testing.assert_array_equal(weights, [[1, 0, 0]])


def test_unusual_logits_are_defined():
    logits = logits_of(4, 40)
    logits[0] = NAN
    logits[1, 7] = NAN
    logits[2, ::3] = -INF
    logits[3, 5] = INF
    experts, weights = (np.asarray(x) for x in ops.route(jnp.asarray(logits), 16, True))
    assert all(len(set(row)) == 16 and set(row) <= set(range(40)) for row in experts.tolist())
    np.testing.assert_array_equal(experts[0], np.arange(16))
    np.testing.assert_array_equal(np.isnan(weights).all(-1), [True, True, False, True])
    assert 7 not in experts[1] and experts[3, 0] == 5
    np.testing.assert_array_equal(experts[2], expected(logits[2:3], 16, True)[0][0])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 17])
def test_a_row_is_a_row(rows: int):
    logits = logits_of(rows, 512)
    alone = [_ten(jnp.asarray(logits[i : i + 1])) for i in range(rows)]
    for at in range(rows):
        others = np.array(logits)
        others[np.arange(rows) != at] = [NAN, INF, np.float32(1e30)][at % 3]
        for whole in (logits, others):
            for got, wanted in zip(_ten(jnp.asarray(whole)), alone[at], strict=True):
                assert_same_bits(got[at], wanted[0])
    # The comparison can fail: the next row's answer is another.
    if rows > 1:
        assert (np.asarray(alone[0][1]) != np.asarray(alone[1][1])).any()


def test_transformations():
    logits = jnp.asarray(logits_of(24, 64).reshape(2, 3, 4, 64))
    wanted = ops.route(logits, 4, True)
    mapped = jax.jit(jax.vmap(jax.vmap(lambda x: ops.route(x, 4, True))))(logits)
    _, scanned = jax.lax.scan(lambda c, x: (c, ops.route(x, 4, True)), 0, logits)
    for some in (mapped, scanned):
        for got, whole in zip(some, wanted, strict=True):
            assert_same_bits(got, whole)


def test_instruction_sets():
    logits = np.concatenate([logits_of(3, 512), np.zeros((1, 512), np.float32)])
    code = """
    from hipjax.ffi import ops
    results["experts"], results["weights"] = ops.route(jax.numpy.asarray(given["x"]), 10, True)
    """
    experts, weights = _ten(jnp.asarray(logits))
    for one in instruction_sets():
        got = bits_under(one, "import jax\n" + _dedented(code), x=logits)
        assert_same_bits(got["experts"], experts)
        assert_same_bits(got["weights"], weights)


def _dedented(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())


def test_refusals():
    x = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match="chosen is 9; allowed: 1 to 8"):
        ops.route(x, 9, True)
    with pytest.raises(ValueError, match="chosen is 17; allowed: 1 to 16"):
        ops.route(jnp.zeros((2, 20)), 17, True)
    with pytest.raises(ValueError, match="logits has 513 experts; allowed: 1 to 512"):
        ops.route(jnp.zeros((2, 513)), 2, True)
    with pytest.raises(TypeError, match="logits has dtype bfloat16; it must be float32"):
        ops.route(x.astype(jnp.bfloat16), 2, True)
