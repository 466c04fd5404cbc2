"""Where cached rows and pending index keys go, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hipjax.model.state import AttentionState, write_rows
from tests.model import support


@settings(max_examples=60)
@given(
    st.sampled_from([1, 4, 7]),
    st.sampled_from([1, 3, 9]),
    st.sampled_from([(), (2,)]),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=2, max_size=2),
)
def test_write_rows(
    size: int, new: int, groups: tuple[int, ...], where: list[tuple[int, int]]
) -> None:
    starts = [start for start, _ in where]
    counts = [min(count, new) for _, count in where]
    cache = np.arange(2 * size * 3 * max(1, *groups, 0), dtype=np.float32)
    cache = -cache.reshape(2, *groups, size, 3) - 1
    rows = np.arange(2 * new * 3 * max(1, *groups, 0), dtype=np.float32)
    rows = rows.reshape(2, *groups, new, 3) + 1
    expected = cache.copy()
    for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for row in range(count):
            if start + row < size:
                expected[sequence, ..., start + row, :] = rows[sequence, ..., row, :]
    found = write_rows(
        jnp.asarray(cache), jnp.asarray(rows), support.counts(*starts), support.counts(*counts)
    )
    np.testing.assert_array_equal(found, expected)
    if any(start < size and count for start, count in zip(starts, counts, strict=True)):
        assert not np.array_equal(found, cache)


def pending_of(history: np.ndarray, ratio: int) -> np.ndarray:
    """The raw index keys [ratio - 1, width] after the last whole block of a sequence."""
    kept = np.zeros((ratio - 1, history.shape[1]), np.float32)
    tail = history[len(history) // ratio * ratio :]
    kept[: len(tail)] = tail
    return kept


@settings(max_examples=50)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3, 8]),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=2, max_size=2),
)
def test_pending_index_keys(ratio: int, new: int, where: list[tuple[int, int]]) -> None:
    """``aligned`` begins at the open block, ``keep_pending`` keeps what follows the last one."""
    width, rng = 3, np.random.default_rng(0)
    lengths = [length for length, _ in where]
    counts = [min(count, new) for _, count in where]
    history = rng.standard_normal((2, 40, width)).astype(np.float32)
    fresh = np.stack([row[n : n + new] for row, n in zip(history, lengths, strict=True)])
    before = np.stack([pending_of(row[:n], ratio) for row, n in zip(history, lengths, strict=True)])
    empty = jnp.zeros((2, 1, 8, width))
    state = AttentionState(empty, empty, empty[:, 0], jnp.asarray(before))
    length = support.counts(*lengths)
    aligned = state.aligned(jnp.asarray(fresh), length)
    assert aligned.shape[1] % ratio == 0
    after = state.keep_pending(aligned, length, length + support.counts(*counts)).pending
    for row, n, count, found, kept in zip(history, lengths, counts, aligned, after, strict=True):
        expected = row[n // ratio * ratio : n + new]
        np.testing.assert_array_equal(found[: len(expected)], expected)
        np.testing.assert_array_equal(kept, pending_of(row[: n + count], ratio))
