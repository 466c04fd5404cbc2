"""The gated delta rule's kernels with a float32 state; Q8 is in test_delta_q8.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops, reference_delta
from tests.ffi import deltas, support
from tests.ffi.deltas import SIZES, Sizes

NAMES = pytest.mark.parametrize("name", SIZES)
POISON = (np.nan, np.inf, -np.inf, 1e30)


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    with ops.implementation("kernel"):
        yield


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def wide(given: dict[str, Any]) -> dict[str, Any]:
    """Everything in float64, query and key repeated for the value heads."""
    x = {name: np.asarray(array, np.float64) for name, array in given.items()}
    share = x["value"].shape[2] // x["key"].shape[2]
    return x | {name: np.repeat(x[name], share, axis=2) for name in ("query", "key")}


def expected_rows(given: dict[str, Any], gate: str) -> tuple[np.ndarray, ...]:
    """Outputs, corrections and the last state in float64, by model-spec 3.4."""
    x = wide(given)
    state, outs, corrections = x["state"], [], []
    for r in range(x["key"].shape[1]):
        q, k, v = x["query"][:, r], x["key"][:, r], x["value"][:, r]
        state = state * np.exp(x["decay"][:, r])[..., None, None]
        read = np.einsum("bnkv,bnk->bnv", state, k)
        correction = (v - read) * x["strength"][:, r, :, None]
        state = state + k[..., None] * correction[..., None, :]
        out = np.einsum("bnkv,bnk->bnv", state, q)
        z = x["gate"][:, r]
        normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + deltas.EPS) * x["weight"]
        outs.append(normed * sigmoid(z) * (z if gate == "silu" else 1))
        corrections.append(correction)
    return np.stack(outs, 1), np.stack(corrections, 1), state


def expected_inputs(given: dict[str, Any], s: Sizes) -> tuple[np.ndarray, ...]:
    x = {name: np.asarray(array, np.float64) for name, array in given.items()}
    columns, length = np.concatenate([x["past"], x["columns"]], 1), x["columns"].shape[1]
    mixed = sum(columns[:, i : i + length] * x["conv"][:, 0, i] for i in range(s.taps))
    mixed = mixed * sigmoid(mixed)
    q, k, v = np.split(mixed, [s.key_heads * s.keys, 2 * s.key_heads * s.keys], axis=-1)
    q, k = (part.reshape(*part.shape[:2], s.key_heads, s.keys) for part in (q, k))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    decay = -np.exp(x["a_log"]) * np.logaddexp(0, x["a"] + x["dt_bias"])
    v = v.reshape(*v.shape[:2], s.heads, s.values)
    return q / np.sqrt(s.keys), k, v, decay, sigmoid(x["b"])


def assert_close(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape and found.dtype == np.float32
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@NAMES
def test_inputs_against_float64(name: str) -> None:
    sizes = SIZES[name]
    given = deltas.rows_of(sizes, 2, 5)
    wanted = expected_inputs(given, sizes)
    for found, one in zip(deltas.inputs(given, sizes), wanted, strict=True):
        assert_close(found, one, 3e-6)
        with pytest.raises(AssertionError):
            assert_close(found, one * (1 + 1e-5), 3e-6)


@NAMES
@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_rows_and_commit_against_float64(name: str, gate: str) -> None:
    given = deltas.rows_of(SIZES[name], 2, 4)
    out, correction, state = expected_rows(given, gate)
    found = deltas.rows(given, gate)
    # The norm of a head of a few channels enlarges the error of a small output.
    assert_close(found[0], out, 1e-4)
    assert_close(found[1], correction)
    past, after = deltas.commit(given | {"correction": found[1]}, 4)
    assert_close(after, state)
    both = np.concatenate([given["past"], given["columns"]], 1)
    np.testing.assert_array_equal(past, both[:, 4:])
    with pytest.raises(AssertionError):
        assert_close(after, state * (1 + 1e-4))


@NAMES
def test_a_row_is_a_row(name: str) -> None:
    """Row r of R rows has the bits of r single steps, each of them committed; so has the state."""
    given = deltas.rows_of(SIZES[name], 2, 9)
    alone, states = deltas.stepped(given)
    for number in range(1, 10):
        some = {key: x[:, :number] if key in deltas.PER_ROW else x for key, x in given.items()}
        found = deltas.rows(some)
        for row in range(number):
            for ours, theirs in zip(found, alone[row], strict=True):
                support.assert_same_bits(ours[:, row], theirs)
        tape = some | {"correction": found[1]}
        for kept in range(number + 1) if number in (1, 4, 9) else (number,):
            past, state = deltas.commit(tape, kept)
            support.assert_same_bits(past, states[kept]["past"])
            support.assert_same_bits(state, states[kept]["state"])
    with pytest.raises(AssertionError):
        support.assert_same_bits(state, states[-2]["state"])


@pytest.mark.parametrize("rows", [17, 33])
def test_many_rows(rows: int) -> None:
    given = deltas.rows_of(SIZES["nano"], 1, rows)
    alone, states = deltas.stepped(given)
    found = deltas.rows(given)
    for row in range(rows):
        for ours, theirs in zip(found, alone[row], strict=True):
            support.assert_same_bits(ours[:, row], theirs)
    _, state = deltas.commit(given | {"correction": found[1]}, rows)
    support.assert_same_bits(state, states[-1]["state"])


@pytest.mark.parametrize("name", ["nano", "released", "odd"])
@pytest.mark.parametrize("bad", POISON)
def test_what_later_rows_and_other_sequences_hold(name: str, bad: float) -> None:
    """It reaches no earlier row, no other sequence, and no state that is kept before it."""
    sizes = SIZES[name]
    clean = deltas.rows_of(sizes, 3, 6)
    wanted, fresh = deltas.rows(clean), deltas.inputs(clean, sizes)
    dirty = {key: x.copy() for key, x in clean.items()}
    for key in deltas.PER_ROW:
        if key in dirty:
            dirty[key][0, 3:] = dirty[key][2, 1:] = bad
    found = deltas.rows(dirty)
    for ours, theirs in zip(found, wanted, strict=True):
        support.assert_same_bits(ours[0, :3], theirs[0, :3])
        support.assert_same_bits(ours[1], theirs[1])
        support.assert_same_bits(ours[2, :1], theirs[2, :1])
        assert not np.array_equal(ours[0, 3:], theirs[0, 3:])
    for ours, theirs in zip(deltas.inputs(dirty, sizes), fresh, strict=True):
        support.assert_same_bits(ours[0, :3], theirs[0, :3])
        support.assert_same_bits(ours[1], theirs[1])
    kept = np.array([3, 6, 1], np.int32)
    after = deltas.commit(dirty | {"correction": found[1]}, kept)
    for ours, theirs in zip(
        after, deltas.commit(clean | {"correction": wanted[1]}, kept), strict=True
    ):
        support.assert_same_bits(ours, theirs)


@NAMES
def test_inputs_row_by_row(name: str) -> None:
    sizes = SIZES[name]
    given = deltas.rows_of(sizes, 2, 9)
    found = deltas.inputs(given, sizes)
    columns = np.concatenate([given["past"], given["columns"]], axis=1)
    for row in range(9):
        one = deltas.one_row(given, row) | {"past": columns[:, row : row + sizes.taps - 1]}
        for ours, theirs in zip(found, deltas.inputs(one, sizes), strict=True):
            support.assert_same_bits(ours[:, row], theirs[:, 0])


def test_a_plain_dot_would_be_caught() -> None:
    """Negative control: products rounded before they are added are not the same bits."""
    given = deltas.rows_of(SIZES["released"], 1, 1)
    found = np.asarray(deltas.rows(given)[1])
    names = ("value", "decay", "strength", "key", "state")
    value, decay, strength, key, state = (np.asarray(given[name]) for name in names)
    key = np.repeat(key, 3, axis=2)
    decayed = np.exp(decay[:, 0])[..., None, None] * state
    read = (decayed * key[:, 0, :, :, None]).sum(axis=2)
    other = (value[:, 0] - read) * strength[:, 0, :, None]
    np.testing.assert_allclose(found[:, 0], other, atol=1e-5)
    with pytest.raises(AssertionError):
        support.assert_same_bits(found[:, 0], other)


def test_bfloat16_parameters() -> None:
    """Small parameters as stored, and widened, give the same bits."""
    sizes = SIZES["nano"]
    given = deltas.rows_of(sizes, 1, 2)
    small = {name: jnp.asarray(given[name], jnp.bfloat16) for name in ("conv", "a_log", "dt_bias")}
    large = {name: x.astype(jnp.float32) for name, x in small.items()}
    for ours, theirs in zip(
        deltas.inputs(given | small, sizes), deltas.inputs(given | large, sizes), strict=True
    ):
        support.assert_same_bits(ours, theirs)
    weight = jnp.asarray(given["weight"], jnp.bfloat16)
    found = deltas.rows(given | {"weight": weight})
    wanted = deltas.rows(given | {"weight": weight.astype(jnp.float32)})
    support.assert_same_bits(found[0], wanted[0])


def test_transformations() -> None:
    """vmap over sequences and scan over steps give the bits of a batch and of a loop."""
    given = deltas.rows_of(SIZES["nano"], 3, 2)
    names = ("query", "key", "value", "decay", "strength", "gate", "state")
    operands, weight = deltas.picked(given, *names), jnp.asarray(given["weight"])
    wanted = deltas.rows(given)

    def alone(*one: jax.Array) -> list[jax.Array]:
        found = ops.delta_rows(*(x[None] for x in one), weight, deltas.EPS, "sigmoid")
        return [x[0] for x in found]

    for ours, theirs in zip(jax.jit(jax.vmap(alone))(*operands), wanted, strict=True):
        support.assert_same_bits(ours, theirs)

    tape = deltas.picked(given, "key", "value", "decay", "past", "columns")
    kept = jnp.array([2, 0, 1], jnp.int32)
    after = ops.delta_commit(*tape, kept, operands[-1])

    def committed(*one: jax.Array) -> list[jax.Array]:
        return [x[0] for x in ops.delta_commit(*(x[None] for x in one))]

    found = jax.vmap(committed)(*tape, kept, operands[-1])
    for ours, theirs in zip(found, after, strict=True):
        support.assert_same_bits(ours, theirs)

    def body(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, None]:
        past, state = carry
        return ops.delta_commit(*tape[:3], past, tape[4], kept, state), None

    scanned, _ = jax.jit(lambda c: jax.lax.scan(body, c, None, length=3))((tape[3], operands[-1]))
    carry = (tape[3], operands[-1])
    for _ in range(3):
        carry, _ = body(carry, None)
    for ours, theirs in zip(scanned, carry, strict=True):
        support.assert_same_bits(ours, theirs)


def test_commit_leaves_what_is_still_read() -> None:
    """The state's memory may be taken over only where nobody else holds it."""
    given = deltas.rows_of(SIZES["nano"], 2, 3)
    state = jnp.asarray(given["state"])
    tape = deltas.picked(
        given | {"kept": np.array([3, 2], np.int32)},
        *("key", "value", "decay", "past", "columns", "kept"),
    )
    after = ops.delta_commit(*tape, state)
    np.testing.assert_array_equal(state, given["state"])
    np.testing.assert_array_equal(tape[3], given["past"])
    donated = jax.jit(ops.delta_commit, donate_argnums=(3, 6))(*tape, state)
    assert state.is_deleted()
    for ours, theirs in zip(donated, after, strict=True):
        support.assert_same_bits(ours, theirs)


def test_close_to_the_reference() -> None:
    """The twin in plain JAX takes and returns the same."""
    sizes = SIZES["nano"]
    given = deltas.rows_of(sizes, 2, 3)
    names = ("past", "columns", "a", "b", "conv", "a_log", "dt_bias")
    twins = reference_delta.delta_inputs(*deltas.picked(given, *names), sizes.key_heads, sizes.keys)
    for ours, theirs in zip(deltas.inputs(given, sizes), twins, strict=True):
        assert_close(ours, theirs)
    names = ("query", "key", "value", "decay", "strength", "gate", "state", "weight")
    twins = reference_delta.delta_rows(*deltas.picked(given, *names), deltas.EPS, "silu")
    for ours, theirs in zip(deltas.rows(given, "silu"), twins, strict=True):
        assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("name", ["released", "odd"])
def test_every_instruction_set(name: str) -> None:
    code = """
        from tests.ffi import deltas
        sizes = deltas.SIZES[str(given["name"])]
        layer = deltas.rows_of(sizes, 2, 3)
        results |= {f"inputs{i}": x for i, x in enumerate(deltas.inputs(layer, sizes))}
        for nearest in (None, False, True):
            found = deltas.rows(layer, "silu", nearest)
            after = deltas.commit(layer | {"correction": found[1]}, [2, 3], nearest)
            results |= {f"{nearest}{i}": x for i, x in enumerate((*found, *after))}
    """
    sets = support.instruction_sets()
    found = [support.bits_under(each, code, name=name) for each in sets]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, x in found[0].items():
            support.assert_same_bits(other[key], x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": (2, 6, 32, 31)}, r"state has shape .*31\); it must be \(2, 6, 32, 32\)"),
        ({"query": (2, 3, 1, 32)}, r"query has shape \(2, 3, 1, 32\); it must be \(2, 3, 2, 32\)"),
        ({"gate": (2, 2, 6, 32)}, r"gate has shape .*; it must be \(2, 3, 6, 32\)"),
        ({"key": (2, 3, 4, 32)}, "value has 6 heads; allowed: a multiple of the 4 of key"),
        ({"key": (2, 3, 2, 300)}, "key has 300 channels a head; allowed: 1 to 256"),
    ],
)
def test_wrong_shapes(change: dict[str, tuple[int, ...]], message: str) -> None:
    given: dict[str, Any] = deltas.rows_of(SIZES["nano"], 2, 3)
    given |= {name: np.zeros(shape, np.float32) for name, shape in change.items()}
    if change.get("key") == (2, 3, 2, 300):
        given["state"] = np.zeros((2, 6, 300, 32), np.float32)
    if change.get("key") == (2, 3, 4, 32):
        given["query"] = given["key"]
    with pytest.raises(ValueError, match=message):
        deltas.rows(given)


def test_wrong_gate_and_channels() -> None:
    given = deltas.rows_of(SIZES["nano"], 1, 1)
    with pytest.raises(ValueError, match="activation is 'relu'; allowed: sigmoid, silu"):
        deltas.rows(given, "relu")
    with pytest.raises(ValueError, match="columns has 320 channels; allowed"):
        deltas.inputs(given, Sizes(5, 6, 32, 32))
