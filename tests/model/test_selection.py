"""Selection of blocks and attention over it, piece by piece, against NumPy.

The tiny models fit into one piece of every loop, so these tests shrink the pieces. The last one
is then moved back and overlaps the one before it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipjax.ffi import ops
from hipjax.ffi import reference_attention as reference
from hipjax.model import attention, selection
from hipjax.model.state import AttentionState

BATCH, ROWS, HEADS, WIDTH = 2, 3, 2, 4
BLOCKS, RATIO = 10, 4
PIECES = pytest.mark.parametrize("piece", [4, 64])


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Index queries and block keys of small integers: many scores tie, at 0 and elsewhere."""
    rng = np.random.default_rng(seed)
    query = rng.integers(-1, 2, (BATCH, ROWS, HEADS, WIDTH)).astype(np.float32)
    return query, rng.integers(-1, 2, (BATCH, BLOCKS, WIDTH)).astype(np.float32)


def best_blocks(
    query: np.ndarray, keys: np.ndarray, visible: np.ndarray, budget: int
) -> list[list[list[int]]]:
    """Per sequence and row the selected blocks, best first, the lower one of equal scores."""
    products = np.maximum(np.einsum("brnd,bkd->brnk", query, keys), 0).sum(axis=2)
    return [
        [
            sorted(range(visible[b, r]), key=lambda k, s=products[b, r]: (-s[k], k))[:budget]
            for r in range(ROWS)
        ]
        for b in range(BATCH)
    ]


@PIECES
def test_selection_is_exact(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK_PIECE", piece)
    ties = 0
    for seed in range(12):
        query, keys = drawn(seed)
        rng = np.random.default_rng(seed)
        visible = rng.integers(0, BLOCKS + 1 if seed % 2 else 4, (BATCH, ROWS)).astype(np.int32)
        dead = np.arange(BLOCKS) >= visible.max(axis=1, keepdims=True)
        stored = jnp.asarray(np.where(dead[..., None], np.nan, keys))
        arguments = (jnp.asarray(query), stored, jnp.asarray(visible))
        for budget in (1, 3, 12):
            expected = best_blocks(query, keys, visible, budget)
            names, count = map(np.asarray, reference.select_blocks(*arguments, budget))
            by_kernel = map(np.asarray, ops.select_blocks(*arguments, budget))
            for found, wanted in zip(by_kernel, (names, count), strict=True):
                np.testing.assert_array_equal(found, wanted)
            mask = np.asarray(selection.selected_mask(*arguments, budget))
            for b in range(BATCH):
                for r in range(ROWS):
                    assert names[b, r][: count[b, r]].tolist() == sorted(expected[b][r])
                    assert np.flatnonzero(mask[b, r]).tolist() == sorted(expected[b][r])
            scores = np.asarray(reference.block_scores(arguments[0], jnp.asarray(keys)))
            ties += sum(len(set(row[:v])) < v for row, v in zip(scores[0], visible[0], strict=True))
    assert ties > 50


def test_another_rule_for_ties_is_noticed() -> None:
    """Negative control: the higher block on ties is a different selection."""
    differing = 0
    for seed in range(12):
        query, keys = drawn(seed)
        everything = np.full((BATCH, ROWS), BLOCKS, np.int32)
        lower = best_blocks(query, keys, everything, 3)
        higher = best_blocks(query, keys[:, ::-1], everything, 3)
        mirrored = [[sorted(BLOCKS - 1 - k for k in row) for row in rows] for rows in higher]
        differing += [[sorted(row) for row in rows] for rows in lower] != mirrored
    assert differing > 6


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 3))
def test_listed_tokens(ratio: int, position: int, chosen: int) -> None:
    """The tokens of the blocks, the tail after the last whole one, and nothing else."""
    whole = (position + 1) // ratio
    count = min(chosen, whole)
    names = np.full(3, -1, np.int32)
    names[:count] = whole - 1 - np.arange(count)[::-1]
    tokens, visible = reference.listed_tokens(
        jnp.asarray(names)[None, None],
        jnp.full((1, 1), count, jnp.int32),
        jnp.full((1, 1), position, jnp.int32),
        ratio,
    )
    tokens, visible = np.asarray(tokens[0, 0]), np.asarray(visible[0, 0])
    inside = [int(n) * ratio + i for n in names[:count] for i in range(ratio)]
    assert tokens[visible].tolist() == [*inside, *range(whole * ratio, position + 1)]
    # The others may be read, so they have to be something that is there.
    assert (tokens[~visible] == position).all()


def dense(
    query: np.ndarray, cache: AttentionState, seen: np.ndarray, heads_per_group: int
) -> np.ndarray:
    """Attention [B, T, N, width] over the tokens in ``seen`` [B, T, S], in float64."""
    out = np.zeros(query.shape)
    keys, values = np.asarray(cache.keys, np.float64), np.asarray(cache.values, np.float64)
    for b, t in np.ndindex(query.shape[:2]):
        at = np.flatnonzero(seen[b, t])
        for n in range(query.shape[2]) if at.size else ():
            scores = keys[b, n // heads_per_group, at] @ query[b, t, n] / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights / weights.sum() @ values[b, n // heads_per_group, at]
    return out


@pytest.mark.parametrize("piece", [16, 1024])
@pytest.mark.parametrize("lengths", [(0, 0), (25, 31), (3, 30)])
def test_chunk_attends_to_its_selection(
    piece: int, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six queries after ``lengths`` tokens, against float64; also each as a row of its own."""
    monkeypatch.setattr(attention, "_KEY_PIECE", piece)
    rng = np.random.default_rng(sum(lengths))
    capacity, count, groups, heads = 41, 6, 2, 4
    positions = np.array(lengths, np.int32)[:, None] + np.arange(count, dtype=np.int32)
    query = 3 * rng.standard_normal((2, count, heads, 8)).astype(np.float32)
    rows = rng.standard_normal((2, 2, groups, capacity, 8)).astype(np.float32)
    ratio, blocks = RATIO, -(-capacity // RATIO)
    cache = AttentionState(
        jnp.asarray(rows[0]),
        jnp.asarray(rows[1]),
        jnp.zeros((2, blocks, 4)),
        jnp.zeros((2, ratio - 1, 4)),
    )
    whole = (positions + 1) // ratio
    chosen = (rng.random((2, count, blocks)) < 0.4) & (np.arange(blocks) < whole[..., None])
    index = np.arange(capacity)
    tail = (index >= whole[..., None] * ratio) & (index <= positions[..., None])
    seen = chosen[..., index // ratio] | tail
    expected = dense(query, cache, seen, heads // groups)
    end = jnp.array(lengths) + count
    found = attention.attend_chunk(
        *(jnp.asarray(query), cache, jnp.asarray(chosen), jnp.asarray(positions)), end
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)
    room = int(seen.sum(axis=-1).max())
    tokens = np.repeat(positions[..., None], room, axis=-1)
    visible = np.zeros(tokens.shape, bool)
    for b, t in np.ndindex(positions.shape):
        at = np.flatnonzero(seen[b, t])
        tokens[b, t, : at.size], visible[b, t, : at.size] = at, True
    some = visible.any(axis=-1)
    listed = reference.attend_rows(
        *(jnp.asarray(query), cache.keys, cache.values),
        *(jnp.asarray(tokens), jnp.asarray(visible)),
    )
    np.testing.assert_allclose(np.asarray(listed)[some], expected[some], atol=2e-6)
    # Negative control: one token more for every query.
    more = dense(query, cache, seen | (index == 0), heads // groups)
    if not seen[..., 0].all():
        assert np.abs(np.asarray(found) - more).max() > 1e-2


def test_a_piece_at_the_end_is_moved_back() -> None:
    array = jnp.arange(10.0)[None, :, None]
    for begin, first in ((0, 0), (4, 4), (8, 6)):
        rows, index = reference.piece_at(array, jnp.int32(begin), 4)
        assert np.asarray(index).tolist() == list(range(first, first + 4))
        assert np.asarray(rows[0, :, 0]).tolist() == list(range(first, first + 4))


def test_pieces_past_what_is_visible_are_skipped() -> None:
    for visible, expected in ((1, [0]), (4, [0]), (5, [0, 4]), (9, [0, 4, 8]), (99, [0, 4, 8])):
        total = reference.in_pieces(
            lambda carry, begin: carry.at[begin].set(1), jnp.zeros(12), 10, 4, jnp.int32(visible)
        )
        assert np.flatnonzero(np.asarray(total)).tolist() == expected
