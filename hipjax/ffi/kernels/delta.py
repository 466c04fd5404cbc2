"""The gated delta rule: its inputs, rows from a state that stays, and the commit."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from hipjax.ffi.call import call, stored
from hipjax.typing import Array, Float, Int

MAX_WIDTH = 256  # channels of a head


def delta_inputs(
    past: Float[Array, "B past channels"],
    columns: Float[Array, "B R channels"],
    a: Float[Array, "B R N"],
    b: Float[Array, "B R N"],
    conv: Float[Array, "channels 1 taps"],
    a_log: Float[Array, " N"],
    dt_bias: Float[Array, " N"],
    key_heads: int,
    key_width: int,
) -> tuple[Array, ...]:
    """Convolution, heads of length one, log decay and strength: see the reference."""
    rows, channels = columns.shape[1:]
    heads, taps = a.shape[-1], conv.shape[-1]
    of_values = channels - 2 * key_heads * key_width
    _sized("past", past, (columns.shape[0], taps - 1, channels))
    _sized("b", b, a.shape)
    if of_values <= 0 or of_values % heads:
        raise ValueError(
            f"columns has {channels} channels; allowed: {2 * key_heads * key_width} of query "
            f"and key, and a multiple of {heads} of value"
        )
    keys = (rows, key_heads, key_width)
    shapes = [keys, keys, (rows, heads, of_values // heads), (rows, heads), (rows, heads)]
    return call(
        "delta_inputs",
        [past, columns, a, b],
        [stored(conv), stored(a_log), stored(dt_bias)],
        [(shape, jnp.float32) for shape in shapes],
        query_scale=np.float32(key_width**-0.5),
    )


def delta_rows(
    query: Float[Array, "B R M keys"],
    key: Float[Array, "B R M keys"],
    value: Float[Array, "B R N values"],
    decay: Float[Array, "B R N"],
    strength: Float[Array, "B R N"],
    gate: Float[Array, "B R N values"],
    state: Float[Array, "B N keys values"],
    weight: Float[Array, " values"],
    eps: float,
    activation: str,
) -> tuple[Array, Array]:
    """Rows one after the other from a float32 state: outputs and corrections."""
    inputs = (query, key, value, decay, strength, gate)
    _sized("state", state, (key.shape[0], value.shape[2], key.shape[3], value.shape[3]))
    return _rows(inputs, (state,), weight, eps, activation, q8=0, nearest=0)


def delta_rows_q8(
    query: Float[Array, "B R M keys"],
    key: Float[Array, "B R M keys"],
    value: Float[Array, "B R N values"],
    decay: Float[Array, "B R N"],
    strength: Float[Array, "B R N"],
    gate: Float[Array, "B R N values"],
    codes: Int[Array, "B N values keys"],
    scales: Float[Array, "B N values"],
    length: Int[Array, " B"],
    weight: Float[Array, " values"],
    eps: float,
    activation: str,
    nearest: bool,
) -> tuple[Array, Array]:
    """The same from a Q8 state."""
    inputs = (query, key, value, decay, strength, gate)
    _sized("codes", codes, (key.shape[0], value.shape[2], value.shape[3], key.shape[3]))
    q8 = (codes, scales, length)
    return _rows(inputs, q8, weight, eps, activation, q8=1, nearest=int(nearest))


def _rows(
    inputs: tuple[Array, ...],
    state: tuple[Array, ...],
    weight: Array,
    eps: float,
    activation: str,
    **kind: Any,
) -> tuple[Array, Array]:
    query, key, value, decay, strength, gate = inputs
    _checked_heads(key, value)
    _sized("query", query, key.shape)
    _sized("decay", decay, value.shape[:-1])
    _sized("strength", strength, value.shape[:-1])
    _sized("gate", gate, value.shape)
    if activation not in ("sigmoid", "silu"):
        raise ValueError(f"activation is {activation!r}; allowed: sigmoid, silu")
    out, correction = call(
        "delta_rows",
        [*inputs, *state],
        [stored(weight)],
        [(value.shape[1:], jnp.float32)] * 2,
        eps=np.float32(eps),
        silu=int(activation == "silu"),
        **kind,
    )
    return out, correction


def delta_commit(
    key: Float[Array, "B R M keys"],
    correction: Float[Array, "B R N values"],
    decay: Float[Array, "B R N"],
    past: Float[Array, "B past channels"],
    columns: Float[Array, "B R channels"],
    kept: Int[Array, " B"],
    state: Float[Array, "B N keys values"],
) -> tuple[Array, ...]:
    """The convolution's inputs and the state after ``kept`` rows, in place where it may be."""
    tape = (key, correction, decay, past, columns, kept)
    _sized("state", state, (key.shape[0], correction.shape[2], key.shape[3], correction.shape[3]))
    return _commit(tape, (state,), [state], q8=0, nearest=0)


def delta_commit_q8(
    key: Float[Array, "B R M keys"],
    correction: Float[Array, "B R N values"],
    decay: Float[Array, "B R N"],
    past: Float[Array, "B past channels"],
    columns: Float[Array, "B R channels"],
    kept: Int[Array, " B"],
    codes: Int[Array, "B N values keys"],
    scales: Float[Array, "B N values"],
    length: Int[Array, " B"],
    nearest: bool,
) -> tuple[Array, ...]:
    """The same for a Q8 state: the convolution's inputs, codes and scales."""
    tape = (key, correction, decay, past, columns, kept)
    _sized("codes", codes, (key.shape[0], correction.shape[2], correction.shape[3], key.shape[3]))
    q8 = (codes, scales, length)
    return _commit(tape, q8, [codes, scales], q8=1, nearest=int(nearest))


def _commit(
    tape: tuple[Array, ...], state: tuple[Array, ...], after: list[Array], **kind: Any
) -> tuple[Array, ...]:
    key, correction, decay, past, columns, _ = tape
    _checked_heads(key, correction)
    _sized("decay", decay, correction.shape[:-1])
    _sized("columns", columns, (*key.shape[:2], past.shape[-1]))
    aliases = {3: 0} | {len(tape) + i: 1 + i for i in range(len(after))}
    return call(
        "delta_commit",
        [*tape, *state],
        [],
        [(x.shape[1:], x.dtype) for x in (past, *after)],
        aliases=aliases,
        **kind,
    )


def _checked_heads(key: Array, value: Array) -> None:
    for name, width in (("key", key.shape[-1]), ("value", value.shape[-1])):
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"{name} has {width} channels a head; allowed: 1 to {MAX_WIDTH}")
    if value.shape[2] % key.shape[2]:
        raise ValueError(
            f"value has {value.shape[2]} heads; allowed: a multiple of the {key.shape[2]} of key"
        )


def _sized(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
