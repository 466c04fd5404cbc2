"""Which cached blocks a query reads (QSA): exact top-k, lower block first on ties.

Source: model-spec section 3.6. Blocks are visited in pieces, and a piece that no row can
see is skipped, so the work follows what is visible and not the cache's capacity.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from hipjax.ffi import ops
from hipjax.typing import Array, Bool, Float, Int, Num

_BLOCK_PIECE = 2048

Carry = TypeVar("Carry")


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


def masked_scores(
    query: Float[Array, "B R N width"],
    blocks: Num[Array, "B piece width"],
    index: Int[Array, " piece"],
    first: Int[Array, ""],
    visible: Int[Array, "B R"],
) -> Float[Array, "B R piece"]:
    """Block scores; minus infinity where a block is not ``first`` or later, or not visible."""
    live = (index >= first) & (index < visible[..., None])
    return jnp.where(live, ops.block_scores(query, blocks), -jnp.inf)


def select_blocks(
    query: Float[Array, "B R N width"],
    blocks: Num[Array, "B blocks width"],
    visible: Int[Array, "B R"],
    budget: int,
) -> tuple[Int[Array, "B R budget"], Bool[Array, "B R budget"]]:
    """The best ``budget`` of each row's ``visible`` blocks, best first.

    Returns:
      Block indices, and which of them are real: the rest fill up a row that sees fewer.
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
    return names, scores > -jnp.inf


def selected_mask(
    query: Float[Array, "B T N width"],
    blocks: Num[Array, "B blocks width"],
    visible: Int[Array, "B T"],
    budget: int,
) -> Bool[Array, "B T blocks"]:
    """The same selection as a mask over blocks, for the queries of one prompt chunk."""
    index = jnp.arange(blocks.shape[1])
    scores = masked_scores(query, blocks, index, jnp.int32(0), visible)
    best, at = lax.top_k(scores, min(budget, blocks.shape[1]))
    cut = best[..., -1:]
    last_tie = jnp.max(jnp.where(best == cut, at, -1), axis=-1, keepdims=True)
    chosen = (scores > cut) | ((scores == cut) & (index <= last_tie))
    return jax.lax.stop_gradient(chosen & (index < visible[..., None]))


def listed_tokens(
    names: Int[Array, "B R budget"],
    real: Bool[Array, "B R budget"],
    positions: Int[Array, "B R"],
    ratio: int,
) -> tuple[Int[Array, "B R L"], Bool[Array, "B R L"]]:
    """Tokens of the selected blocks, then the tail after the last complete block.

    Slots that are not visible name the row's own token, see ``ops.attend_rows``.
    """
    shape = (*positions.shape, -1)
    inside = (names[..., None] * ratio + jnp.arange(ratio)).reshape(shape)
    tail_start = (positions + 1) // ratio * ratio
    tail = tail_start[..., None] + jnp.arange(ratio - 1)
    tokens = jnp.concatenate([inside, tail], axis=-1)
    own = positions[..., None]
    visible = jnp.concatenate([jnp.repeat(real, ratio, axis=-1), tail <= own], axis=-1)
    return jnp.where(visible, tokens, own), visible
