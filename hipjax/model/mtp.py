"""The multi-token-prediction head: the model's own drafter.

Source: model-spec section 5. Row r of the head pairs the trunk's streams of position r
with token r + 1, at rotary position r, and predicts token r + 2. The head holds one row
for every token the trunk has consumed; rows fed with drafts never outlive a window.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.layers import Linear, RMSNorm, apply
from hipjax.model.state import DecodeState, HeadState, LayerTape
from hipjax.model.trunk import (
    Layer,
    LayerTrace,
    embed,
    layer_prompt,
    layer_rows,
    mixed_logits,
)
from hipjax.typing import Array, Float, Int, Params

_ENTRY = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden")


class Entry(nn.Module):
    """How a row begins: one projection of the token added to one of every stream."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(c.streams_size, c.rms_norm_eps)
        self.fc_embedding = Linear(c.hidden_size, c.hidden_size, c.initializer_range)
        self.fc_hidden = Linear(c.hidden_size, c.hidden_size, c.initializer_range)

    def __call__(
        self, embedded: Float[Array, "B T H"], carries: Float[Array, "B T C H"]
    ) -> Float[Array, "B T C H"]:
        flat = carries.reshape(*carries.shape[:2], -1)
        normed = self.pre_fc_norm_hidden(flat).reshape(carries.shape)
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        return ops.row_product_add(normed, self.fc_hidden.weight, token)


def head_layer(config: ModelConfig) -> Layer:
    """The module of the head's one layer."""
    theta = config.rope_theta if config.mtp_rope_theta is None else config.mtp_rope_theta
    return Layer(config, linear=False, ple_index=None, theta=theta)


@functools.partial(jax.jit, static_argnames="config")
def _enter(config: ModelConfig, params: Params, tokens: Array, carries: Array) -> Array:
    weights = {name: params["mtp"][name] for name in _ENTRY}
    return apply(Entry(config), weights, embed(params, tokens), carries)


def head_rows(
    params: Params,
    tokens: Int[Array, "B R"],
    carries: Float[Array, "B R C H"],
    state: HeadState,
    length: Int[Array, " B"],
    *,
    config: ModelConfig,
) -> tuple[Float[Array, "B R C H"], LayerTape]:
    """Runs R head rows from row ``length`` on.

    Args:
      params: the whole parameter tree.
      tokens: the token after each row's position.
      carries: the trunk's streams at each row's position, or the head's own of the row
        before when drafts are chained.
      state: the head's memory.
      length: [B] head rows before these.
      config: the model's configuration.

    Returns:
      The rows' streams, and the tape that finishes once it is known which rows stay.
    """
    streams = _enter(config, params, tokens, carries)
    weights = params["mtp"]["layers"]["0"]
    return layer_rows(head_layer(config), weights, streams, tokens, state.layer, length)


def extend(
    params: Params,
    tokens: Int[Array, "B R"],
    carries: Float[Array, "B R C H"],
    state: DecodeState,
    kept: Int[Array, " B"],
    *,
    config: ModelConfig,
) -> DecodeState:
    """Brings the head level with a trunk that has just consumed ``kept`` rows.

    ``tokens`` and ``carries`` are the rows' own, as in :func:`head_rows`, taken from the
    trunk; what lies past ``kept`` is ignored.
    """
    assert state.head is not None
    before = state.length - kept
    streams, tape = head_rows(params, tokens, carries, state.head, before, config=config)
    carry = _newest(state.head.carry, streams, kept)
    return state.replace(head=HeadState(layer=tape.commit(kept), carry=carry))


def head_prompt(
    params: Params,
    tokens: Int[Array, "B T"],
    carries: Float[Array, "B T C H"],
    state: HeadState,
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    config: ModelConfig,
) -> tuple[Float[Array, "B T C H"], HeadState, LayerTrace]:
    """Runs a chunk of head rows: ``tokens`` is the prompt chunk moved left by one.

    The arguments are those of :func:`head_rows`; only the first ``count`` rows are real.
    """
    with ops.implementation("reference"):
        streams = _enter(config, params, tokens, carries)
    weights = params["mtp"]["layers"]["0"]
    streams, layer, trace = layer_prompt(
        head_layer(config), weights, streams, tokens, state.layer, length, count
    )
    return streams, HeadState(layer, _newest(state.carry, streams, count)), trace


def head_logits(
    params: Params, streams: Float[Array, "*rows C H"], *, config: ModelConfig
) -> Float[Array, "*rows V"]:
    """Logits of the token after next from the head's streams."""
    return mixed_logits(params["mtp"]["hyper_connection_mixer"], params, streams, config)


def _newest(carry: Array, streams: Array, count: Array) -> Array:
    """The streams of the last real row, or ``carry`` where there is none."""
    both = jnp.concatenate([carry[:, None], streams], axis=1)
    return jnp.take_along_axis(both, count[:, None, None, None], axis=1)[:, 0]
