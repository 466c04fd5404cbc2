"""Caches: how rows are written, blocks are formed, capacity ends, and dead rows stay dead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.state import AttentionState, DecodeState
from tests.model import support
from tests.tiny import prompt_ids

TOLERANCE = 1e-5
NAMES = pytest.mark.parametrize("name", ["tiny", "two_ple"])


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with support.quick_compilation():
        yield


def attention_layers(state: DecodeState) -> list[AttentionState]:
    mixers = [layer.mixer for layer in state.layers]
    return [mixer for mixer in mixers if isinstance(mixer, AttentionState)]


@NAMES
def test_cached_equals_uncached(name: str) -> None:
    """The state does not tell how the tokens arrived: at once, in chunks, uneven, as rows."""
    config, params = support.model(name)
    tokens = prompt_ids(support.CONFIGS[name], 0, 61)
    streams, whole, _ = support.prefill(params, tokens, support.fresh(config), config, 64)
    expected = support.canonical(whole)
    assert np.asarray(whole.length).tolist() == [61]

    found, state, _ = support.prefill(params, tokens, support.fresh(config), config, 7)
    assert support.worst_difference(found, streams) <= TOLERANCE
    assert support.worst_difference(support.canonical(state), expected) <= TOLERANCE

    state, begin = support.fresh(config), 0
    for size in (5, 0, 7, 1, 2, 0, 3, 7, 7, 4, 6, 7, 7, 5):
        part = np.full(7, 1, np.int32)
        part[:size] = tokens[begin : begin + size]
        _, state, _ = support.prompt_chunk(
            params, support.ids(part), support.counts(size), state, config=config
        )
        begin += size
    assert begin == 61
    assert support.worst_difference(support.canonical(state), expected) <= TOLERANCE

    _, state, _ = support.prefill(params, tokens[:41], support.fresh(config), config, 7)
    found, state = support.step_rows(params, tokens[41:], state, config, 4)
    assert support.worst_difference(found, streams[41:]) <= TOLERANCE
    assert support.worst_difference(support.canonical(state), expected) <= TOLERANCE

    # Negative control: one token less, then another last token.
    _, state, _ = support.prefill(params, tokens[:60], support.fresh(config), config, 7)
    with pytest.raises(AssertionError, match="length"):
        support.worst_difference(support.canonical(state), expected)
    other = np.append(tokens[:60], (tokens[60] + 1) % 100)
    _, state, _ = support.prefill(params, other, support.fresh(config), config, 7)
    ours, theirs = (s.replace(layers=s.layers[-1:]) for s in (support.canonical(state), expected))
    assert support.worst_difference(ours, theirs) > 100 * TOLERANCE


def test_bfloat16_caches() -> None:
    """Bits in uint16, which the ways to the same state leave equal but for the last one."""
    config, params = support.model("tiny")
    tokens = prompt_ids(support.CONFIGS["tiny"], 0, 41)
    found = []
    for chunk, dtype in ((64, jnp.bfloat16), (7, jnp.bfloat16), (64, jnp.float32)):
        state = support.fresh(config, cache_dtype=dtype)
        _, state, _ = support.prefill(params, tokens, state, config, chunk)
        found.append(attention_layers(support.canonical(state)))
    for one, two, exact in zip(*found, strict=True):
        for field in ("keys", "values", "blocks", "pending"):
            layers = [getattr(each, field) for each in (one, two, exact)]
            assert [each.dtype for each in layers] == [jnp.uint16, jnp.uint16, jnp.float32]
            assert layers[0].shape == layers[1].shape == layers[2].shape
    # What the first attention layer caches depends on no cache but its own.
    one, two, exact = (layers[0] for layers in found)
    unit = 2.0**-8
    for field in ("keys", "values", "pending"):
        rounded = np.asarray(ops.decode(getattr(one, field)))
        wide = np.asarray(getattr(exact, field))
        wanted = wide.astype(jnp.bfloat16).astype(np.float32)
        # Two programs: float32 values that differ in their last bit may round apart.
        np.testing.assert_allclose(rounded, wanted, rtol=2 * unit, atol=1e-5)
        assert (rounded == wanted).mean() > 0.98
        assert (rounded == wide).mean() < 0.9
    for field in ("keys", "values", "blocks", "pending"):
        ours, theirs = (np.asarray(ops.decode(getattr(each, field))) for each in (one, two))
        np.testing.assert_allclose(ours, theirs, rtol=2 * unit, atol=1e-5)
        assert (ours == theirs).mean() > 0.98
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(ours * (1 + 4 * unit), theirs, rtol=2 * unit, atol=1e-5)


def test_stored_bits() -> None:
    values = jnp.array([0.0, 1.0, -2.5, 1 / 3, 1e-40, jnp.inf, 3e38, 1 + 2.0**-9])
    bits = ops.encode(values, jnp.dtype(jnp.uint16))
    expected = np.asarray(values).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(bits), expected.view(np.uint16))
    np.testing.assert_array_equal(ops.decode(bits), expected.astype(np.float32))
    assert (np.asarray(ops.encode(values, jnp.dtype(jnp.float32))) == np.asarray(values)).all()


def edge_state(capacity: int, lengths: tuple[int, int]) -> DecodeState:
    """Two sequences of the tiny model."""
    config, params = support.model("tiny")
    whole = np.stack([prompt_ids(support.CONFIGS["tiny"], seed, 24) for seed in (0, 1)])
    state = support.fresh(config, batch=2, capacity=capacity)
    _, state, _ = support.prompt_chunk(
        params, jnp.asarray(whole), support.counts(*lengths), state, config=config
    )
    return state


def poisoned(state: DecodeState, lengths: tuple[int, int], ratio: int) -> DecodeState:
    """The state with NaN in every dead row of its attention caches."""

    def fill(array: jax.Array, live: list[int]) -> jax.Array:
        index = jnp.arange(array.shape[-2])
        dead = jnp.stack([index >= number for number in live])
        dead = dead.reshape(2, *[1] * (array.ndim - 3), -1, 1)
        return jnp.where(dead, jnp.nan, array)

    layers = []
    for layer in state.layers:
        if isinstance(mixer := layer.mixer, AttentionState):
            blocks = [length // ratio for length in lengths]
            mixer = mixer.replace(
                keys=fill(mixer.keys, [*lengths]),
                values=fill(mixer.values, [*lengths]),
                blocks=fill(mixer.blocks, blocks),
            )
            assert np.isnan(mixer.keys).any()
        layers.append(layer.replace(mixer=mixer))
    return state.replace(layers=tuple(layers))


# Of one length, and of two: then the longer sequence decides how far the caches are read.
@pytest.mark.parametrize("lengths", [(9, 9), (20, 9)])
@pytest.mark.parametrize("route", ["rows", "prompt"])
def test_dead_rows_may_hold_anything(route: str, lengths: tuple[int, int]) -> None:
    config, params = support.model("tiny")
    clean = edge_state(26, lengths)
    tokens = jnp.arange(48, dtype=jnp.int32).reshape(2, 24)
    found = []
    for state in (clean, poisoned(clean, lengths, config.indexer_compress_ratio)):
        if route == "rows":
            tape = support.decode_rows(params, tokens[:, :4], state, config=config)
            state = support.commit(tape, support.counts(4, 2))
            streams = tape.streams
        else:
            streams, state, _ = support.prompt_chunk(
                params, tokens, support.counts(4, 2), state, config=config
            )
        found.append((streams[0, :4], streams[1, :2], support.canonical(state)))
    assert np.isfinite(np.asarray(found[0][1])).all()
    jax.tree.map(np.testing.assert_array_equal, found[1], found[0])


def assert_same_beginning(small: DecodeState, large: DecodeState) -> None:
    """Every cached row that the smaller state has room for is also in the larger one."""
    for ours, theirs in zip(attention_layers(small), attention_layers(large), strict=True):
        room = ours.keys.shape[2]
        whole = room // (ours.pending.shape[1] + 1)
        for a, b in (
            (ours.keys, theirs.keys[:, :, :room]),
            (ours.values, theirs.values[:, :, :room]),
            (ours.blocks[:, :whole], theirs.blocks[:, :whole]),
        ):
            assert support.worst_difference(a, b) <= TOLERANCE


def test_rows_past_the_capacity_are_dropped() -> None:
    """The first sequence has room for two of four rows: they count, and nothing is moved."""
    config, params = support.model("tiny")
    tokens = jnp.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    tapes = []
    for capacity in (26, 40):
        state = edge_state(capacity, (24, 20))
        tapes.append(support.decode_rows(params, tokens, state, config=config))
    small, large = (tape.streams for tape in tapes)
    assert support.worst_difference(small[0, :2], large[0, :2]) <= TOLERANCE
    assert support.worst_difference(small[1], large[1]) <= TOLERANCE
    kept = support.counts(2, 4)
    small, large = (support.canonical(support.commit(tape, kept)) for tape in tapes)
    assert np.asarray(small.length).tolist() == [26, 24]
    assert_same_beginning(small, large)
    assert support.worst_difference(small.carry, large.carry) <= TOLERANCE
    pending = [attention_layers(state)[0].pending for state in (small, large)]
    assert support.worst_difference(*pending) <= TOLERANCE
    with pytest.raises(AssertionError):
        assert_same_beginning(edge_state(26, (24, 20)), large)


@pytest.mark.parametrize("counts", [(2, 6), (2, 10), (10, 3)])
def test_a_padded_chunk_at_the_capacity(counts: tuple[int, int]) -> None:
    """A chunk is wider than the room left; only its real tokens have to fit."""
    config, params = support.model("tiny")
    tokens = jnp.arange(48, dtype=jnp.int32).reshape(2, 24)
    states, streams = [], []
    for capacity in (26, 40):
        out, state, _ = support.prompt_chunk(
            params, tokens, support.counts(*counts), edge_state(capacity, (24, 20)), config=config
        )
        states.append(support.canonical(state))
        streams.append([out[i, : 26 - length] for i, length in enumerate((24, 20))])
    assert_same_beginning(*states)
    for number, count in enumerate(counts):
        found, expected = (each[number][:count] for each in streams)
        assert support.worst_difference(found, expected) <= TOLERANCE


def test_initial_values() -> None:
    """Zeros, but the history of the n-grams begins with ends of sequence (model-spec 4)."""
    config, _ = support.model("two_ple")
    state = DecodeState.init(config, 9, batch=2)
    leaves = support.named_leaves(state)
    histories = {name: leaf for name, leaf in leaves.items() if name.endswith(".tokens")}
    assert len(histories) == 2
    assert all((leaf == config.eos_token_id).all() for leaf in histories.values())
    assert not any(leaves[name].any() for name in leaves.keys() - histories.keys())
    assert state.head is not None
    assert state.head.layer.mixer.keys.dtype == jnp.uint16
    assert [each.blocks.shape[1] for each in attention_layers(state)] == [5, 5]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"capacity": 0}, "capacity is 0; allowed: at least 1"),
        ({"batch": -1}, "batch is -1; allowed: at least 1"),
        ({"cache_dtype": jnp.float16}, "cache_dtype is .*float16.*; allowed: bfloat16, float32"),
    ],
)
def test_what_init_refuses(wrong: dict[str, Any], message: str) -> None:
    config, _ = support.model("tiny")
    with pytest.raises(ValueError, match=message):
        DecodeState.init(config, **({"capacity": 8} | wrong))


def test_no_memory_for_a_head_that_is_not_there() -> None:
    config: ModelConfig = dataclasses.replace(
        support.model("tiny")[0], mtp_num_hidden_layers=0, mtp_rope_theta=None
    )
    assert DecodeState.init(config, 8, head=False).head is None
    with pytest.raises(ValueError, match="no MTP head; pass head=False"):
        DecodeState.init(config, 8)
