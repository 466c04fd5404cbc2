"""The trunk: embedding, layers, final mixer.

Source: model-spec sections 3.1, 3.2 and 3.8. Layers of one kind share one trace: the layer
functions are jitted with the kind as a static argument, so a deep model is traced and
lowered once per kind.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from hipjax.ffi import ops
from hipjax.model.attention import GatedAttention
from hipjax.model.config import ModelConfig
from hipjax.model.deltanet import GatedDeltaNet
from hipjax.model.layers import apply
from hipjax.model.moe import MoE, Routing
from hipjax.model.ple import PLE
from hipjax.model.residual import HyperConnection
from hipjax.model.state import (
    AttentionState,
    AttentionTape,
    DecodeState,
    DecodeTape,
    DeltaNetState,
    DeltaNetTape,
    LayerState,
    LayerTape,
)
from hipjax.typing import Array, Float, Int, Params


class LayerTrace(NamedTuple):
    """Intermediate values of one layer on a prompt chunk, for comparison and training.

    Attributes:
      mixer_input: [B, T, H] what the attention or DeltaNet branch reads.
      mixer_output: [B, T, H] what it returns.
      moe_input: [B, T, H] what the experts read.
      moe_output: [B, T, H] what they return.
      routing: the router's verdict.
      selected: [B, T, blocks] blocks that each query selected; None without attention.
      ple: [B, T, C, H] what the PLE block added; None without one.
      streams: [B, T, C, H] the layer's result.
    """

    mixer_input: Array
    mixer_output: Array
    moe_input: Array
    moe_output: Array
    routing: Routing
    selected: Array | None
    ple: Array | None
    streams: Array


class Layer(nn.Module):
    """One layer of the trunk, or the one layer of the MTP head.

    Attributes:
      config: the model's configuration.
      linear: a DeltaNet layer, else an attention layer.
      ple_index: which PLE block it begins with, if any.
      theta: base of the rotary frequencies.
    """

    config: ModelConfig
    linear: bool
    ple_index: int | None
    theta: float

    def setup(self) -> None:
        c = self.config
        if self.ple_index is not None:
            self.ple = PLE(c, self.ple_index)
        self.attn_hyper_connection = HyperConnection(c)
        if self.linear:
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = GatedAttention(c, self.theta)
        self.mlp_hyper_connection = HyperConnection(c)
        self.mlp = MoE(c)

    def rows(
        self,
        streams: Float[Array, "B R C H"],
        tokens: Int[Array, "B R"],
        state: LayerState,
        length: Int[Array, " B"],
    ) -> tuple[Float[Array, "B R C H"], LayerTape]:
        """Decodes R rows; the tape finishes once the verdict is known."""
        ple = None
        if state.ple is not None:
            streams, ple = self.ple(streams, tokens, state.ple)
        x, strength = self.attn_hyper_connection(streams)
        mixer: DeltaNetTape | AttentionTape
        if isinstance(state.mixer, DeltaNetState):
            y, mixer = self.linear_attn.rows(x, state.mixer, length)
        else:
            y, mixer = self.self_attn.rows(x, state.mixer, length)
        streams = ops.hyper_combine(streams, y, strength)
        x, strength = self.mlp_hyper_connection(streams)
        streams = ops.hyper_combine(streams, self.mlp.rows(x), strength)
        return streams, LayerTape(mixer, ple)

    def prompt(
        self,
        streams: Float[Array, "B T C H"],
        tokens: Int[Array, "B T"],
        state: LayerState,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T C H"], LayerState, LayerTrace]:
        """Runs a chunk of which the first ``count`` tokens are real."""
        ple = added = selected = None
        if state.ple is not None:
            before = streams
            streams, tape = self.ple(streams, tokens, state.ple)
            ple, added = tape.commit(count), streams - before
        x, strength = self.attn_hyper_connection(streams)
        mixer: DeltaNetState | AttentionState
        if isinstance(state.mixer, DeltaNetState):
            y, mixer = self.linear_attn.prompt(x, state.mixer, length, count)
        else:
            y, mixer, selected = self.self_attn.prompt(x, state.mixer, length, count)
        streams = ops.hyper_combine(streams, y, strength)
        z, strength = self.mlp_hyper_connection(streams)
        out, routing = self.mlp.prompt(z)
        streams = ops.hyper_combine(streams, out, strength)
        trace = LayerTrace(x, y, z, out, routing, selected, added, streams)
        return streams, LayerState(mixer, ple), trace


def trunk_layer(config: ModelConfig, index: int) -> Layer:
    """The module of the trunk's 0-based layer ``index``."""
    linear = config.layer_types[index] == "linear_attention"
    return Layer(config, linear, config.ple_index(index), config.rope_theta)


@functools.partial(jax.jit, static_argnames="layer")
def layer_rows(
    layer: Layer, params: Params, streams: Array, tokens: Array, state: LayerState, length: Array
) -> tuple[Array, LayerTape]:
    """``Layer.rows`` on its parameters, traced once per kind of layer."""
    return apply(layer, params, streams, tokens, state, length, method="rows")


@functools.partial(jax.jit, static_argnames="layer")
def layer_prompt(
    layer: Layer,
    params: Params,
    streams: Array,
    tokens: Array,
    state: LayerState,
    length: Array,
    count: Array,
) -> tuple[Array, LayerState, LayerTrace]:
    """``Layer.prompt`` on its parameters, traced once per kind of layer, in plain JAX.

    XLA's products serve many tokens at once, and can be differentiated.
    """
    with ops.implementation("reference"):
        return apply(layer, params, streams, tokens, state, length, count, method="prompt")


def trunk_prompt(
    params: Params,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    state: DecodeState,
    *,
    config: ModelConfig,
    remat: bool = False,
) -> tuple[Float[Array, "B T C H"], DecodeState, tuple[LayerTrace, ...]]:
    """Runs one prompt chunk through the trunk.

    Args:
      params: the whole parameter tree.
      tokens: the chunk; ids past ``count`` are ignored, but must lie in the vocabulary.
      count: how many leading tokens of each sequence are real, 0 to T.
      state: the state before the chunk.
      config: the model's configuration.
      remat: recompute each layer in the backward pass instead of keeping its insides.

    Returns:
      The streams after the last layer, the state after ``count`` tokens (the head's part
      untouched), and every layer's trace.
    """
    run = jax.checkpoint(layer_prompt, static_argnums=0) if remat else layer_prompt
    streams = first_streams(params, tokens, config)
    states, traces = [], []
    for index, layer_state in enumerate(state.layers):
        layer = trunk_layer(config, index)
        weights = params["model"]["layers"][str(index)]
        streams, layer_state, trace = run(
            layer, weights, streams, tokens, layer_state, state.length, count
        )
        states.append(layer_state)
        traces.append(trace)
    both = jnp.concatenate([state.carry[:, None], streams], axis=1)
    carry = jnp.take_along_axis(both, count[:, None, None, None], axis=1)[:, 0]
    state = state.replace(length=state.length + count, layers=tuple(states), carry=carry)
    return streams, state, tuple(traces)


def trunk_rows(
    params: Params, tokens: Int[Array, "B R"], state: DecodeState, *, config: ModelConfig
) -> DecodeTape:
    """Decodes R rows at once; ``tape.commit(kept)`` makes the first ``kept`` of them final."""
    streams = first_streams(params, tokens, config)
    tapes = []
    for index, layer_state in enumerate(state.layers):
        layer = trunk_layer(config, index)
        weights = params["model"]["layers"][str(index)]
        streams, tape = layer_rows(layer, weights, streams, tokens, layer_state, state.length)
        tapes.append(tape)
    return DecodeTape(state, tuple(tapes), streams)


def first_streams(
    params: Params, tokens: Int[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T C H"]:
    """The embedding, copied to every stream."""
    embedded = embed(params, tokens)[:, :, None]
    return jnp.broadcast_to(embedded, (*tokens.shape, config.hc_count, config.hidden_size))


def embed(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
    """Rows of the embedding, which the MTP head shares, widened to float32."""
    return ops.decode(params["model"]["embed_tokens"]["weight"][tokens])


def trunk_logits(
    params: Params, streams: Float[Array, "*rows C H"], *, config: ModelConfig
) -> Float[Array, "*rows V"]:
    """Logits of the next token from the trunk's streams."""
    return mixed_logits(params["model"]["hyper_connection_mixer"], params, streams, config)


def mixed_logits(
    mixer: Params, params: Params, streams: Float[Array, "*rows C H"], config: ModelConfig
) -> Float[Array, "*rows V"]:
    """Mixes the streams with ``mixer``'s weights and applies the shared output matrix."""
    module = HyperConnection(config, inject=False)
    mixed = apply(module, mixer, streams, method="mix")
    return ops.row_product(mixed, params["lm_head"]["weight"])
