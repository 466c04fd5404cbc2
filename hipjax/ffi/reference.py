"""The decode path's arithmetic in plain JAX, one function per operation.

Each function works on rows: the leading axes are sequences and rows, and a row's result
depends on that row alone. Activations and states are float32; weights are widened where
they are used. Native kernels replace these functions one for one.

Sources: model-spec sections 3.0 to 3.8.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hipjax.typing import Array, Bool, Float, Int, Num

MAX_ROWS = 8
_WIDENED_BYTES = 128 * 2**20
_HIGHEST = lax.Precision.HIGHEST


def encode(x: Float[Array, "..."], dtype: jnp.dtype) -> Num[Array, "..."]:
    """Brings values to a cache's storage: float32, or bfloat16 kept as uint16 bits.

    XLA's CPU back end widens a whole bfloat16 array to float32 around an update of a few
    of its rows; an integer array is updated in place.
    """
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(dtype)


def decode(stored: Num[Array, "..."]) -> Float[Array, "..."]:
    """Stored cache values, or weights of any float dtype, as float32."""
    if stored.dtype == jnp.uint16:
        stored = lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored.astype(jnp.float32)


def matrix_product(x: Float[Array, "*rows K"], weight: Float[Array, "M K"]) -> Array:
    """``x @ weight.T`` in float32, for a weight in the checkpoint's [out, in] layout."""
    return _by_pieces(weight, lambda w: jnp.matmul(x, w.T, precision=_HIGHEST))


def row_products(
    x: Float[Array, "*rows K"], weights: tuple[Float[Array, "_ K"], ...]
) -> tuple[Array, ...]:
    """The products of the same rows with several weights.

    Up to ``MAX_ROWS`` rows run one and the same one-row program in turn: a matrix product
    of XLA rounds a row differently for every number of rows.
    """
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] > MAX_ROWS:
        return tuple(matrix_product(x, weight) for weight in weights)

    def one(row: Array) -> list[Array]:
        return [
            _by_pieces(weight, lambda w: jnp.matmul(w, row, precision=_HIGHEST))
            for weight in weights
        ]

    outs = lax.map(one, flat)
    return tuple(out.reshape(*x.shape[:-1], -1) for out in outs)


def row_product(x: Float[Array, "*rows K"], weight: Float[Array, "M K"]) -> Array:
    """The product of rows with one weight, see :func:`row_products`."""
    return row_products(x, (weight,))[0]


def _by_pieces(weight: Array, product: Callable[[Array], Array]) -> Array:
    """``product`` of the weight widened to float32, a large one some rows at a time.

    The output axis is the last one of ``product``. Widening the output matrix of the large
    model at once would take 2.5 GB.
    """
    outputs, inputs = weight.shape
    pieces = 1
    if weight.dtype != jnp.float32:
        while outputs % pieces or outputs // pieces * inputs * 4 > _WIDENED_BYTES:
            pieces += 1
    if pieces == 1:
        return product(weight.astype(jnp.float32))
    cut = weight.reshape(pieces, -1, inputs)
    parts = lax.map(lambda piece: product(piece.astype(jnp.float32)), cut)
    return jnp.moveaxis(parts, 0, -2).reshape(*parts.shape[1:-1], outputs)


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"], eps: float) -> Array:
    """Root-mean-square norm over the last axis, scaled by ``1 + weight``."""
    return _normalised(x, eps) * (1.0 + weight.astype(jnp.float32))


def stream_norm(x: Float[Array, "*rows C H"], weight: Float[Array, " D"], eps: float) -> Array:
    """The same, each stream normalised by itself and scaled by its part of the weight."""
    return _normalised(x, eps) * (1.0 + weight.astype(jnp.float32).reshape(x.shape[-2:]))


def _normalised(x: Array, eps: float) -> Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def hyper_mix(
    normed: Float[Array, "*rows C H"],
    down: Float[Array, "low D"],
    up: Float[Array, "D low"],
    inject: Float[Array, "C D"] | None = None,
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows C"] | None]:
    """Gated mean of the normalised streams: what a branch reads.

    With ``inject``, also how strongly each stream takes the branch's output up, in (0, 2).
    """
    streams = normed.shape[-2]
    flat = normed.reshape(*normed.shape[:-2], -1)
    low, *taken = row_products(flat, (down,) if inject is None else (down, inject))
    gate = jax.nn.sigmoid(row_product(jax.nn.silu(low / streams), up)).reshape(normed.shape)
    mixed = jnp.mean(gate * normed, axis=-2)
    return mixed, 2.0 * jax.nn.sigmoid(taken[0] / streams) if taken else None


def hyper_combine(
    streams: Float[Array, "*rows C H"],
    branch: Float[Array, "*rows H"],
    strength: Float[Array, "*rows C"],
) -> Float[Array, "*rows C H"]:
    """Adds a branch's output to every stream."""
    return streams + strength[..., None] * branch[..., None, :]


def rotate(
    x: Float[Array, "*rows N width"], positions: Int[Array, "*rows"], theta: float, dims: int
) -> Array:
    """Rotary embedding of the first ``dims`` of the last axis, half-split pairing."""
    half = dims // 2
    frequency = 1.0 / (theta ** (jnp.arange(0, dims, 2, dtype=jnp.float32) / dims))
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1)


def causal_conv(
    columns: Float[Array, "B past_and_T channels"],
    weight: Float[Array, "channels 1 taps"],
    dilation: int,
) -> Float[Array, "B T channels"]:
    """Depthwise causal convolution over ``columns``, the tokens before the first included."""
    taps = weight.shape[-1]
    reach = (taps - 1) * dilation
    length = columns.shape[1] - reach
    kernel = weight.astype(jnp.float32)[:, 0]
    return sum(
        (columns[:, i * dilation : i * dilation + length] * kernel[:, i] for i in range(taps)),
        start=jnp.zeros((), jnp.float32),
    )


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
    return _normalised(x, eps) * weight.astype(jnp.float32) * gate(z)


def route(
    logits: Float[Array, "*rows E"], chosen: int, renormalise: bool
) -> tuple[Int[Array, "*rows K"], Float[Array, "*rows K"]]:
    """The experts of each row and their weights; equal scores favour the lower expert."""
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), chosen)
    if renormalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def swiglu(gate_up: Float[Array, "*rows two_I"]) -> Array:
    """``silu(gate) * up`` for a product that holds gate and up side by side."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def expert_rows(
    x: Float[Array, "B R H"],
    gate_up: Float[Array, "E two_I H"],
    down: Float[Array, "E H I"],
    experts: Int[Array, "B R K"],
    weights: Float[Array, "B R K"],
) -> Float[Array, "B R H"]:
    """Weighted sum of each row's experts; reads only the experts that were chosen."""
    chosen_in, chosen_out = decode(gate_up[experts]), decode(down[experts])
    inner = swiglu(jnp.einsum("brkih,brh->brki", chosen_in, x, precision=_HIGHEST))
    outer = jnp.einsum("brkhi,brki->brkh", chosen_out, inner, precision=_HIGHEST)
    return jnp.einsum("brkh,brk->brh", outer, weights, precision=_HIGHEST)


def block_scores(
    query: Float[Array, "B R N width"], keys: Num[Array, "B blocks width"]
) -> Float[Array, "B R blocks"]:
    """Relevance of every cached block to every row: summed positive parts over heads."""
    products = jnp.einsum("brnd,bkd->brnk", query, decode(keys), precision=_HIGHEST)
    return jnp.sum(jax.nn.relu(products), axis=2) / jnp.sqrt(jnp.float32(query.shape[-1]))


def attend_rows(
    query: Float[Array, "B R N width"],
    keys: Num[Array, "B groups S width"],
    values: Num[Array, "B groups S width"],
    tokens: Int[Array, "B R L"],
    visible: Bool[Array, "B R L"],
) -> Float[Array, "B R N width"]:
    """Attention of each row over its own list of cached tokens.

    A slot that is not ``visible`` must still name a token that the row may read: it gets
    weight 0, and a weight of 0 does not silence a NaN.
    """
    batch, rows, heads, width = query.shape
    groups = keys.shape[1]
    flat = tokens.reshape(batch, -1)

    def gathered(cache: Array) -> Array:
        picked = jax.vmap(lambda c, i: c[:, i])(cache, flat)
        return decode(picked.reshape(batch, groups, rows, -1, width))

    grouped = query.reshape(batch, rows, groups, heads // groups, width)
    grouped = jnp.moveaxis(grouped, 1, 2) / jnp.sqrt(jnp.float32(width))
    scores = jnp.einsum("bgrqd,bgrld->bgrql", grouped, gathered(keys), precision=_HIGHEST)
    weights = jax.nn.softmax(jnp.where(visible[:, None, :, None], scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bgrql,bgrld->bgrqd", weights, gathered(values), precision=_HIGHEST)
    return jnp.moveaxis(mixed, 1, 2).reshape(query.shape)


def ple_gate(
    key: Float[Array, "*rows C H"],
    query: Float[Array, "*rows C H"],
    value: Float[Array, "*rows H"],
) -> Float[Array, "*rows C H"]:
    """The n-gram value, let through per stream by how well its key meets the stream."""
    score = jnp.sum(key * query, axis=-1) / jnp.sqrt(jnp.float32(key.shape[-1]))
    score = jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6))
    return jax.nn.sigmoid(score)[..., None] * value[..., None, :]


def argmax(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Greedy choice: non-finite logits never win, the lowest id wins a tie, else id 0."""
    finite = jnp.where(jnp.isfinite(logits), logits, -jnp.inf)
    best = jnp.max(finite, axis=-1, keepdims=True)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(finite == best, index, logits.shape[-1] - 1), axis=-1)
