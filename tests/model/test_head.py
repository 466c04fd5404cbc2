"""The MTP head against an independent float64 implementation (mtp_reference.py).

Carries come from our float32 trunk and go into both, so only the head is compared. Logits must
agree to 1e-5 of their scale (the largest absolute logit, 6 to 9 here), streams and cache rows to
1e-5 of their largest value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.model.state import AttentionState, DecodeState, HeadState
from tests.model import support
from tests.model.mtp_reference import HeadReference
from tests.tiny import prompt_ids, random_tensors

TOLERANCE = 1e-5
LENGTH = 37  # tokens consumed by the trunk: one past a block edge of both configurations
DRAFTS = 4
NAMES = pytest.mark.parametrize("name", ["tiny", "two_ple"])


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with support.quick_compilation():
        yield


@functools.cache
def consumed(name: str) -> tuple[np.ndarray, np.ndarray, DecodeState]:
    """Prompt of LENGTH + DRAFTS + 2 tokens, the trunk's streams of the first LENGTH, the state."""
    config, params = support.model(name)
    tokens = prompt_ids(support.CONFIGS[name], 0, LENGTH + DRAFTS + 2)
    assert config.eos_token_id in tokens[:LENGTH]
    state = support.fresh(config, head=True)
    streams, state, _ = support.prefill(params, tokens[:LENGTH], state, config, 64)
    return tokens, streams, state


def wide(streams: Any) -> np.ndarray:
    """Streams [T, C, H] as the reference's flat carries [T, D]."""
    return np.asarray(streams).reshape(len(streams), -1)


def apart(found: Any, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    found = np.asarray(found)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def reference(name: str) -> HeadReference:
    return HeadReference(support.CONFIGS[name], random_tensors(support.CONFIGS[name], 0))


@functools.cache
def taught(name: str) -> tuple[np.ndarray, np.ndarray, HeadReference]:
    """The reference's carries and logits of rows 0 to LENGTH - 1. Its rows are left in place."""
    tokens, streams, _ = consumed(name)
    head = reference(name)
    carries, _, logits = head.rows(tokens[1 : LENGTH + 1].tolist(), wide(streams), 0)
    return carries, logits, head


def by_prompt(
    name: str, chunk: int, tokens: np.ndarray, streams: np.ndarray
) -> tuple[np.ndarray, HeadState, list[Any]]:
    """Rows 0 to LENGTH - 1 by the prompt route: streams, the head's state, selected blocks."""
    config, params = support.model(name)
    head = support.fresh(config, head=True).head
    out, selected = [], []
    for begin in range(0, LENGTH, chunk):
        size = min(chunk, LENGTH - begin)
        part = np.zeros((1, chunk), np.int32)
        part[0, :size] = tokens[begin : begin + size]
        carries = np.ones((1, chunk, *streams.shape[1:]), np.float32)
        carries[0, :size] = streams[begin : begin + size]
        rows, head, trace = support.draft_prompt(
            *(params, part, jnp.asarray(carries), head),
            *(support.counts(begin), support.counts(size)),
            config=config,
        )
        out.append(np.asarray(rows[0, :size]))
        selected.append(np.asarray(trace.selected[0, :size]))
    return np.concatenate(out), head, selected


def by_rows(name: str, rows: int, upto: int) -> tuple[np.ndarray, HeadState]:
    """Rows 0 to ``upto`` - 1 decoded ``rows`` at once."""
    tokens, streams, _ = consumed(name)
    head, out = support.fresh(support.model(name)[0], head=True).head, []
    for begin in range(0, upto, rows):
        part = slice(begin, begin + rows)
        found, head = draft(name, tokens[1:][part], streams[part], head, begin)
        out.append(found)
    return np.concatenate(out), head


def draft(
    name: str, tokens: np.ndarray, carries: np.ndarray, head: HeadState, length: int
) -> tuple[np.ndarray, HeadState]:
    """Head rows that all stay: their streams [R, C, H] and the head's state after them."""
    config, params = support.model(name)
    rows, tape = support.draft_rows(
        *(params, support.ids(tokens), jnp.asarray(carries)[None], head),
        support.counts(length),
        config=config,
    )
    layer = support.commit(tape, support.counts(len(tokens)))
    return np.asarray(rows[0]), HeadState(layer=layer, carry=rows[:, -1])


def logits_of(name: str, streams: np.ndarray) -> np.ndarray:
    config, params = support.model(name)
    return np.asarray(support.draft_logits(params, jnp.asarray(streams), config=config))


def assert_rows_agree(name: str, streams: np.ndarray) -> None:
    carries, logits, _ = taught(name)
    count = len(streams)
    assert apart(wide(streams), carries[:count]) <= TOLERANCE
    assert apart(logits_of(name, streams), logits[:count]) <= TOLERANCE


def assert_cache_agrees(head: HeadState, expected: HeadReference, length: int, ratio: int) -> None:
    """Keys, values and the raw index keys of the open block."""
    cache = head.layer.mixer
    assert isinstance(cache, AttentionState)
    for ours, theirs in ((cache.keys, expected.keys), (cache.values, expected.values)):
        assert apart(np.moveaxis(np.asarray(ours[0, :, :length]), 0, 1), np.stack(theirs)) <= 1e-5
    pending = expected.index_keys[length // ratio * ratio :]
    if pending:
        assert apart(cache.pending[0, : len(pending)], np.stack(pending)) <= 1e-5
    assert not np.asarray(cache.pending[0, len(pending) :]).any()


@NAMES
@pytest.mark.parametrize("chunk", [64, 5])
def test_prompt_route(name: str, chunk: int) -> None:
    tokens, streams, _ = consumed(name)
    config, _ = support.model(name)
    found, head, selected = by_prompt(name, chunk, tokens[1:], streams)
    assert_rows_agree(name, found)
    _, _, expected = taught(name)
    assert_cache_agrees(head, expected, LENGTH, config.indexer_compress_ratio)
    ratio, pruned = config.indexer_compress_ratio, 0
    for row, blocks in enumerate(np.concatenate(selected)):
        # Float32 may not turn a choice around. A gap of exactly 0 is a tie of scores that the
        # relu made 0, where both sides have to take the lower block.
        assert expected.selection_gap(row) > 1e-4 or expected.selection_gap(row) == 0.0
        whole = (row + 1) // ratio
        tokens_read = {b * ratio + i for b in np.flatnonzero(blocks) for i in range(ratio)}
        tokens_read |= set(range(whole * ratio, row + 1))
        assert tokens_read == set(expected.selected_tokens(row))
        pruned += len(tokens_read) <= row
    assert pruned > 15


@NAMES
@pytest.mark.parametrize("rows", [1, 4])
def test_rows_route(name: str, rows: int) -> None:
    config, _ = support.model(name)
    found, head = by_rows(name, rows, LENGTH // rows * rows)
    assert_rows_agree(name, found)
    if LENGTH % rows == 0:
        assert_cache_agrees(head, taught(name)[2], LENGTH, config.indexer_compress_ratio)


@NAMES
def test_chain_of_drafts(name: str) -> None:
    """Row LENGTH - 1 from the trunk's carry, then each from the row before it."""
    tokens, streams, _ = consumed(name)
    _, head = by_rows(name, 1, LENGTH - 1)
    expected = reference(name)
    expected.rows(tokens[1:LENGTH].tolist(), wide(streams[:-1]), 0)
    drafts = expected.chain(int(tokens[LENGTH]), wide(streams)[-1], LENGTH - 1, DRAFTS)
    token, carry = int(tokens[LENGTH]), streams[-1]
    for step, (name_of_next, logits) in enumerate(drafts):
        rows, head = draft(name, np.array([token]), carry[None], head, LENGTH - 1 + step)
        found = logits_of(name, rows)
        assert apart(found[0], logits) <= TOLERANCE, step
        token, carry = int(found.argmax()), rows[0]
        assert token == name_of_next


def window(name: str, accepted: int, rewind: str) -> tuple[DecodeState, list[int], np.ndarray]:
    """One window of DRAFTS drafts of which ``accepted`` are kept.

    Returns the state, the emitted tokens, and the trunk's streams of all consumed ones.

    The head begins level with the trunk. Its draft rows are then forgotten in one of two ways:
    ``"earlier"`` goes on from the state before them; ``"in place"`` goes on from the cache they
    were written to, as a step that gives its buffers away must.
    """
    config, params = support.model(name)
    tokens, streams, state = consumed(name)
    _, head, _ = by_prompt(name, 64, tokens[1:], streams)
    state = state.replace(head=head)
    token, drafts = int(logits_of(name, np.asarray(head.carry)).argmax()), []
    drafted, carry = head, np.asarray(head.carry)
    for step in range(DRAFTS):
        drafts.append(token)
        # The last draft needs no row of its own; it gets one to make the rewind harder.
        rows, drafted = draft(name, np.array([token]), carry, drafted, LENGTH + step)
        token, carry = int(logits_of(name, rows).argmax()), rows
    if rewind == "in place":
        state = state.replace(head=head.replace(layer=drafted.layer.rewound(head.layer)))
    elif rewind == "forgotten":
        state = state.replace(head=drafted)
    verify = support.ids([tokens[LENGTH], *drafts])
    tape = support.decode_rows(params, verify, state, config=config)
    kept = support.counts(accepted + 1)
    state = support.commit(tape, kept)
    replacement = int(tokens[LENGTH + 1])
    emitted = [*drafts[:accepted], replacement]
    taught_with = emitted + [3] * (DRAFTS - accepted)
    state = support.extend_head(
        params, support.ids(taught_with), tape.streams, state, kept, config=config
    )
    streams = np.concatenate([streams, np.asarray(tape.streams[0, : accepted + 1])])
    return state, emitted, streams


@NAMES
@pytest.mark.parametrize("rewind", ["earlier", "in place"])
@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_catch_up_after_a_window(name: str, accepted: int, rewind: str) -> None:
    """Rows of the emitted tokens come from trunk carries; nothing fed with drafts is left."""
    config, _ = support.model(name)
    tokens, _, _ = consumed(name)
    state, emitted, streams = window(name, accepted, rewind)
    length = LENGTH + accepted + 1
    assert np.asarray(state.length).tolist() == [length]
    expected = reference(name)
    followers = [*tokens[1 : LENGTH + 1].tolist(), *emitted]
    carries, _, logits = expected.rows(followers, wide(streams), 0)
    assert state.head is not None
    assert apart(wide(state.head.carry), carries[-1:]) <= TOLERANCE
    assert apart(logits_of(name, np.asarray(state.head.carry)), logits[-1:]) <= TOLERANCE
    assert_cache_agrees(state.head, expected, length, config.indexer_compress_ratio)
    # And the next chain of drafts, over the blocks that the window has completed.
    head, carry, wide_carry = state.head, np.asarray(state.head.carry), carries[-1:]
    token = int(logits[-1].argmax())
    for step in range(DRAFTS):
        rows, head = draft(name, np.array([token]), carry, head, length + step)
        wide_carry, _, logits = expected.rows([token], wide_carry, length + step)
        assert apart(logits_of(name, rows), logits) <= TOLERANCE, step
        token, carry = int(logits[-1].argmax()), rows


@NAMES
def test_draft_rows_left_in_place_are_noticed(name: str) -> None:
    """Negative control: the head goes on from its drafted rows as if they were its own."""
    right, *_ = window(name, 1, "earlier")
    wrong, *_ = window(name, 1, "forgotten")
    states = [support.canonical(state).head.layer for state in (right, wrong)]
    assert support.worst_difference(*states) > 100 * TOLERANCE


@pytest.mark.parametrize("wrong", ["grouped norm", "after the mixer", "unshifted"])
def test_a_wrong_row_is_noticed(wrong: str) -> None:
    """Negative control: three ways to feed a row that public ports have got wrong.

    Streams normalised one by one: the RMS over all values of streams that have an RMS of one each
    is one, so carries prepared like this turn the head into the one with the grouped norm. What
    the trunk's mixer makes of the streams, on every stream. A row's own token, not the next one.
    """
    config, params = support.model("tiny")
    tokens, carries, _ = consumed("tiny")
    after = tokens if wrong == "unshifted" else tokens[1:]
    if wrong == "grouped norm":
        carries = carries / np.sqrt(np.square(carries).mean(axis=-1, keepdims=True))
    elif wrong == "after the mixer":
        identity = params | {"lm_head": {"weight": jnp.eye(config.hidden_size)}}
        mixed = support.logits_of(identity, jnp.asarray(carries), config=config)
        carries = np.broadcast_to(np.asarray(mixed)[:, None], carries.shape)
    found, _, _ = by_prompt("tiny", 64, after, carries)
    _, expected, _ = taught("tiny")
    assert apart(logits_of("tiny", found), expected) > 100 * TOLERANCE


@NAMES
def test_logits_come_from_the_heads_own_mixer(name: str) -> None:
    """Negative control: the trunk's mixer in its place."""
    config, params = support.model(name)
    tokens, streams, _ = consumed(name)
    found, _, _ = by_prompt(name, 64, tokens[1:], streams)
    wrong = np.asarray(support.logits_of(params, jnp.asarray(found), config=config))
    _, expected, _ = taught(name)
    assert apart(wrong, expected) > 100 * TOLERANCE
