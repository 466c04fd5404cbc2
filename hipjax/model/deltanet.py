"""Gated DeltaNet: linear attention with a recurrent state.

Source: model-spec section 3.4. Prompts use the chunked form, decoded rows the recurrence;
the two are equal in exact arithmetic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.layers import Linear, Weight, conv_init, together
from hipjax.model.state import Q8, DeltaNetState, DeltaNetTape, last_columns
from hipjax.typing import Array, Float, Int

_CHUNK = 64


class Recurrence(NamedTuple):
    """Inputs of the delta rule per token, query and key by key heads, the rest by value heads."""

    query: Array
    key: Array
    value: Array
    decay: Array
    strength: Array


class Inputs(NamedTuple):
    """What a layer derives from its input.

    Attributes:
      recurrence: the delta rule's part.
      gate: [B, T, N, values] the output gate before its activation.
      columns: [B, T, channels] the convolution's inputs.
    """

    recurrence: Recurrence
    gate: Array
    columns: Array


class GatedDeltaNet(nn.Module):
    """One linear-attention layer's mixer."""

    config: ModelConfig

    def setup(self) -> None:
        c, scale = self.config, self.config.initializer_range
        heads = c.linear_num_value_heads
        self.in_proj_qkv = Linear(c.hidden_size, c.linear_conv_size, scale)
        self.in_proj_z = Linear(c.hidden_size, c.linear_value_size, scale)
        self.in_proj_b = Linear(c.hidden_size, heads, scale)
        self.in_proj_a = Linear(c.hidden_size, heads, scale)
        taps = c.linear_conv_kernel_dim
        self.conv1d = Weight((c.linear_conv_size, 1, taps), conv_init(taps))
        self.A_log = self.param("A_log", _decay_init, (heads,))
        self.dt_bias = self.param("dt_bias", nn.initializers.ones, (heads,))
        self.norm = Weight((c.linear_value_head_dim,), nn.initializers.ones)
        self.out_proj = Linear(c.linear_value_size, c.hidden_size, scale)

    def inputs(self, x: Float[Array, "B T H"], state: DeltaNetState) -> Inputs:
        """Projections, convolution, heads and gates of T tokens."""
        c = self.config
        qkv, z, a, b = together(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
        recurrence = Recurrence(
            *ops.delta_inputs(
                state.conv,
                qkv,
                a,
                b,
                self.conv1d(),
                self.A_log,
                self.dt_bias,
                c.linear_num_key_heads,
                c.linear_key_head_dim,
            )
        )
        return Inputs(recurrence, z.reshape(recurrence.value.shape), qkv)

    def rows(
        self, x: Float[Array, "B R H"], state: DeltaNetState, length: Int[Array, " B"]
    ) -> tuple[Float[Array, "B R H"], DeltaNetTape]:
        """Decodes R rows one after the other; the state itself moves at commit."""
        c = self.config
        r, gate, columns = self.inputs(x, state)
        closing = (self.norm(), c.rms_norm_eps, c.output_gate_type)
        old = state.recurrent
        if isinstance(old, Q8):
            out, correction = ops.delta_rows_q8(
                *r, gate, old.codes, old.scales, length, *closing, old.nearest
            )
        else:
            out, correction = ops.delta_rows(*r, gate, old, *closing)
        tape = DeltaNetTape(state, columns, r.key, correction, r.decay, length)
        return self.out_proj(out.reshape(*out.shape[:-2], -1)), tape

    def prompt(
        self,
        x: Float[Array, "B T H"],
        state: DeltaNetState,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T H"], DeltaNetState]:
        """Runs a chunk of which the first ``count`` tokens are real."""
        c = self.config
        r, gate, columns = self.inputs(x, state)
        real = jnp.arange(x.shape[1]) < count[:, None]
        share = c.linear_num_value_heads // c.linear_num_key_heads
        r = r._replace(
            query=jnp.repeat(r.query, share, axis=-2), key=jnp.repeat(r.key, share, axis=-2)
        )

        def masked(part: Array) -> Array:
            return jnp.where(real.reshape(real.shape + (1,) * (part.ndim - 2)), part, 0)

        mixed, floats = delta_chunks(state.floats(), Recurrence(*(masked(part) for part in r)))
        both = jnp.concatenate([state.conv, columns], axis=1)
        kept = last_columns(both, count, state.conv.shape[1])
        out = ops.delta_output(mixed, gate, self.norm(), c.rms_norm_eps, c.output_gate_type)
        after = state.after(kept, floats, length, count)
        return self.out_proj(out.reshape(*out.shape[:-2], -1)), after


def delta_chunks(
    state: Float[Array, "B N keys values"], r: Recurrence
) -> tuple[Float[Array, "B T N values"], Float[Array, "B N keys values"]]:
    """The gated delta rule over many tokens, ``_CHUNK`` at a time.

    A token with zero key, value, decay and strength leaves the state as it is.
    """
    length = r.query.shape[1]
    size = min(_CHUNK, 1 << (length - 1).bit_length())
    short = -length % size

    def cut(part: Array) -> Array:
        padded = jnp.pad(part, ((0, 0), (0, short)) + ((0, 0),) * (part.ndim - 2))
        split = padded.reshape(part.shape[0], -1, size, *part.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(split, 3, 2), 1, 0)

    chunks = _prepared(Recurrence(*(cut(part) for part in r)))
    state, mixed = lax.scan(_one_chunk, state, chunks)
    whole = jnp.moveaxis(jnp.moveaxis(mixed, 0, 1), 2, 3)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :length], state


class _Chunk(NamedTuple):
    """What one chunk does to any state S.

    ``fresh = own - carried S`` is written under ``keys`` while S fades by ``left``; the
    output is ``asking S + inside fresh``.
    """

    own: Array
    carried: Array
    asking: Array
    inside: Array
    keys: Array
    left: Array


def _prepared(r: Recurrence) -> _Chunk:
    """The part of the chunked form that no state enters, for all chunks at once.

    Every part of ``r`` is [chunks, B, N, size, ...].
    """
    size = r.query.shape[-2]
    total = jnp.cumsum(r.decay, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf)
    decays = jnp.exp(between)
    grown = jnp.exp(total)[..., None]
    written = r.key * r.strength[..., None]
    mixing = _times(written, r.key.mT) * decays
    sources = jnp.concatenate([r.value * r.strength[..., None], written * grown], axis=-1)
    solved = _times(unit_lower_inverse(mixing), sources)
    own, carried = jnp.split(solved, [r.value.shape[-1]], axis=-1)
    return _Chunk(
        own=own,
        carried=carried,
        asking=r.query * grown,
        inside=_times(r.query, r.key.mT) * decays,
        keys=r.key * jnp.exp(total[..., -1:] - total)[..., None],
        left=jnp.exp(total[..., -1])[..., None, None],
    )


def _one_chunk(
    state: Float[Array, "B N keys values"], chunk: _Chunk
) -> tuple[Float[Array, "B N keys values"], Float[Array, "B N size values"]]:
    fresh = chunk.own - _times(chunk.carried, state)
    out = _times(chunk.asking, state) + _times(chunk.inside, fresh)
    return chunk.left * state + _times(chunk.keys.mT, fresh), out


def unit_lower_inverse(matrix: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Inverse of the unit lower triangular matrix that has ``matrix`` below its diagonal.

    Block by block, from single elements to the whole, each level two batched products; n
    is a power of two. Triangular solvers of the back ends go one small matrix at a time.
    """
    size = matrix.shape[-1]
    inverse = jnp.ones((*matrix.shape[:-1], 1, 1))
    half = 1
    while half < size:
        blocks = matrix.reshape(*matrix.shape[:-2], -1, 2 * half, size // (2 * half), 2 * half)
        diagonal = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_times(_times(lower, diagonal[..., half:, :half]), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(corner)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        half *= 2
    return inverse[..., 0, :, :]


def _times(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _decay_init(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
