"""Per-layer embedding of n-grams: hashed rows, gated per stream, convolved over time.

Source: model-spec section 3.3.
"""

import jax.numpy as jnp
from flax import linen as nn

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.layers import Linear, StreamNorm, Weight, conv_init, together
from hipjax.model.ngram import row_ids
from hipjax.model.state import PLEState, PLETape
from hipjax.typing import Array, Float, Int


class NgramTableWeight(nn.Module):
    """The n-gram table; a float8 table comes with one scale, which ``ops.ple_gate`` applies."""

    rows: int
    width: int
    scale: float

    def setup(self) -> None:
        init = nn.initializers.normal(self.scale)
        self.weight = self.param("weight", init, (self.rows, self.width))
        scaled = self.has_variable("params", "weight_scale")
        found = self.get_variable("params", "weight_scale") if scaled else None
        self.weight_scale: Array | None = found

    def __call__(self, rows: Int[Array, "B T heads"]) -> Float[Array, "B T heads width"]:
        return ops.decode(self.weight[rows])


class NgramEmbedding(nn.Module):
    """Hash of recent tokens to rows of the table, side by side."""

    config: ModelConfig
    index: int

    def setup(self) -> None:
        c = self.config
        table = c.ngram_table(self.index)
        width = c.ple_embed_dim // len(table.sizes)
        self.ngram_embedding = NgramTableWeight(table.rows, width, c.initializer_range)

    def __call__(
        self, tokens: Int[Array, "B T"], history: Int[Array, "B past"]
    ) -> Float[Array, "B T width"]:
        c = self.config
        assert c.eos_token_id is not None
        rows = row_ids(
            tokens,
            history,
            c.ngram_table(self.index),
            eos=c.eos_token_id,
            heads_per_ngram=c.heads_per_ngram,
        )
        picked = self.ngram_embedding(rows)
        return picked.reshape(*picked.shape[:2], -1)

    def scale(self) -> Array | None:
        """The table's own scale, which the result of a call still lacks."""
        return self.ngram_embedding.weight_scale


class PLE(nn.Module):
    """One PLE block.

    Attributes:
      config: the model's configuration.
      index: its place among the model's PLE layers, which selects the hash constants.
    """

    config: ModelConfig
    index: int

    def setup(self) -> None:
        c, scale = self.config, self.config.initializer_range
        size = c.streams_size
        self.ple_embedding = NgramEmbedding(c, self.index)
        self.key_proj = Linear(c.ple_embed_dim, size, scale)
        self.value_proj = Linear(c.ple_embed_dim, c.hidden_size, scale)
        self.norm_key = StreamNorm(size, c.rms_norm_eps)
        self.norm_query = StreamNorm(size, c.rms_norm_eps)
        self.norm_conv = StreamNorm(size, c.rms_norm_eps)
        taps = c.ple_conv_kernel_size
        self.conv1d = Weight((size, 1, taps), conv_init(taps))

    def __call__(
        self, streams: Float[Array, "B T C H"], tokens: Int[Array, "B T"], state: PLEState
    ) -> tuple[Float[Array, "B T C H"], PLETape]:
        """The streams with the block's output added, and the tape of all T tokens."""
        c = self.config
        embedded = self.ple_embedding(tokens, state.tokens)
        key, value = together(embedded, self.key_proj, self.value_proj)
        norms = (self.norm_key.weight, self.norm_query.weight, self.norm_conv.weight)
        gated, normed = ops.ple_gate(
            key.reshape(streams.shape),
            streams,
            value,
            norms,
            c.rms_norm_eps,
            self.ple_embedding.scale(),
        )
        columns = jnp.concatenate([state.conv, normed], axis=1)
        streams = ops.ple_output(streams, gated, columns, self.conv1d(), c.ngram_size)
        seen = jnp.concatenate([state.tokens, tokens], axis=1)
        return streams, PLETape(columns, seen, tokens.shape[1])
