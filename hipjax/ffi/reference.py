"""The decode path's arithmetic in plain JAX, one function per operation.

Each function works on rows: the leading axes are sequences and rows, and a row's result
depends on that row alone. Activations and states are float32; weights are widened where
they are used. Native kernels replace these functions one for one.

Sources: model-spec sections 3.0 to 3.8.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
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
        return _bfloat16_bits(x)
    return x.astype(dtype)


def _bfloat16_bits(x: Array) -> Array:
    """Rounds to the nearest, ties to even, on integers: XLA may flush what is denormal."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return jnp.where(is_nan, (bits >> 16) | 0x40, rounded).astype(jnp.uint16)


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


def row_product_add(
    x: Float[Array, "*rows C K"], weight: Float[Array, "M K"], other: Float[Array, "*rows M"]
) -> Float[Array, "*rows C M"]:
    """The product of every stream with one weight, and one row added to all of its streams."""
    return row_product(x, weight) + other[..., None, :]


def row_product_combine(
    x: Float[Array, "*rows K"],
    weight: Float[Array, "M K"],
    streams: Float[Array, "*rows C M"],
    strength: Float[Array, "*rows C"],
) -> Float[Array, "*rows C M"]:
    """A branch's last product, added to every stream by its strength."""
    return hyper_combine(streams, row_product(x, weight), strength)


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


def route(
    logits: Float[Array, "*rows E"], chosen: int, renormalise: bool
) -> tuple[Int[Array, "*rows K"], Float[Array, "*rows K"]]:
    """The experts of each row and their weights; equal scores favour the lower expert."""
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), chosen)
    if renormalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def swiglu(gate: Float[Array, "*rows I"], up: Float[Array, "*rows I"]) -> Array:
    """``silu(gate) * up``: what lies between an expert's two products."""
    return jax.nn.silu(gate) * up


def expert_rows(
    x: Float[Array, "B R H"],
    gate_up: Float[Array, "E two_I H"],
    down: Float[Array, "E H I"],
    experts: Int[Array, "B R K"],
    weights: Float[Array, "B R K"],
    shared: Float[Array, "B R H"],
    share: Float[Array, "B R 1"],
) -> Float[Array, "B R H"]:
    """Weighted sum of each row's experts, plus ``sigmoid(share) * shared``.

    Reads only the experts that were chosen. ``shared`` is the output of the expert that
    every row passes through.
    """
    chosen_in, chosen_out = decode(gate_up[experts]), decode(down[experts])
    products = jnp.einsum("brkih,brh->brki", chosen_in, x, precision=_HIGHEST)
    inner = swiglu(*jnp.split(products, 2, axis=-1))
    outer = jnp.einsum("brkhi,brki->brkh", chosen_out, inner, precision=_HIGHEST)
    mixed = jnp.einsum("brkh,brk->brh", outer, weights, precision=_HIGHEST)
    return mixed + jax.nn.sigmoid(share) * shared


def ple_gate(
    key: Float[Array, "*rows C H"],
    streams: Float[Array, "*rows C H"],
    value: Float[Array, "*rows H"],
    norms: tuple[Float[Array, " D"], Float[Array, " D"], Float[Array, " D"]],
    eps: float,
    scale: Float[Array, "*one"] | None = None,
) -> tuple[Float[Array, "*rows C H"], Float[Array, "*rows C H"]]:
    """The n-gram value, let through per stream, and that normalised for the convolution.

    A stream lets it through by how well the normalised key meets the normalised stream.
    ``norms`` are the weights for key, stream and convolution. ``scale`` is that of a float8
    table: it multiplies key and value, which is where a factor of their input comes out.
    """
    norm_key, norm_query, norm_conv = norms
    if scale is not None:
        factor = scale.astype(jnp.float32).reshape(())
        key, value = key * factor, value * factor
    met = stream_norm(key, norm_key, eps) * stream_norm(streams, norm_query, eps)
    score = jnp.sum(met, axis=-1) / jnp.sqrt(jnp.float32(key.shape[-1]))
    score = jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6))
    gated = jax.nn.sigmoid(score)[..., None] * value[..., None, :]
    return gated, stream_norm(gated, norm_conv, eps)


def ple_output(
    streams: Float[Array, "B T C H"],
    gated: Float[Array, "B T C H"],
    columns: Float[Array, "B past_and_T C H"],
    weight: Float[Array, "D 1 taps"],
    dilation: int,
) -> Float[Array, "B T C H"]:
    """The streams with the gated value and its convolution over time added."""
    mixed = causal_conv(columns.reshape(*columns.shape[:2], -1), weight, dilation)
    return streams + gated + jax.nn.silu(mixed).reshape(streams.shape)


def argmax(logits: Float[Array, "*rows V"]) -> tuple[Int[Array, "*rows"], Bool[Array, "*rows"]]:
    """Greedy choice: non-finite logits never win, the lowest id wins a tie, else id 0.

    Also whether the row had not a single finite logit.
    """
    finite = jnp.isfinite(logits)
    shown = jnp.where(finite, logits, -jnp.inf)
    best = jnp.max(shown, axis=-1, keepdims=True)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(finite & (shown == best), index, logits.shape[-1]), axis=-1)
    lost = ~jnp.any(finite, axis=-1)
    return jnp.where(lost, 0, first), lost
