"""The gated delta rule in plain JAX: its rows, its commit, and states in eight bits.

Sources: model-spec section 3.4, decoding-spec section 13.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hipjax.ffi.reference import causal_conv
from hipjax.typing import Array, Float, Int

_HIGHEST = lax.Precision.HIGHEST


def delta_inputs(
    past: Float[Array, "B past channels"],
    columns: Float[Array, "B T channels"],
    a: Float[Array, "B T N"],
    b: Float[Array, "B T N"],
    conv: Float[Array, "channels 1 taps"],
    a_log: Float[Array, " N"],
    dt_bias: Float[Array, " N"],
    key_heads: int,
    key_width: int,
) -> tuple[Array, Array, Array, Array, Array]:
    """What the gated delta rule reads, per token.

    Args:
      past: the inputs of the convolution before the first token.
      columns: those of the tokens: queries, keys, values.
      a: raw decays.
      b: raw write strengths.
      conv: weight of the causal convolution, the oldest tap first.
      a_log: logarithms of the decay rates.
      dt_bias: what is added to ``a``.
      key_heads: heads of query and key; each serves N / key_heads value heads in turn.
      key_width: key channels of a head.

    Returns:
      query and key [B, T, key heads, keys] of length one, the query divided by
      sqrt(keys); value [B, T, N, values]; log decay (at most 0) and write strength
      [B, T, N].
    """
    both = jnp.concatenate([past, columns], axis=1)
    mixed = jax.nn.silu(causal_conv(both, conv, 1))
    size = key_heads * key_width
    query, key, value = jnp.split(mixed, [size, 2 * size], axis=-1)
    heads = (*query.shape[:-1], key_heads, key_width)
    rate = -jnp.exp(a_log.astype(jnp.float32))
    return (
        _unit(query.reshape(heads)) / jnp.sqrt(jnp.float32(key_width)),
        _unit(key.reshape(heads)),
        value.reshape(*a.shape, -1),
        rate * jax.nn.softplus(a + dt_bias.astype(jnp.float32)),
        jax.nn.sigmoid(b),
    )


def _unit(x: Array) -> Array:
    """``x`` scaled to length one over the last axis (eps 1e-6, sum of squares)."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


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
) -> tuple[Float[Array, "B R N values"], Float[Array, "B R N values"]]:
    """Gated delta rule, row after row from ``state``, then the heads' norm and gate.

    Returns:
      The rows' outputs, and per row the correction that was written under its key: with
      the keys and decays these are the tape from which :func:`delta_commit` finishes.
    """

    def step(state: Array, row: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        out, correction, state = _delta_row(state, *row)
        return state, (out, correction)

    rows = (jnp.moveaxis(part, 1, 0) for part in (query, key, value, decay, strength))
    _, (outputs, corrections) = lax.scan(step, state, tuple(rows))
    out = delta_output(jnp.moveaxis(outputs, 0, 1), gate, weight, eps, activation)
    return out, jnp.moveaxis(corrections, 0, 1)


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
) -> tuple[Float[Array, "B R N values"], Float[Array, "B R N values"]]:
    """The same from a Q8 state, which is rounded after every row, see delta_quantised.

    ``length`` is the position of row 0. An output is read before its row is rounded.
    """
    outputs, corrections = [], []
    for row in range(key.shape[1]):
        parts = (part[:, row] for part in (query, key, value, decay, strength))
        out, correction, state = _delta_row(delta_dequantised(codes, scales), *parts)
        codes, scales = delta_quantised(state, length + row, nearest)
        outputs.append(out)
        corrections.append(correction)
    out = delta_output(jnp.stack(outputs, axis=1), gate, weight, eps, activation)
    return out, jnp.stack(corrections, axis=1)


def _delta_row(
    state: Array, query: Array, key: Array, value: Array, decay: Array, strength: Array
) -> tuple[Array, Array, Array]:
    """One row's output and correction, and the state after it."""
    share = value.shape[1] // key.shape[1]
    query, key = (jnp.repeat(part, share, axis=1) for part in (query, key))
    decayed = jnp.exp(decay)[..., None, None] * state
    correction = strength[..., None] * (value - _read(decayed, key))
    state = decayed + key[..., None] * correction[..., None, :]
    return _read(state, query), correction, state


def _read(state: Array, key: Array) -> Array:
    return jnp.einsum("bnkv,bnk->bnv", state, key, precision=_HIGHEST)


def delta_commit(
    key: Float[Array, "B R M keys"],
    correction: Float[Array, "B R N values"],
    decay: Float[Array, "B R N"],
    past: Float[Array, "B past channels"],
    columns: Float[Array, "B R channels"],
    kept: Int[Array, " B"],
    state: Float[Array, "B N keys values"],
) -> tuple[Array, Array]:
    """The convolution's last inputs and the state after the first ``kept`` rows.

    One read and one write of the state.
    """
    for row in range(key.shape[1]):
        moved = _delta_moved(state, key[:, row], correction[:, row], decay[:, row])
        state = jnp.where((row < kept)[:, None, None, None], moved, state)
    return _last_columns(past, columns, kept), state


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
) -> tuple[Array, Array, Array]:
    """The same for a Q8 state: the convolution's inputs, codes and scales."""
    for row in range(key.shape[1]):
        state = delta_dequantised(codes, scales)
        moved = _delta_moved(state, key[:, row], correction[:, row], decay[:, row])
        new_codes, new_scales = delta_quantised(moved, length + row, nearest)
        stands = (row < kept)[:, None, None]
        codes = jnp.where(stands[..., None], new_codes, codes)
        scales = jnp.where(stands, new_scales, scales)
    return _last_columns(past, columns, kept), codes, scales


def _delta_moved(state: Array, key: Array, correction: Array, decay: Array) -> Array:
    key = jnp.repeat(key, correction.shape[1] // key.shape[1], axis=1)
    return jnp.exp(decay)[..., None, None] * state + key[..., None] * correction[..., None, :]


def _last_columns(past: Array, columns: Array, count: Array) -> Array:
    both = jnp.concatenate([past, columns], axis=1)
    width = past.shape[1]
    return jax.vmap(lambda c, n: lax.dynamic_slice_in_dim(c, n, width))(both, count)


def delta_quantised(
    state: Float[Array, "B N keys values"], position: Int[Array, " B"], nearest: bool
) -> tuple[Int[Array, "B N values keys"], Float[Array, "B N values"]]:
    """Eight-bit codes of every value channel, and their scales.

    Rounded to nearest even, or down after adding a noise in [0, 1) that is a function of
    head, channels and ``position``, that of the last token. Source: decoding-spec 13.2.
    """
    rows = jnp.swapaxes(state, -1, -2)
    peak = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    exact = rows * jnp.where(peak == 0, 0.0, 127.0 / peak)
    if nearest:
        whole = jnp.round(exact)
    else:
        whole = jnp.floor(exact + rounding_noise(position, rows.shape[1:]))
    codes = jnp.nan_to_num(jnp.clip(whole, -128, 127), nan=0.0).astype(jnp.int8)
    return codes, jnp.where(peak == 0, 1.0, peak / 127.0)[..., 0]


def rounding_noise(
    position: Int[Array, " B"], shape: tuple[int, ...]
) -> Float[Array, "B N values keys"]:
    """The noise of :func:`delta_quantised` for every head, value channel and key channel."""
    head, channel, key = (
        lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(factor)
        for axis, factor in enumerate((1664525, 1013904223, 214013))
    )
    frame = position.astype(jnp.uint32) * np.uint32(2531011)
    x = frame[:, None, None, None] + (head + channel + key)
    x = x * np.uint32(1664525) + np.uint32(1013904223)
    return (x >> 8).astype(jnp.float32) * np.float32(2.0**-24)


def delta_dequantised(
    codes: Int[Array, "B N values keys"], scales: Float[Array, "B N values"]
) -> Float[Array, "B N keys values"]:
    """The state that codes and scales stand for."""
    return jnp.swapaxes(scales[..., None] * codes.astype(jnp.float32), -1, -2)


def delta_output(
    x: Float[Array, "*rows N values"],
    z: Float[Array, "*rows N values"],
    weight: Float[Array, " values"],
    eps: float,
    activation: str,
) -> Array:
    """Norm of each value head (plain weight, not ``1 + weight``), then the gate."""
    gate = jax.nn.sigmoid if activation == "sigmoid" else jax.nn.silu
    scale = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * weight.astype(jnp.float32) * gate(z)
