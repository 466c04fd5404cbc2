"""Attention of decoded rows in plain JAX: inputs, selection of blocks, the mixed values.

The selection visits blocks in pieces, and a piece that no row can see is skipped, so the
work follows what is visible and not the cache's capacity.

Sources: model-spec sections 3.5 and 3.6.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from hipjax.ffi.reference import decode, rms_norm
from hipjax.typing import Array, Bool, Float, Int, Num

_BLOCK_PIECE = 2048
_HIGHEST = lax.Precision.HIGHEST

Carry = TypeVar("Carry")


def rotate(
    x: Float[Array, "*rows N width"],
    positions: Int[Array, "*rows"],
    frequencies: Float[Array, " half"],
) -> Array:
    """Rotary embedding of the first values of the last axis, half-split pairing."""
    half = frequencies.shape[0]
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1)


def attention_inputs(
    projected: Float[Array, "B R N 2 width"],
    key: Float[Array, "B R groups width"],
    index: Float[Array, "B R queries_and_key index"],
    positions: Int[Array, "B R"],
    query_norm: Float[Array, " width"],
    key_norm: Float[Array, " width"],
    index_norm: Float[Array, " index"],
    frequencies: Float[Array, " half"],
    eps: float,
) -> tuple[
    Float[Array, "B R N width"],
    Float[Array, "B R groups width"],
    Float[Array, "B R queries index"],
]:
    """Queries, keys and index queries of rows, normed per head and rotated.

    Args:
      projected: query and gate of every head; the gate is not touched.
      key: the key projection.
      index: index queries, then the raw index key, which is not touched.
      positions: of the rows.
      query_norm: norm weight w of queries; the norm scales by 1 + w.
      key_norm: the same of keys.
      index_norm: the same of index queries.
      frequencies: rotary frequency of each pair; value i turns with value i + half.
      eps: of the norms.
    """
    query = rotate(rms_norm(projected[..., 0, :], query_norm, eps), positions, frequencies)
    index_query = rotate(rms_norm(index[..., :-1, :], index_norm, eps), positions, frequencies)
    return query, rotate(rms_norm(key, key_norm, eps), positions, frequencies), index_query


def block_keys(
    raw: Num[Array, "B tokens width"],
    first: Int[Array, " B"],
    norm: Float[Array, " width"],
    frequencies: Float[Array, " half"],
    eps: float,
    ratio: int,
) -> Float[Array, "B blocks width"]:
    """Keys of whole blocks: the mean of ``ratio`` raw index keys, normed and rotated.

    Args:
      raw: index keys as cached, see ``ops.encode``.
      first: number of the first block; a block's position is that of its first token.
      norm: norm weight w; the norm scales by 1 + w.
      frequencies: rotary frequency of each pair.
      eps: of the norm.
      ratio: tokens of a block.
    """
    batch, tokens, width = raw.shape
    mean = jnp.mean(decode(raw).reshape(batch, tokens // ratio, ratio, width), axis=2)
    positions = (first[:, None] + jnp.arange(tokens // ratio)) * ratio
    return rotate(rms_norm(mean, norm, eps)[:, :, None], positions, frequencies)[:, :, 0]


def in_pieces(
    body: Callable[[Carry, Array], Carry],
    carry: Carry,
    size: int,
    piece: int,
    visible: Int[Array, ""],
) -> Carry:
    """Folds ``body(carry, start)`` over ``0, piece, …`` below ``size``.

    The last start is moved back so that every piece is full: a body must itself pass over
    what an earlier piece covered. Pieces at or past ``visible`` are skipped. Reverse-mode
    differentiable, since the number of pieces is static.
    """
    if size <= piece:
        return body(carry, jnp.int32(0))

    def visit(carry: Carry, begin: Array) -> tuple[Carry, None]:
        return lax.cond(begin < visible, body, lambda c, _: c, carry, begin), None

    carry, _ = lax.scan(visit, carry, jnp.arange(0, size, piece, dtype=jnp.int32))
    return carry


def piece_at(array: Array, begin: Array, piece: int) -> tuple[Array, Array]:
    """The rows of ``array`` (its second last axis) for ``begin``, and their indices."""
    size = min(piece, array.shape[-2])
    start = jnp.minimum(begin, array.shape[-2] - size)
    return lax.dynamic_slice_in_dim(array, start, size, axis=-2), start + jnp.arange(size)


def block_scores(
    query: Float[Array, "B R N width"], keys: Num[Array, "B blocks width"]
) -> Float[Array, "B R blocks"]:
    """Relevance of every cached block to every row: summed positive parts over heads."""
    products = jnp.einsum("brnd,bkd->brnk", query, decode(keys), precision=_HIGHEST)
    return jnp.sum(jax.nn.relu(products), axis=2) / jnp.sqrt(jnp.float32(query.shape[-1]))


def masked_scores(
    query: Float[Array, "B R N width"],
    blocks: Num[Array, "B piece width"],
    index: Int[Array, " piece"],
    first: Int[Array, ""],
    visible: Int[Array, "B R"],
) -> Float[Array, "B R piece"]:
    """Block scores; minus infinity where a block is not ``first`` or later, or not visible.

    A score that is not a number comes after all others: scores are never negative.
    """
    live = (index >= first) & (index < visible[..., None])
    scores = block_scores(query, blocks)
    return jnp.where(live, jnp.where(jnp.isnan(scores), -1.0, scores), -jnp.inf)


def select_blocks(
    query: Float[Array, "B R N width"],
    blocks: Num[Array, "B blocks width"],
    visible: Int[Array, "B R"],
    budget: int,
) -> tuple[Int[Array, "B R slots"], Int[Array, "B R"]]:
    """The best ``budget`` of each row's ``visible`` blocks, the lower one of equal scores.

    Returns:
      Their numbers in ascending order, and how many there are. There are as many slots as
      the budget and the cache allow; those that stay empty hold -1.
    """
    batch, rows = visible.shape
    width = min(budget, blocks.shape[1])

    def visit(carry: tuple[Array, Array], begin: Array) -> tuple[Array, Array]:
        piece, index = piece_at(blocks, begin, _BLOCK_PIECE)
        scores = masked_scores(query, piece, index, begin, visible)
        names = jnp.broadcast_to(index, scores.shape)
        if blocks.shape[1] > _BLOCK_PIECE:
            scores = jnp.concatenate([carry[0], scores], axis=-1)
            names = jnp.concatenate([carry[1], names], axis=-1)
        best, at = lax.top_k(scores, width)
        return best, jnp.take_along_axis(names, at, axis=-1)

    start = (
        jnp.full((batch, rows, width), -jnp.inf),
        jnp.zeros((batch, rows, width), jnp.int32),
    )
    most = jnp.max(visible)
    scores, names = in_pieces(visit, start, blocks.shape[1], _BLOCK_PIECE, most)
    real = scores > -jnp.inf
    ascending = jnp.sort(jnp.where(real, names, blocks.shape[1]), axis=-1)
    count = jnp.sum(real, axis=-1, dtype=jnp.int32)
    return jnp.where(jnp.arange(width) < count[..., None], ascending, -1), count


def listed_tokens(
    selected: Int[Array, "B R slots"],
    count: Int[Array, "B R"],
    positions: Int[Array, "B R"],
    ratio: int,
) -> tuple[Int[Array, "B R L"], Bool[Array, "B R L"]]:
    """Tokens of the selected blocks, then the tail after the last complete block.

    Slots that are not visible name the row's own token, see :func:`attend_rows`.
    """
    shape = (*positions.shape, -1)
    inside = (selected[..., None] * ratio + jnp.arange(ratio)).reshape(shape)
    tail_start = (positions + 1) // ratio * ratio
    tail = tail_start[..., None] + jnp.arange(ratio - 1)
    tokens = jnp.concatenate([inside, tail], axis=-1)
    own = positions[..., None]
    real = jnp.arange(selected.shape[-1]) < count[..., None]
    visible = jnp.concatenate([jnp.repeat(real, ratio, axis=-1), tail <= own], axis=-1)
    return jnp.where(visible, tokens, own), visible


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


def attend(
    query: Float[Array, "B R N width"],
    keys: Num[Array, "B groups S width"],
    values: Num[Array, "B groups S width"],
    selected: Int[Array, "B R slots"],
    count: Int[Array, "B R"],
    positions: Int[Array, "B R"],
    projected: Float[Array, "B R N 2 width"],
    ratio: int,
) -> Float[Array, "B R N width"]:
    """Gated attention of each row over its selected blocks and the tail after the last one.

    Args:
      query: normed and rotated queries.
      keys: the cached keys, the rows' own included, see ``ops.encode``.
      values: the cached values likewise.
      selected: numbers of the selected blocks, as :func:`select_blocks` lists them.
      count: how many there are.
      positions: of the rows; the tail is the (position + 1) mod ratio last tokens.
      projected: query and gate of every head; the result is scaled by the gate's sigmoid.
      ratio: tokens of a block.
    """
    tokens, visible = listed_tokens(selected, count, positions, ratio)
    mixed = attend_rows(query, keys, values, tokens, visible)
    return mixed * jax.nn.sigmoid(projected[..., 1, :])
