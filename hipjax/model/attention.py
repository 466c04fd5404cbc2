"""Gated attention over the tokens that the indexer selects.

Source: model-spec sections 3.5 and 3.6. Two routes compute the same: ``rows`` reads the
selected tokens of each row, ``prompt`` passes once over the visible keys of a chunk.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from hipjax.ffi import ops
from hipjax.ffi.reference_attention import in_pieces, piece_at
from hipjax.model.config import ModelConfig
from hipjax.model.layers import Linear, RMSNorm, together
from hipjax.model.selection import selected_mask
from hipjax.model.state import AttentionState, AttentionTape, write_rows
from hipjax.typing import Array, Bool, Float, Int, Num

_KEY_PIECE = 1024


class Projections(NamedTuple):
    """What one token contributes to attention, before the cache is consulted.

    Attributes:
      projected: [B, T, N, 2, width], query and gate of every head as projected.
      query, index_query: normed and rotated.
      key, value: as they are cached.
      index_key: raw, as it is cached.
    """

    projected: Array
    query: Array
    key: Array
    value: Array
    index_query: Array
    index_key: Array

    @property
    def gate(self) -> Array:
        """[B, T, N, width], before its sigmoid."""
        return self.projected[..., 1, :]


@functools.cache
def rotary_frequencies(theta: float, dims: int) -> np.ndarray:
    """Radians by which each pair of rotating dimensions turns from token to token.

    A constant of the host in float32, step by step as PyTorch computes it, so that every
    back end turns by the same angles.
    """
    exponent = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    power = (np.float64(np.float32(theta)) ** exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / power


class Indexer(nn.Module):
    """Projections and norms of the QSA indexer."""

    config: ModelConfig
    theta: float

    def setup(self) -> None:
        c = self.config
        width = (c.indexer_n_heads + 1) * c.indexer_head_dim
        self.index_qk_proj = Linear(c.hidden_size, width, c.initializer_range)
        self.q_layernorm = RMSNorm(c.indexer_head_dim, c.rms_norm_eps)
        self.k_layernorm = RMSNorm(c.indexer_head_dim, c.rms_norm_eps)

    def block_keys(
        self, aligned: Num[Array, "B aligned width"], first: Int[Array, " B"]
    ) -> Float[Array, "B blocks width"]:
        """Keys of whole blocks of raw index keys, block ``first`` being the first one."""
        c = self.config
        frequencies = jnp.asarray(rotary_frequencies(self.theta, c.rotary_dim))
        return ops.block_keys(
            *(aligned, first, self.k_layernorm.weight, frequencies),
            eps=c.rms_norm_eps,
            ratio=c.indexer_compress_ratio,
        )


class GatedAttention(nn.Module):
    """One attention layer's mixer.

    Attributes:
      config: the model's configuration.
      theta: base of the rotary frequencies; the MTP head has its own.
    """

    config: ModelConfig
    theta: float

    def setup(self) -> None:
        c, scale = self.config, self.config.initializer_range
        size, width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, 2 * size, scale)
        self.k_proj = Linear(c.hidden_size, width, scale)
        self.v_proj = Linear(c.hidden_size, width, scale)
        self.o_proj = Linear(size, c.hidden_size, scale)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.indexer = Indexer(c, self.theta)

    def project(self, x: Float[Array, "B T H"], positions: Int[Array, "B T"]) -> Projections:
        """Normed and rotated queries and keys, values, gates and index projections."""
        c = self.config
        projected, key, value, index = together(
            x, self.q_proj, self.k_proj, self.v_proj, self.indexer.index_qk_proj
        )
        projected = projected.reshape(*x.shape[:-1], c.num_attention_heads, 2, c.head_dim)
        groups = (*x.shape[:-1], c.num_key_value_heads, c.head_dim)
        index = index.reshape(*x.shape[:-1], -1, c.indexer_head_dim)
        query, key, index_query = ops.attention_inputs(
            *(projected, key.reshape(groups), index, positions),
            *(self.q_norm.weight, self.k_norm.weight, self.indexer.q_layernorm.weight),
            jnp.asarray(rotary_frequencies(self.theta, c.rotary_dim)),
            eps=c.rms_norm_eps,
        )
        return Projections(
            projected, query, key, value.reshape(groups), index_query, index[..., -1, :]
        )

    def write(
        self,
        p: Projections,
        state: AttentionState,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> tuple[AttentionState, Num[Array, "B aligned width"]]:
        """Caches ``count`` tokens and the blocks they complete; ``pending`` is not moved."""
        ratio = self.config.indexer_compress_ratio
        aligned = state.aligned(p.index_key, length)
        first = length // ratio
        written = state.replace(
            keys=write_rows(state.keys, jnp.moveaxis(p.key, 1, 2), length, count),
            values=write_rows(state.values, jnp.moveaxis(p.value, 1, 2), length, count),
            blocks=write_rows(
                state.blocks,
                self.indexer.block_keys(aligned, first),
                first,
                (length + count) // ratio - first,
            ),
        )
        return written, aligned

    def rows(
        self, x: Float[Array, "B R H"], state: AttentionState, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B R H"], AttentionTape]:
        """Decodes R rows at once; row r reads the cache up to and including itself."""
        c = self.config
        positions = length[:, None] + jnp.arange(x.shape[1])
        p = self.project(x, positions)
        count = jnp.full_like(length, x.shape[1])
        written, aligned = self.write(p, state, length, count)
        ratio = c.indexer_compress_ratio
        visible = (positions + 1) // ratio
        selected, number = ops.select_blocks(
            p.index_query, written.blocks, visible, c.budget_blocks
        )
        gated = ops.attend(
            *(p.query, written.keys, written.values),
            *(selected, number, positions, p.projected),
            ratio=ratio,
        )
        out = self.o_proj(gated.reshape(*x.shape[:-1], -1))
        return out, AttentionTape(written, aligned, length)

    def prompt(
        self,
        x: Float[Array, "B T H"],
        state: AttentionState,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T H"], AttentionState, Bool[Array, "B T blocks"]]:
        """Runs a chunk of which the first ``count`` tokens are real.

        Returns:
          The output, the cache after those tokens, and which blocks each query selected.
        """
        c = self.config
        positions = length[:, None] + jnp.arange(x.shape[1])
        p = self.project(x, positions)
        written, aligned = self.write(p, state, length, count)
        blocks = (positions + 1) // c.indexer_compress_ratio
        chosen = selected_mask(p.index_query, written.blocks, blocks, c.budget_blocks)
        mixed = attend_chunk(p.query, written, chosen, positions, length + count)
        state = written.keep_pending(aligned, length, length + count)
        gated = mixed * nn.sigmoid(p.gate)
        return self.o_proj(gated.reshape(*x.shape[:-1], -1)), state, chosen


def attend_chunk(
    query: Float[Array, "B T N width"],
    cache: AttentionState,
    chosen: Bool[Array, "B T blocks"],
    positions: Int[Array, "B T"],
    end: Int[Array, " B"],
) -> Float[Array, "B T N width"]:
    """Attention of a chunk's queries over selected blocks and tails, keys piece by piece.

    A running maximum and sum stand for the softmax, so that no table is larger than the
    chunk's queries times one piece of keys.
    """
    batch, length, heads, width = query.shape
    groups = cache.keys.shape[1]
    ratio = cache.pending.shape[1] + 1
    grouped = query.reshape(batch, length, groups, heads // groups, width)
    grouped = grouped / jnp.sqrt(jnp.float32(width))
    tail_start = ((positions + 1) // ratio * ratio)[..., None]

    def visit(carry: tuple[Array, Array, Array], begin: Array) -> tuple[Array, Array, Array]:
        best, total, mixed = carry
        keys, index = piece_at(cache.keys, begin, _KEY_PIECE)
        values, _ = piece_at(cache.values, begin, _KEY_PIECE)
        in_block = jnp.take(chosen, index // ratio, axis=2)
        in_tail = (index >= tail_start) & (index <= positions[..., None])
        alive = index < end[:, None]
        seen = (in_block | in_tail) & (index >= begin) & alive[:, None]
        live = alive[:, None, :, None]  # a weight of 0 does not silence a NaN in a dead row
        scores = jnp.einsum(
            "btgqd,bgsd->bgqts",
            grouped,
            jnp.where(live, ops.decode(keys), 0),
            precision=lax.Precision.HIGHEST,
        )
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_best = jnp.maximum(best, lax.stop_gradient(jnp.max(scores, axis=-1)))
        base = jnp.where(jnp.isfinite(new_best), new_best, 0.0)
        weights = jnp.exp(scores - base[..., None])
        shrink = jnp.exp(best - base)
        added = jnp.einsum(
            "bgqts,bgsd->bgqtd",
            weights,
            jnp.where(live, ops.decode(values), 0),
            precision=lax.Precision.HIGHEST,
        )
        total = total * shrink + jnp.sum(weights, axis=-1)
        return new_best, total, mixed * shrink[..., None] + added

    shape = (batch, groups, heads // groups, length)
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, width)))
    _, total, mixed = in_pieces(visit, start, cache.keys.shape[2], _KEY_PIECE, jnp.max(end))
    mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    return jnp.moveaxis(mixed, 3, 1).reshape(query.shape)
