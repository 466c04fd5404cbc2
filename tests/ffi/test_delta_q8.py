"""The recurrent state in eight bits: codes by the formula, rows as steps, the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hipjax
from hipjax.ffi import ops, reference_delta
from hipjax.model.state import Q8, DecodeState
from hipjax.model.trunk import trunk_prompt, trunk_rows
from tests.ffi import deltas, support
from tests.ffi.deltas import SIZES, Sizes

NAMES = pytest.mark.parametrize("name", SIZES)
NEAREST = pytest.mark.parametrize("nearest", [False, True], ids=["noise", "nearest"])
# decoding-spec 19: (head, value channel, key channel, frame) and the noise there.
WORKED = {
    (0, 0, 0, 0): 0.2360680,
    (0, 0, 1, 0): 0.1773255,
    (0, 1, 0, 0): 0.2785669,
    (1, 0, 0, 0): 0.3267717,
    (0, 0, 0, 1): 0.1355241,
}


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    with ops.implementation("kernel"):
        yield


def noise(head: int, channel: int, key: int, frame: int) -> float:
    """Decoding-spec 13.2 in Python's integers."""
    x = (head * 1664525 + channel * 1013904223 + key * 214013 + frame * 2531011) % 2**32
    x = (x * 1664525 + 1013904223) % 2**32
    return (x >> 8) / 2**24


def quantised(state: np.ndarray, frame: int, nearest: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, values, keys] and scales of a state [N, keys, values], in float32 throughout."""
    heads, keys, values = state.shape
    codes = np.zeros((heads, values, keys), np.int8)
    scales = np.zeros((heads, values), np.float32)
    one27 = np.float32(127)
    with np.errstate(all="ignore"):
        for h in range(heads):
            for v in range(values):
                row = state[h, :, v]
                peak = np.abs(row).max()
                scales[h, v] = peak / one27 if peak else 1
                exact = row * (one27 / peak if peak else np.float32(0))
                if nearest:
                    whole = np.round(exact)
                else:
                    added = [noise(h, v, k, frame) for k in range(keys)]
                    whole = np.floor(exact + np.array(added, np.float32))
                codes[h, v] = np.nan_to_num(np.clip(whole, -128, 127), nan=0)
    return codes, scales


def from_nothing(
    key: np.ndarray, correction: np.ndarray, frame: int, nearest: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales that a commit writes for the state ``key`` times ``correction``.

    ``key`` is [keys], ``correction`` [N, values]; both are float32.
    """
    heads, values = correction.shape
    given = deltas.rows_of(Sizes(1, heads, key.size, values), 1, 1) | {
        "key": key[None, None, None],
        "correction": correction[None, None],
        "codes": np.zeros((1, heads, values, key.size), np.int8),
        "scales": np.ones((1, heads, values), np.float32),
        "length": np.array([frame], np.int32),
    }
    _, codes, scales = deltas.commit(given, 1, nearest)
    return np.asarray(codes)[0], np.asarray(scales)[0]


def test_worked_noise() -> None:
    for place, wanted in WORKED.items():
        assert abs(noise(*place) - wanted) < 1e-7
        head, channel, key, frame = place
        found = reference_delta.rounding_noise(jnp.array([frame]), (2, 2, 2))[0, head, channel, key]
        assert float(found) == noise(*place)


def test_the_kernel_adds_that_noise() -> None:
    """A value whose fraction lies on either side of 1 - noise goes down or up."""
    for (head, channel, key, frame), wanted in WORKED.items():
        for side, code in ((-1e-4, 10), (1e-4, 11)):
            row = np.zeros(32, np.float32)
            row[31], row[key] = 127, 11 - wanted + side
            correction = np.ones((2, 2), np.float32)
            codes, scales = from_nothing(row, correction, frame, False)
            assert codes[head, channel, key] == code
            assert scales[head, channel] == 1


@NEAREST
@pytest.mark.parametrize("keys", [5, 16, 32, 64, 128, 200])
def test_codes_by_the_formula(keys: int, nearest: bool) -> None:
    """Zeros, one huge value, denormals, ordinary numbers: every code and scale."""
    rng = np.random.default_rng(keys)
    key = rng.standard_normal(keys).astype(np.float32)
    huge = key.copy()
    huge[keys // 2] = 1e30
    for row in (key, huge, np.zeros_like(key)):
        correction = rng.standard_normal((2, 45)).astype(np.float32)
        correction[0, 0], correction[1, 44] = 0, -0.0
        correction[0, 1], correction[1, 43], correction[1, 42] = 1e-42, 1e-36, 1e-45
        for frame in (0, 1, 77_777, 262_143):
            found = from_nothing(row, correction, frame, nearest)
            with np.errstate(all="ignore"):
                state = (row[None, :, None] * correction[:, None]).astype(np.float32)
            wanted = quantised(state, frame, nearest)
            for ours, theirs in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert (found[1] == 1).all() and not found[0].any()  # the last state was zero
    if not nearest:
        ramp = state + np.linspace(0.1, 1, keys, dtype=np.float32)[None, :, None]
        other = quantised(ramp, frame + 1, nearest)
        with pytest.raises(AssertionError):
            np.testing.assert_array_equal(quantised(ramp, frame, nearest)[0], other[0])


def test_what_is_not_finite_stays_so() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        correction = np.ones((2, 40), np.float32)
        correction[1, 33] = bad
        codes, scales = from_nothing(np.ones(32, np.float32), correction, 5, False)
        with np.errstate(invalid="ignore"):
            values = scales[..., None] * codes
        assert np.isnan(values[1, 33]).all()
        assert np.isfinite(np.delete(values.reshape(80, -1), 73, axis=0)).all()


@NAMES
@NEAREST
def test_rows_equal_steps(name: str, nearest: bool) -> None:
    """Row r of R has the bits of a step after r others; any number kept is so many commits."""
    given = deltas.rows_of(SIZES[name], 2, 8)
    alone, states = deltas.stepped(given, nearest=nearest)
    for number in range(1, 9):
        some = {key: x[:, :number] if key in deltas.PER_ROW else x for key, x in given.items()}
        found = deltas.rows(some, nearest=nearest)
        for row in range(number):
            for ours, theirs in zip(found, alone[row], strict=True):
                support.assert_same_bits(ours[:, row], theirs)
        tape = some | {"correction": found[1]}
        for kept in range(number + 1) if number in (1, 8) else (number,):
            after = deltas.commit(tape, kept, nearest)
            for ours, part in zip(after, ("past", "codes", "scales"), strict=True):
                support.assert_same_bits(ours, states[kept][part])
    # Negative controls: one token less, and the right tokens at other positions.
    with pytest.raises(AssertionError):
        support.assert_same_bits(after[1], states[7]["codes"])
    if not nearest:
        moved = deltas.commit(tape | {"length": given["length"] + np.int32(1)}, 8, nearest)
        with pytest.raises(AssertionError):
            support.assert_same_bits(moved[1], after[1])


@NEAREST
def test_rows_against_a_rounded_model(nearest: bool) -> None:
    """The recurrence in float64 on the state that the codes stand for, row by row."""
    given = deltas.rows_of(SIZES["nano"], 1, 1)
    floats = np.asarray(
        ops.delta_dequantised(jnp.asarray(given["codes"]), jnp.asarray(given["scales"]))
    )
    found = deltas.rows(given, nearest=nearest)
    wanted = deltas.rows(given | {"state": floats})
    for ours, theirs in zip(found, wanted, strict=True):  # the output is read before rounding
        support.assert_same_bits(ours, theirs)
    after = deltas.commit(given | {"correction": found[1]}, 1, nearest)
    exact = deltas.commit(given | {"correction": found[1], "state": floats}, 1)[1]
    codes, scales = quantised(np.asarray(exact)[0], int(given["length"][0]), nearest)
    support.assert_same_bits(after[1][0], codes)
    support.assert_same_bits(after[2][0], scales)


def test_other_rows_and_sequences() -> None:
    for bad in (np.nan, np.inf, 1e30):
        clean = deltas.rows_of(SIZES["nano"], 2, 4)
        wanted = deltas.rows(clean, nearest=False)
        dirty = {key: x.copy() for key, x in clean.items()}
        for key in ("query", "key", "value", "gate", "strength"):
            dirty[key][0, 2:] = bad
        found = deltas.rows(dirty, nearest=False)
        for ours, theirs in zip(found, wanted, strict=True):
            support.assert_same_bits(ours[0, :2], theirs[0, :2])
            support.assert_same_bits(ours[1], theirs[1])


def test_vmap() -> None:
    given = deltas.rows_of(SIZES["nano"], 3, 2)
    names = ("key", "value", "decay", "past", "columns", "kept", "codes", "scales", "length")
    tape = deltas.picked(given | {"kept": np.array([2, 0, 1], np.int32)}, *names)
    wanted = ops.delta_commit_q8(*tape, False)

    def alone(*one: jax.Array) -> list[jax.Array]:
        return [x[0] for x in ops.delta_commit_q8(*(x[None] for x in one), False)]

    for ours, theirs in zip(jax.vmap(alone)(*tape), wanted, strict=True):
        support.assert_same_bits(ours, theirs)


def test_dtypes_are_named() -> None:
    given: dict[str, Any] = deltas.rows_of(SIZES["nano"], 1, 1)
    with pytest.raises(TypeError, match="codes has dtype int32; it must be int8"):
        deltas.rows(given | {"codes": given["codes"].astype(np.int32)}, nearest=False)


@pytest.fixture(scope="module")
def nano() -> hipjax.FlashNext:
    return hipjax.load_nano(dtype="float32")


def q8_states(state: DecodeState) -> list[Q8]:
    mixers = [getattr(layer.mixer, "recurrent", None) for layer in state.layers]
    return [mixer for mixer in mixers if isinstance(mixer, Q8)]


@pytest.mark.parametrize("recurrent", ["q8", "q8_nearest"])
def test_the_model_after_any_number_of_rows(nano: hipjax.FlashNext, recurrent: str) -> None:
    """Every array of the state after a commit is plain decoding's, and a prompt is rounded once."""
    config, params = nano.config, nano.params
    prompt = jnp.asarray([[5, 77, 300, 41, 8, 900, 12, 7]], jnp.int32)
    rows = jnp.asarray([[9, 10, 11, 12]], jnp.int32)
    state = DecodeState.init(config, 64, recurrent=recurrent, head=False)
    prefill = jax.jit(trunk_prompt, static_argnames="config")
    decode = jax.jit(trunk_rows, static_argnames="config")
    commit = jax.jit(lambda tape, kept: tape.commit(kept).canonical())
    none = prefill(params, prompt, jnp.array([0]), state, config=config)[1]
    for ours, theirs in zip(q8_states(none), q8_states(state), strict=True):
        support.assert_same_bits(ours.codes, theirs.codes)
        support.assert_same_bits(ours.scales, theirs.scales)
    state = prefill(params, prompt, jnp.array([8]), state, config=config)[1]
    assert all((each.codes != 0).any() for each in q8_states(state))
    tape = decode(params, rows, state, config=config)
    plain = state
    for kept in range(5):
        after = commit(tape, jnp.array([kept], jnp.int32))
        jax.tree.map(support.assert_same_bits, after, plain.canonical())
        if kept < 4:
            step = decode(params, rows[:, kept : kept + 1], plain, config=config)
            support.assert_same_bits(step.streams[:, 0], tape.streams[:, kept])
            plain = commit(step, jnp.array([1], jnp.int32))


@pytest.mark.parametrize("recurrent", ["q8", "q8_nearest"])
def test_speculation_leaves_the_ids(nano: hipjax.FlashNext, recurrent: str) -> None:
    assert nano.tokenizer is not None
    sampling = hipjax.SamplingConfig(ignore_eos=True)
    for text in ("import ", "def main():\n", "Once upon a time"):
        ids = nano.tokenizer.encode(text).ids
        options: dict[str, Any] = {
            "config": nano.config,
            "sampling": sampling,
            "max_new_tokens": 120,
        }
        plain = hipjax.generate(nano.params, None, ids, recurrent=recurrent, **options)
        found = hipjax.speculative_generate(nano.params, None, ids, recurrent=recurrent, **options)
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        assert found.stats.mtp_windows and found.stats.accepted
    scored = [
        hipjax.logits(nano.params, ids, config=nano.config, rows=True, recurrent=each)
        for each in (recurrent, "float32")
    ]
    assert 0 < np.abs(np.asarray(scored[0]) - np.asarray(scored[1])).max() < 1


def test_the_door(nano: hipjax.FlashNext) -> None:
    with pytest.raises(ValueError, match="recurrent is 'q4'; allowed: float32, q8, q8_nearest"):
        DecodeState.init(nano.config, 8, recurrent="q4")
