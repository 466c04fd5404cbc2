"""Rows decoded at once, and the state after any number of them, against plain decoding.

Everything runs on a batch of four sequences whose lengths leave every remainder by the block
size. All values must agree to 1e-5 of their array's largest, all integers exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.model.state import DecodeState, HeadState
from tests.model import support
from tests.tiny import prompt_ids

TOLERANCE = 1e-5
LENGTHS = (20, 21, 22, 23)
STEPS = 8
BATCH = len(LENGTHS)
NAMES = pytest.mark.parametrize("name", ["tiny", "two_ple"])


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with support.quick_compilation():
        yield


class Plain(NamedTuple):
    """Plain decoding of STEPS tokens: tokens [B, STEPS + 1], streams [B, STEPS, C, H], states.

    The state at ``i`` is that after ``i`` tokens; the head is level with the trunk in all of them.
    The last token is the follower of the last step.
    """

    tokens: np.ndarray
    streams: np.ndarray
    states: list[DecodeState]


def sequences(name: str) -> np.ndarray:
    """Four sequences [B, 32] with end-of-sequence ids in the prompts and in the steps."""
    rows = [prompt_ids(support.CONFIGS[name], seed, 32).copy() for seed in range(BATCH)]
    eos = support.model(name)[0].eos_token_id
    for row, length in zip(rows, LENGTHS, strict=True):
        row[length - 1], row[length + 3] = 7, eos
    rows[1][LENGTHS[1] - 1] = eos  # the history begins with it, ends with it, or has none
    rows[2][LENGTHS[2] - 2] = eos
    return np.stack(rows)


@functools.cache
def plain(name: str) -> Plain:
    config, params = support.model(name)
    whole = sequences(name)
    lengths = support.counts(*LENGTHS)
    state = support.fresh(config, batch=BATCH, head=True)
    padded = jnp.asarray(whole[:, :24])
    streams, state, _ = support.prompt_chunk(params, padded, lengths, state, config=config)
    shifted = jnp.asarray(whole[:, 1:25])
    head = state.head
    _, head, _ = support.draft_prompt(
        params, shifted, streams, head, lengths * 0, lengths, config=config
    )
    state = state.replace(head=head)
    tokens = np.stack([row[n : n + STEPS + 1] for row, n in zip(whole, LENGTHS, strict=True)])
    states, found = [state], []
    for step in range(STEPS):
        now, after = jnp.asarray(tokens[:, step : step + 1]), tokens[:, step + 1 : step + 2]
        tape = support.decode_rows(params, now, state, config=config)
        one = support.counts(*[1] * BATCH)
        state = support.commit(tape, one)
        state = support.extend_head(
            params, jnp.asarray(after), tape.streams, state, one, config=config
        )
        states.append(state)
        found.append(np.asarray(tape.streams))
    return Plain(tokens, np.concatenate(found, axis=1), states)


@functools.cache
def at_once(name: str, rows: int) -> Any:
    """The tape of the first ``rows`` tokens, decoded together."""
    config, params = support.model(name)
    expected = plain(name)
    now = jnp.asarray(expected.tokens[:, :rows])
    return support.decode_rows(params, now, expected.states[0], config=config)


def extended(name: str, rows: int, kept: jax.Array) -> DecodeState:
    """The state after ``kept`` of the rows, the head brought level."""
    config, params = support.model(name)
    tape = at_once(name, rows)
    after = plain(name).tokens[:, 1 : rows + 1].copy()
    for row, number in zip(after, np.asarray(kept), strict=True):
        row[number:] = 1  # what lies past the verdict must not matter
    state = support.commit(tape, kept)
    return support.extend_head(params, jnp.asarray(after), tape.streams, state, kept, config=config)


def trunk_apart(found: DecodeState, expected: DecodeState) -> float:
    """Largest difference of two states without their heads."""
    pair = (support.canonical(state).replace(head=None) for state in (found, expected))
    return support.worst_difference(*pair)


def picked(states: list[DecodeState], kept: list[int]) -> DecodeState:
    """For every sequence, its part of the state after ``kept`` of its tokens."""
    chosen = [states[number] for number in kept]
    return jax.tree.map(lambda *each: jnp.stack([e[i] for i, e in enumerate(each)]), *chosen)


@pytest.mark.parametrize("rows", range(2, STEPS + 1))
def test_rows_equal_single_steps(rows: int) -> None:
    """Streams, and every array of the state after each accepted count."""
    expected = plain("tiny")
    tape = at_once("tiny", rows)
    streams = expected.streams[:, :rows]
    assert support.worst_difference(np.asarray(tape.streams), streams) <= TOLERANCE
    for kept in range(rows + 1):
        state = support.commit(tape, support.counts(*[kept] * BATCH))
        assert trunk_apart(state, expected.states[kept]) <= TOLERANCE, kept


@NAMES
def test_with_the_head_and_a_verdict_per_sequence(name: str) -> None:
    rows = 5
    expected = plain(name)
    streams = expected.streams[:, :rows]
    assert support.worst_difference(np.asarray(at_once(name, rows).streams), streams) <= TOLERANCE
    for first in range(rows + 1):
        kept = [(first + 2 * i) % (rows + 1) for i in range(BATCH)]
        state = extended(name, rows, support.counts(*kept))
        wanted = picked(expected.states, kept)
        assert np.asarray(state.length).tolist() == [
            length + number for length, number in zip(LENGTHS, kept, strict=True)
        ]
        both = (support.canonical(each) for each in (state, wanted))
        assert support.worst_difference(*both) <= TOLERANCE, kept


@NAMES
def test_history_of_the_ngrams(name: str) -> None:
    """The last ids, and whether an end of sequence lies among them, are exact."""
    config, _ = support.model(name)
    whole = sequences(name)
    seen = set()
    for kept in range(6):
        state = extended(name, 5, support.counts(*[kept] * BATCH))
        for number, (row, length) in enumerate(zip(whole, LENGTHS, strict=True)):
            last = row[length + kept - 2 : length + kept]
            for layer in state.layers:
                if layer.ple is not None:
                    np.testing.assert_array_equal(layer.ple.tokens[number], last)
            seen.add(tuple((last == config.eos_token_id).tolist()))
    assert seen >= {(False, False), (True, False), (False, True)}


@NAMES
def test_one_more_or_less_is_noticed(name: str) -> None:
    """Negative control: every layer's state tells neighbouring accepted counts apart."""
    right = support.canonical(extended(name, 5, support.counts(3, 3, 3, 3)))
    for kept in (2, 4):
        wrong = support.canonical(picked(plain(name).states, [kept] * BATCH))
        ours, theirs = (support.named_leaves(state) for state in (right, wrong))
        differing = {key for key in ours if not np.allclose(ours[key], theirs[key], atol=1e-3)}
        # A block or a pending key moves at some of the counts only, but always for one of four
        # sequences; the ids of the history differ too.
        assert differing == set(ours), set(ours) - differing


@NAMES
def test_a_batch_equals_each_sequence_alone(name: str) -> None:
    config, params = support.model(name)
    expected = plain(name)
    whole = sequences(name)
    for number, length in enumerate(LENGTHS):
        tokens = whole[number]
        state = support.fresh(config)
        _, state, _ = support.prefill(params, tokens[:length], state, config, 24)
        alone = expected.tokens[number, :4]
        streams, state = support.step_rows(params, alone, state, config, 1)
        batched = expected.streams[number, :4]
        assert support.worst_difference(streams, batched) <= TOLERANCE
        one = jax.tree.map(lambda leaf, n=number: leaf[n][None], expected.states[4])
        assert trunk_apart(state, one) <= TOLERANCE
        other = jax.tree.map(lambda leaf, n=number: leaf[n - 1][None], expected.states[4])
        with pytest.raises(AssertionError):
            assert trunk_apart(state, other) <= TOLERANCE


def test_a_sequence_does_not_see_its_neighbours() -> None:
    """Its streams keep their bits when the other sequences of the batch change."""
    config, params = support.model("tiny")
    expected = plain("tiny")
    tokens = expected.tokens[:, :5].copy()
    tokens[[0, 1, 3]] = tokens[[0, 1, 3]][:, ::-1]
    order = jnp.array([1, 0, 2, 0])
    mixed = jax.tree.map(lambda leaf: leaf[order], expected.states[0])
    now = jnp.asarray(tokens)
    tape = support.decode_rows(params, now, mixed, config=config)
    before = at_once("tiny", 5).streams
    np.testing.assert_array_equal(tape.streams[2], before[2])
    assert not np.array_equal(tape.streams[1], before[1])


def test_later_rows_do_not_reach_earlier_ones() -> None:
    """A row keeps its bits whatever the rows after it hold."""
    config, params = support.model("tiny")
    expected = plain("tiny")
    tokens = expected.tokens[:, :5].copy()
    tokens[:, 3:] = 9
    now = jnp.asarray(tokens)
    tape = support.decode_rows(params, now, expected.states[0], config=config)
    before = at_once("tiny", 5).streams
    np.testing.assert_array_equal(tape.streams[:, :3], before[:, :3])
    assert not np.array_equal(tape.streams[:, 3], before[:, 3])


def test_head_rows_at_once_equal_single_ones() -> None:
    """Several head rows in one call, on a batch: what ``extend`` relies on."""
    config, params = support.model("tiny")
    expected = plain("tiny")
    carries = jnp.asarray(expected.streams[:, :5])
    after = jnp.asarray(expected.tokens[:, 1:6])
    head, lengths = expected.states[0].head, support.counts(*LENGTHS)
    streams, _ = support.draft_rows(params, after, carries, head, lengths, config=config)
    for step in range(5):
        found, tape = support.draft_rows(
            *(params, after[:, step : step + 1], carries[:, step : step + 1], head),
            lengths + step,
            config=config,
        )
        layer = support.commit(tape, support.counts(*[1] * BATCH))
        head = HeadState(layer=layer, carry=found[:, -1])
        assert support.worst_difference(found[:, 0], streams[:, step]) <= TOLERANCE
