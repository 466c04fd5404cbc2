"""Selection of blocks by kernels: exact, and a row's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import kernels, ops, reference_attention
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

BITS = np.dtype(np.uint16)  # of bfloat16


@pytest.fixture(autouse=True)
def by_kernels() -> Iterator[None]:
    with ops.implementation("kernel"):
        yield


def integers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Small integers: scores are exact in any order, and many of them tie, at 0 and elsewhere."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


def best(query: np.ndarray, keys: np.ndarray, visible: int, budget: int) -> list[int]:
    """The selection of one row [N, width] among keys [blocks, width], by float64 and a sort."""
    products = query.astype(np.float64) @ keys[: max(visible, 0)].astype(np.float64).T
    scores = np.maximum(products, 0).sum(axis=0)
    order = sorted(range(len(scores)), key=lambda k: (-scores[k], k))
    return sorted(order[:budget])


def lists(found: tuple[jax.Array, jax.Array]) -> list[list[int]]:
    """The lists of all rows; what lies past a count must be -1."""
    selected, count = map(np.asarray, found)
    rows = []
    for names, n in zip(selected.reshape(-1, selected.shape[-1]), count.reshape(-1), strict=True):
        assert (names[n:] == -1).all()
        rows.append(names[:n].tolist())
    return rows


@pytest.mark.parametrize("bits", [False, True])
def test_against_float64(bits: bool) -> None:
    blocks, differing = 1100, 0
    visible = np.array([[0, 5, 130, 1100], [64, 65, 1099, 700]], np.int32)
    dead = np.arange(blocks) >= visible.max(axis=1, keepdims=True)
    for heads, width in ((1, 5), (2, 16), (3, 12), (4, 128), (6, 33)):
        query, keys = integers(1, (2, 4, heads, width)), integers(2, (2, blocks, width))
        cache = jnp.asarray(np.where(dead[..., None], np.nan, keys))
        cache = ops.encode(cache, BITS) if bits else cache
        for budget in (1, 64, 512, 2000):
            arguments = (jnp.asarray(query), cache, jnp.asarray(visible), budget)
            found = lists(ops.select_blocks(*arguments))
            rows = list(np.ndindex(2, 4))
            assert found == [best(query[b, r], keys[b], visible[b, r], budget) for b, r in rows]
            higher = [
                sorted(visible[b, r] - 1 - k for k in best(query[b, r], seen[::-1], 9999, budget))
                for b, r in rows
                for seen in [keys[b, : visible[b, r]]]
            ]
            differing += sum(a != b for a, b in zip(found, higher, strict=True))
    # Negative control: the higher of equal blocks is another selection.
    assert differing > 20


def test_many_blocks() -> None:
    """Of the length of the released model's context, with scores that are close together."""
    rng = np.random.default_rng(5)
    blocks, width = 65_536, 16
    keys = rng.standard_normal((1, blocks, width)).astype(np.float32)
    query = rng.standard_normal((1, 2, 4, width)).astype(np.float32)
    visible = np.array([[blocks, 40_001]], np.int32)
    found = lists(ops.select_blocks(*map(jnp.asarray, (query, keys, visible)), 512))
    for r, names in enumerate(found):
        seen = int(visible[0, r])
        scores = np.maximum(query[0, r].astype(np.float64) @ keys[0, :seen].T, 0).sum(axis=0)
        chosen = np.zeros(seen, bool)
        chosen[names] = True
        assert chosen.sum() == 512
        # float32 may exchange scores that agree to 1e-5.
        assert scores[chosen].min() > scores[~chosen].max() - 1e-5


def test_extreme_scores() -> None:
    """-0, denormals, infinities; a NaN comes last and crashes nothing."""
    scores = np.array(
        [0.0, -0.0, 1e-45, np.nan, np.inf, 1e30, 3e-39, -5.0, np.inf, np.nan, 2.0, 0.0], np.float32
    )
    query, keys = np.ones((1, 1, 1, 1), np.float32), scores[None, :, None]
    order = [4, 8, 5, 10, 6, 2, 0, 1, 7, 11, 3, 9]
    for budget in range(1, len(order)):
        seen = jnp.full((1, 1), len(order), jnp.int32)
        found = lists(ops.select_blocks(jnp.asarray(query), jnp.asarray(keys), seen, budget))
        assert found == [sorted(order[:budget])]


def drawn(rows: int, blocks: int = 700) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(7)
    query = rng.standard_normal((1, rows, 4, 24)).astype(np.float32)
    keys = rng.standard_normal((1, blocks, 24)).astype(np.float32)
    visible = (blocks - rows + np.arange(rows)[None]).astype(np.int32)
    return jnp.asarray(query), jnp.asarray(keys), jnp.asarray(visible)


@pytest.mark.parametrize("other", [np.nan, np.inf, 1e30])
def test_a_row_is_a_row(other: float) -> None:
    for rows in (*range(1, 10), 17, 33):
        query, keys, visible = drawn(rows)
        for r in range(rows):
            mixed = jnp.where((jnp.arange(rows) == r)[:, None, None], query, other)
            found = ops.select_blocks(mixed, keys, visible, 64)
            alone = ops.select_blocks(query[:, r : r + 1], keys, visible[:, r : r + 1], 64)
            assert_same_bits(found[0][:, r], alone[0][:, 0])
            assert_same_bits(found[1][:, r], alone[1][:, 0])
            assert sorted(set(lists(alone)[0])) == lists(alone)[0]


def test_capacity_does_not_matter() -> None:
    query, keys, visible = drawn(3)
    wanted = ops.select_blocks(query, keys, visible, 64)
    room = jnp.full((1, 5000, 24), jnp.nan).at[:, : keys.shape[1]].set(keys)
    chex.assert_trees_all_equal(ops.select_blocks(query, room, visible, 64), wanted)


def test_transformations() -> None:
    query, keys, visible = drawn(4)
    wanted = ops.select_blocks(query, keys, visible, 64)
    chosen = jax.jit(lambda *a: ops.select_blocks(*a, 64))
    chex.assert_trees_all_equal(chosen(query, keys, visible), wanted)
    each = jax.vmap(lambda q, v: ops.select_blocks(q[None, None], keys, v[None, None], 64))
    for found, want in zip(each(query[0], visible[0]), wanted, strict=True):
        assert_same_bits(found[:, 0, 0], want[0])

    def step(carry: int, row: tuple[jax.Array, jax.Array]) -> tuple[int, jax.Array]:
        return carry, ops.select_blocks(row[0][None, None], keys, row[1][None, None], 64)[0][0, 0]

    assert_same_bits(jax.lax.scan(step, 0, (query[0], visible[0]))[1], wanted[0][0])


def test_instruction_sets() -> None:
    query, keys, visible = drawn(3)
    code = """
    from hipjax.ffi.kernels import select_blocks
    got = select_blocks(given["query"], given["keys"], given["visible"], 64)
    results["selected"], results["count"] = got
    """
    wanted = ops.select_blocks(query, keys, visible, 64)
    for name in instruction_sets():
        found = bits_under(name, code, query=query, keys=keys, visible=visible)
        assert_same_bits(found["selected"], wanted[0])
        assert_same_bits(found["count"], wanted[1])


def test_reference_agrees() -> None:
    query, keys = integers(3, (2, 3, 2, 8)), integers(4, (2, 90, 8))
    visible = np.array([[3, 90, 77], [40, 0, 8]], np.int32)
    arguments = tuple(map(jnp.asarray, (query, keys, visible)))
    for budget in (4, 100):
        chex.assert_trees_all_equal(
            ops.select_blocks(*arguments, budget),
            reference_attention.select_blocks(*arguments, budget),
        )


def test_what_is_refused() -> None:
    # Unwrapped, since the test run's checks of annotations would come first.
    select_blocks = inspect.unwrap(kernels.select_blocks)
    query, keys, visible = drawn(2)
    with pytest.raises(ValueError, match=r"visible has shape \(1, 1\); allowed: \(1, 2\)"):
        select_blocks(query, keys, visible[:, :1], 4)
    with pytest.raises(ValueError, match="budget is 0; allowed: at least 1"):
        select_blocks(query, keys, visible, 0)
    with pytest.raises(TypeError, match="blocks has dtype bfloat16; allowed: float32, or uint16"):
        select_blocks(query, keys.astype(jnp.bfloat16), visible, 4)
    with pytest.raises(ValueError, match="query has width 241; allowed: at most 240"):
        select_blocks(jnp.zeros((1, 1, 1, 241)), jnp.zeros((1, 9, 241)), visible[:, :1], 4)
