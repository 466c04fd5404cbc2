"""The gated delta rule: its inputs, rows from a state that stays, and the commit.

The shapes are those of ``reference_delta``; what does not fit is named here.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from hipjax.ffi.call import call, stored
from hipjax.ffi.operands import floats, weight_vector
from hipjax.typing import Array

MAX_WIDTH = 256  # channels of a head


def delta_inputs(
    past: Array,
    columns: Array,
    a: Array,
    b: Array,
    conv: Array,
    a_log: Array,
    dt_bias: Array,
    key_heads: int,
    key_width: int,
) -> tuple[Array, ...]:
    """Convolution, heads of length one, log decay and strength."""
    batch, rows, channels = _ranked("columns", columns, 3)
    heads, taps = _ranked("a", a, 3)[-1], conv.shape[-1]
    of_values = channels - 2 * key_heads * key_width
    if of_values <= 0 or of_values % heads:
        raise ValueError(
            f"columns has {channels} channels; allowed: {2 * key_heads * key_width} of query "
            f"and key, and a multiple of {heads} of value"
        )
    floats("columns", columns)
    _array("past", past, (batch, taps - 1, channels))
    _array("a", a, (batch, rows, heads))
    _array("b", b, (batch, rows, heads))
    shared = [
        weight_vector("conv", stored(conv), channels * taps),
        weight_vector("a_log", stored(a_log), heads),
        weight_vector("dt_bias", stored(dt_bias), heads),
    ]
    keys = (rows, key_heads, key_width)
    shapes = [keys, keys, (rows, heads, of_values // heads), (rows, heads), (rows, heads)]
    results = [(shape, jnp.float32) for shape in shapes]
    scale = np.float32(key_width**-0.5)
    return call("delta_inputs", [past, columns, a, b], shared, results, query_scale=scale)


def delta_rows(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    strength: Array,
    gate: Array,
    state: Array,
    weight: Array,
    eps: float,
    activation: str,
) -> tuple[Array, Array]:
    """Rows one after the other from a float32 state: outputs and corrections."""
    inputs = (query, key, value, decay, strength, gate)
    return _rows(inputs, (state,), weight, eps, activation, nearest=False)


def delta_rows_q8(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    strength: Array,
    gate: Array,
    codes: Array,
    scales: Array,
    length: Array,
    weight: Array,
    eps: float,
    activation: str,
    nearest: bool,
) -> tuple[Array, Array]:
    """The same from a Q8 state."""
    inputs = (query, key, value, decay, strength, gate)
    return _rows(inputs, (codes, scales, length), weight, eps, activation, nearest)


def _rows(
    inputs: tuple[Array, ...],
    state: tuple[Array, ...],
    weight: Array,
    eps: float,
    activation: str,
    nearest: bool,
) -> tuple[Array, Array]:
    query, key, value, decay, strength, gate = inputs
    kind = _checked(key, "value", value, state, nearest)
    _array("query", query, key.shape)
    _array("decay", decay, value.shape[:-1])
    _array("strength", strength, value.shape[:-1])
    _array("gate", gate, value.shape)
    weight = weight_vector("weight", stored(weight), value.shape[-1])
    if activation not in ("sigmoid", "silu"):
        raise ValueError(f"activation is {activation!r}; allowed: sigmoid, silu")
    results = [(value.shape[1:], jnp.float32)] * 2
    kind |= {"eps": np.float32(eps), "silu": int(activation == "silu")}
    out, correction = call("delta_rows", [*inputs, *state], [weight], results, **kind)
    return out, correction


def delta_commit(
    key: Array,
    correction: Array,
    decay: Array,
    past: Array,
    columns: Array,
    kept: Array,
    state: Array,
) -> tuple[Array, ...]:
    """The convolution's inputs and the state after ``kept`` rows, in place where it may be."""
    tape = (key, correction, decay, past, columns, kept)
    return _commit(tape, (state,), nearest=False)


def delta_commit_q8(
    key: Array,
    correction: Array,
    decay: Array,
    past: Array,
    columns: Array,
    kept: Array,
    codes: Array,
    scales: Array,
    length: Array,
    nearest: bool,
) -> tuple[Array, ...]:
    """The same for a Q8 state: the convolution's inputs, codes and scales."""
    tape = (key, correction, decay, past, columns, kept)
    return _commit(tape, (codes, scales, length), nearest)


def _commit(tape: tuple[Array, ...], state: tuple[Array, ...], nearest: bool) -> tuple[Array, ...]:
    key, correction, decay, past, columns, kept = tape
    kind = _checked(key, "correction", correction, state, nearest)
    batch, rows = key.shape[:2]
    _, taps, channels = _ranked("past", past, 3)
    _array("decay", decay, correction.shape[:-1])
    _array("past", past, (batch, taps, channels))
    _array("columns", columns, (batch, rows, channels))
    _array("kept", kept, (batch,), jnp.int32)
    after = (past, *state[:2])
    aliases = {3: 0} | {len(tape) + i: 1 + i for i in range(len(after) - 1)}
    results = [(x.shape[1:], x.dtype) for x in after]
    return call("delta_commit", [*tape, *state], [], results, aliases=aliases, **kind)


def _checked(
    key: Array, name: str, value: Array, state: tuple[Array, ...], nearest: bool
) -> dict[str, Any]:
    """Checks heads and state; returns what kind of state it is as the kernel's attributes."""
    batch, rows, key_heads, keys = _ranked("key", key, 4)
    heads, values = _ranked(name, value, 4)[2:]
    for what, width in (("key", keys), (name, values)):
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"{what} has {width} channels a head; allowed: 1 to {MAX_WIDTH}")
    if not key_heads or heads % key_heads:
        raise ValueError(f"{name} has {heads} heads; allowed: a multiple of the {key_heads} of key")
    _array("key", key, key.shape)
    _array(name, value, (batch, rows, heads, values))
    if len(state) == 1:
        _array("state", state[0], (batch, heads, keys, values))
        return {"q8": 0, "nearest": 0}
    codes, scales, length = state
    _array("codes", codes, (batch, heads, values, keys), jnp.int8)
    _array("scales", scales, (batch, heads, values))
    _array("length", length, (batch,), jnp.int32)
    return {"q8": 1, "nearest": int(nearest)}


def _ranked(name: str, x: Array, axes: int) -> tuple[int, ...]:
    if x.ndim != axes:
        raise ValueError(f"{name} has shape {x.shape}; it must have {axes} axes")
    return x.shape


def _array(name: str, x: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {jnp.dtype(dtype)}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
