"""What a sequence remembers between steps, and what survives a rejection.

Every cached array of model-spec section 4 lives in one of the classes here. A layer that
verifies rows hands back a *tape*: ``tape.commit(kept)`` is the state after the first
``kept`` of those rows, 0 to all, without running the layer again.

Rows of a cache at or past the sequence's length, and blocks that are not complete, are
dead: nothing reads them, and they may hold anything. ``DecodeState.canonical`` clears
them, so that two states are equal exactly when their canonical forms are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from hipjax import checks
from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.typing import Array, Int, Leaf, Num


def write_rows(
    cache: Num[Array, "B *groups S width"],
    rows: Num[Array, "B *groups T width"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Num[Array, "B *groups S width"]:
    """Puts the first ``count`` of ``rows`` at ``start``; what would not fit is left out.

    Reads and writes as many cache rows as there are rows, wherever they go.
    """
    window = min(rows.shape[-2], cache.shape[-2])

    def one(cache: Array, rows: Array, start: Array, count: Array) -> Array:
        begin = jnp.clip(start, 0, cache.shape[-2] - window)
        source = begin - start + jnp.arange(window)
        fresh = jnp.take(rows, source, axis=-2, mode="clip")
        old = lax.dynamic_slice_in_dim(cache, begin, window, axis=-2)
        use = ((source >= 0) & (source < count))[:, None]
        return lax.dynamic_update_slice_in_dim(cache, jnp.where(use, fresh, old), begin, -2)

    return jax.vmap(one)(cache, ops.encode(rows, cache.dtype), start, count)


def last_columns(
    columns: Num[Array, "B past_and_T *each"], count: Int[Array, " B"], width: int
) -> Num[Array, "B width *each"]:
    """The ``width`` columns that end at token ``count``, past ones included."""
    return jax.vmap(lambda c, n: lax.dynamic_slice_in_dim(c, n, width))(columns, count)


class AttentionState(struct.PyTreeNode):
    """Cache of one attention layer, in float32 or as bfloat16 bits: see ``ops.encode``.

    Attributes:
      keys: [B, groups, S, width], normalised and rotated.
      values: [B, groups, S, width].
      blocks: [B, S / ratio, index width], keys of the complete blocks.
      pending: [B, ratio - 1, index width], raw index keys of the tokens after the last
        complete block; unused slots are zero.
    """

    keys: Leaf
    values: Leaf
    blocks: Leaf
    pending: Leaf

    @classmethod
    def init(cls, config: ModelConfig, batch: int, capacity: int, dtype: Any) -> "AttentionState":
        """An empty cache for ``capacity`` tokens."""
        c, ratio = config, config.indexer_compress_ratio
        dtype = jnp.uint16 if dtype == jnp.bfloat16 else dtype
        rows = (batch, c.num_key_value_heads, capacity, c.head_dim)
        return cls(
            keys=jnp.zeros(rows, dtype),
            values=jnp.zeros(rows, dtype),
            blocks=jnp.zeros((batch, -(-capacity // ratio), c.indexer_head_dim), dtype),
            pending=jnp.zeros((batch, ratio - 1, c.indexer_head_dim), dtype),
        )

    def aligned(
        self, raw: Num[Array, "B T width"], length: Int[Array, " B"]
    ) -> Num[Array, "B aligned width"]:
        """Pending raw index keys and new ones, from the first token of the open block on."""
        slots = self.pending.shape[1]
        both = jnp.concatenate([self.pending, ops.encode(raw, self.pending.dtype)], axis=1)
        wanted = -(-both.shape[1] // (slots + 1)) * (slots + 1)
        index = jnp.arange(wanted)
        open_slots = (length % (slots + 1))[:, None]
        source = jnp.where(index < open_slots, index, index - open_slots + slots)
        return jax.vmap(lambda b, i: b[i])(both, jnp.minimum(source, both.shape[1] - 1))

    def keep_pending(
        self, aligned: Num[Array, "B aligned width"], length: Array, new_length: Array
    ) -> "AttentionState":
        """Sets ``pending`` for a sequence that has grown from ``length`` to ``new_length``."""
        slots = self.pending.shape[1]
        ratio = slots + 1
        begin = (new_length // ratio - length // ratio) * ratio
        padded = jnp.pad(aligned, ((0, 0), (0, slots), (0, 0)))
        kept = last_columns(padded, begin, slots)
        live = jnp.arange(slots) < (new_length % ratio)[:, None]
        return self.replace(pending=jnp.where(live[..., None], kept, 0))

    def rewound(self, earlier: "AttentionState") -> "AttentionState":
        """This cache as it was at ``earlier``; rows written since then are dead."""
        return self.replace(pending=earlier.pending)

    def canonical(self, length: Int[Array, " B"]) -> "AttentionState":
        """This cache with its dead rows cleared."""
        ratio = self.pending.shape[1] + 1

        def cleared(array: Array, live: Array) -> Array:
            alive = jnp.arange(array.shape[-2]) < live[:, None]
            shape = (alive.shape[0], *[1] * (array.ndim - 3), alive.shape[1], 1)
            return jnp.where(alive.reshape(shape), array, 0)

        return AttentionState(
            keys=cleared(self.keys, length),
            values=cleared(self.values, length),
            blocks=cleared(self.blocks, length // ratio),
            pending=cleared(self.pending, length % ratio),
        )


class AttentionTape(struct.PyTreeNode):
    """An attention layer's rows before the verdict.

    Attributes:
      state: the cache with all rows written and ``pending`` as it was before them.
      aligned: raw index keys from the open block on, see ``AttentionState.aligned``.
      length: [B] the sequence's length before the rows.
    """

    state: AttentionState
    aligned: Leaf
    length: Leaf

    def commit(self, kept: Int[Array, " B"]) -> AttentionState:
        """The state after the first ``kept`` rows."""
        return self.state.keep_pending(self.aligned, self.length, self.length + kept)


class Q8(struct.PyTreeNode):
    """A recurrent state in eight bits, rounded after every token. Source: decoding-spec 13.

    Attributes:
      codes: [B, N, value width, key width] int8.
      scales: [B, N, value width] float32; a value is scale * code.
      nearest: round to nearest even; else by a noise that the token's position fixes.
    """

    codes: Leaf
    scales: Leaf
    nearest: bool = struct.field(pytree_node=False)


class DeltaNetState(struct.PyTreeNode):
    """Memory of one Gated DeltaNet layer.

    Attributes:
      conv: [B, taps - 1, channels], the last inputs of the convolution.
      recurrent: [B, N, key width, value width] float32, or the same as :class:`Q8`.
    """

    conv: Leaf
    recurrent: Leaf | Q8

    @classmethod
    def init(cls, config: ModelConfig, batch: int, recurrent: str = "float32") -> "DeltaNetState":
        """The memory of a sequence that has not begun; ``recurrent`` as in ``DecodeState``."""
        c = config
        heads, keys, values = (
            c.linear_num_value_heads,
            c.linear_key_head_dim,
            c.linear_value_head_dim,
        )
        state: Array | Q8 = jnp.zeros((batch, heads, keys, values))
        if recurrent != "float32":
            codes = jnp.zeros((batch, heads, values, keys), jnp.int8)
            state = Q8(codes, jnp.ones((batch, heads, values)), recurrent == "q8_nearest")
        conv = jnp.zeros((batch, c.linear_conv_kernel_dim - 1, c.linear_conv_size))
        return cls(conv=conv, recurrent=state)

    def floats(self) -> Num[Array, "B N keys values"]:
        """The recurrent state in float32."""
        if isinstance(self.recurrent, Q8):
            return ops.delta_dequantised(self.recurrent.codes, self.recurrent.scales)
        return self.recurrent

    def after(
        self,
        conv: Num[Array, "B past channels"],
        floats: Num[Array, "B N keys values"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> "DeltaNetState":
        """The memory after a chunk of ``count`` tokens from ``length`` on.

        A Q8 state is rounded once, at the position of the chunk's last token; without a
        token it stays as it is.
        """
        old = self.recurrent
        if not isinstance(old, Q8):
            return DeltaNetState(conv=conv, recurrent=floats)
        codes, scales = ops.delta_quantised(floats, length + count - 1, old.nearest)
        moved = (count > 0)[:, None, None]
        new = old.replace(
            codes=jnp.where(moved[..., None], codes, old.codes),
            scales=jnp.where(moved, scales, old.scales),
        )
        return DeltaNetState(conv=conv, recurrent=new)


class DeltaNetTape(struct.PyTreeNode):
    """A DeltaNet layer's rows before the verdict: rank-one updates, not states.

    Attributes:
      state: the memory before the rows.
      columns: [B, R, channels], the rows' inputs of the convolution.
      key: [B, R, key heads, key width], correction: [B, R, N, value width], decay: [B, R, N]
        what each row writes to the recurrent state, the decay as its logarithm.
      length: [B] the sequence's length before the rows.
    """

    state: DeltaNetState
    columns: Leaf
    key: Leaf
    correction: Leaf
    decay: Leaf
    length: Leaf

    def commit(self, kept: Int[Array, " B"]) -> DeltaNetState:
        """The state after the first ``kept`` rows."""
        tape = (self.key, self.correction, self.decay, self.state.conv, self.columns, kept)
        old = self.state.recurrent
        if isinstance(old, Q8):
            conv, codes, scales = ops.delta_commit_q8(
                *tape, old.codes, old.scales, self.length, old.nearest
            )
            return DeltaNetState(conv=conv, recurrent=old.replace(codes=codes, scales=scales))
        conv, recurrent = ops.delta_commit(*tape, old)
        return DeltaNetState(conv=conv, recurrent=recurrent)


class PLEState(struct.PyTreeNode):
    """Memory of one PLE block.

    Attributes:
      conv: [B, reach, C, H], the last gated values after ``norm_conv``.
      tokens: [B, ngram_size - 1] the last token ids, end-of-sequence before the first.
    """

    conv: Leaf
    tokens: Leaf

    @classmethod
    def init(cls, config: ModelConfig, batch: int) -> "PLEState":
        """The memory of a sequence that has not begun."""
        c = config
        assert c.eos_token_id is not None
        return cls(
            conv=jnp.zeros((batch, c.ple_reach, c.hc_count, c.hidden_size)),
            tokens=jnp.full((batch, c.ngram_size - 1), c.eos_token_id, jnp.int32),
        )


class PLETape(struct.PyTreeNode):
    """A PLE block's rows before the verdict: old and new columns, old and new tokens."""

    columns: Leaf
    tokens: Leaf
    rows: int = struct.field(pytree_node=False)

    def commit(self, kept: Int[Array, " B"]) -> PLEState:
        """The state after the first ``kept`` rows."""
        return PLEState(
            conv=last_columns(self.columns, kept, self.columns.shape[1] - self.rows),
            tokens=last_columns(self.tokens, kept, self.tokens.shape[1] - self.rows),
        )


class LayerState(struct.PyTreeNode):
    """Memory of one layer: its mixer's, and its PLE block's where it has one."""

    mixer: AttentionState | DeltaNetState
    ple: PLEState | None = None

    def rewound(self, earlier: "LayerState") -> "LayerState":
        """An attention layer's memory as it was at ``earlier``."""
        assert isinstance(self.mixer, AttentionState)
        assert isinstance(earlier.mixer, AttentionState)
        return self.replace(mixer=self.mixer.rewound(earlier.mixer))


class LayerTape(struct.PyTreeNode):
    """One layer's rows before the verdict."""

    mixer: AttentionTape | DeltaNetTape
    ple: PLETape | None = None

    def commit(self, kept: Int[Array, " B"]) -> LayerState:
        """The state after the first ``kept`` rows."""
        ple = None if self.ple is None else self.ple.commit(kept)
        return LayerState(mixer=self.mixer.commit(kept), ple=ple)


class HeadState(struct.PyTreeNode):
    """Memory of the MTP head, which holds one row per token that the trunk has consumed.

    Attributes:
      layer: cache of the head's one attention layer.
      carry: [B, C, H] streams of its newest row, from which the first draft is read and
        with which the second begins.
    """

    layer: LayerState
    carry: Leaf


class DecodeState(struct.PyTreeNode):
    """Everything a batch of sequences remembers between steps.

    Attributes:
      length: [B] tokens consumed by the trunk.
      layers: one state per trunk layer.
      carry: [B, C, H] the trunk's streams of the last consumed token.
      head: the MTP head's memory; None for plain decoding without a head.
    """

    length: Leaf
    layers: tuple[LayerState, ...]
    carry: Leaf
    head: HeadState | None = None

    @classmethod
    def init(
        cls,
        config: ModelConfig,
        capacity: int,
        *,
        batch: int = 1,
        cache_dtype: Any = jnp.bfloat16,
        recurrent: str = "float32",
        head: bool = True,
    ) -> "DecodeState":
        """The memory of ``batch`` sequences that have not begun.

        Args:
          config: the model's configuration.
          capacity: how many tokens of a sequence the caches can hold.
          batch: number of sequences.
          cache_dtype: dtype of cached keys, values and index keys; bfloat16 as decoded
            by default, float32 for comparisons with a float32 reference.
          recurrent: storage of the DeltaNet layers' states: "float32"; "q8", eight bits,
            rounded with a noise that a token's position fixes; or "q8_nearest".
          head: whether to keep the MTP head's memory too; needs a model that has one.

        Raises:
          ValueError: ``capacity`` or ``batch`` is not positive, ``cache_dtype`` or
            ``recurrent`` is none of these, or ``head`` is asked of a model without an MTP head.
        """
        checks.integer("capacity", capacity, 1)
        checks.integer("batch", batch, 1)
        cache_dtype = checks.cache_dtype(cache_dtype)
        recurrent = checks.recurrent(recurrent)
        if head and not config.has_head:
            raise ValueError("head is True, but this model has no MTP head; pass head=False")
        streams = (batch, config.hc_count, config.hidden_size)

        def layer(index: int) -> LayerState:
            ple = None
            if config.ple_index(index) is not None:
                ple = PLEState.init(config, batch)
            if config.layer_types[index] == "linear_attention":
                return LayerState(DeltaNetState.init(config, batch, recurrent), ple)
            return LayerState(AttentionState.init(config, batch, capacity, cache_dtype), ple)

        attention = LayerState(AttentionState.init(config, batch, capacity, cache_dtype))
        return cls(
            length=jnp.zeros((batch,), jnp.int32),
            layers=tuple(layer(index) for index in range(config.num_hidden_layers)),
            carry=jnp.zeros(streams),
            head=HeadState(attention, jnp.zeros(streams)) if head else None,
        )

    def canonical(self) -> "DecodeState":
        """This state with dead cache rows cleared: equal states have equal canonical forms."""

        def clear(layer: LayerState) -> LayerState:
            if isinstance(layer.mixer, AttentionState):
                return layer.replace(mixer=layer.mixer.canonical(self.length))
            return layer

        head = self.head
        if head is not None:
            head = head.replace(layer=clear(head.layer))
        return self.replace(layers=tuple(map(clear, self.layers)), head=head)


class DecodeTape(struct.PyTreeNode):
    """The trunk's rows before the verdict.

    Attributes:
      state: the state before the rows.
      layers: one tape per trunk layer.
      streams: [B, R, C, H] the trunk's streams of every row.
    """

    state: DecodeState
    layers: tuple[LayerTape, ...]
    streams: Leaf

    def commit(self, kept: Int[Array, " B"]) -> DecodeState:
        """The state after the first ``kept`` rows (0 to R of each sequence).

        The head's memory is left as it is: it follows by ``mtp.extend`` with the tokens
        that the verdict emits.
        """
        both = jnp.concatenate([self.state.carry[:, None], self.streams], axis=1)
        return DecodeState(
            length=self.state.length + kept,
            layers=tuple(tape.commit(kept) for tape in self.layers),
            carry=last_columns(both, kept, 1)[:, 0],
            head=self.state.head,
        )
