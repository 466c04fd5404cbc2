"""What the nano model is trained on: next token, chained drafts, routing, selection.

The trunk and the head are the library's own prompt path. Depth 2 and 3 of the head are
trained as they are decoded: at every fourth row the trunk's streams are replaced by the
head's own of the row before, and the row after it continues that chain.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hipjax.ffi import ops
from hipjax.ffi.reference_attention import block_scores
from hipjax.model.attention import GatedAttention
from hipjax.model.config import ModelConfig
from hipjax.model.mtp import head_layer, head_logits, head_prompt
from hipjax.model.state import DecodeState
from hipjax.model.trunk import LayerTrace, trunk_logits, trunk_prompt
from hipjax.typing import Array, Params

PERIOD = 4
HEAD_WEIGHTS = (0.3, 0.3, 0.3)
BALANCE_WEIGHT = 0.01
INDEX_WEIGHT = 0.2
INDEX_SEQUENCES = 2


class Losses(NamedTuple):
    """Parts of the loss, each a scalar: nats per token, except for the two auxiliaries."""

    token: Array
    drafts: tuple[Array, Array, Array]
    balance: Array
    index: Array

    def total(self) -> Array:
        """The weighted sum that is minimised."""
        drafts = sum(w * x for w, x in zip(HEAD_WEIGHTS, self.drafts, strict=True))
        return self.token + drafts + BALANCE_WEIGHT * self.balance + INDEX_WEIGHT * self.index


class Forward(NamedTuple):
    """Logits [B, T, V] of the trunk and of the head at depth 1, 2 and 3.

    The masks say at which rows a depth was computed; the traces are the layers'.
    """

    trunk: Array
    drafts: tuple[Array, Array, Array]
    masks: tuple[Array, Array, Array]
    traces: tuple[LayerTrace, ...]
    head_trace: LayerTrace


def forward(
    params: Params, tokens: Array, offset: Array, *, config: ModelConfig, remat: bool
) -> Forward:
    """Runs trunk and head over ``tokens`` [B, T + 1] from empty memory.

    ``offset`` chooses which rows carry chained drafts.
    """
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    state = DecodeState.init(config, length, batch=batch, cache_dtype=jnp.float32)
    count = jnp.full((batch,), length, jnp.int32)
    inputs, following = tokens[:, :-1], tokens[:, 1:]
    streams, _, traces = trunk_prompt(params, inputs, count, state, config=config, remat=remat)
    logits = trunk_logits(params, streams, config=config)
    assert state.head is not None
    start = jnp.zeros((batch,), jnp.int32)

    def head(carries: Array) -> tuple[Array, LayerTrace]:
        def run(carries: Array) -> tuple[Array, LayerTrace]:
            out, _, trace = head_prompt(
                params, following, carries, state.head, start, count, config=config
            )
            return out, trace

        return (jax.checkpoint(run) if remat else run)(carries)

    row = jnp.arange(length)
    second = (row % PERIOD == offset % PERIOD) & (row > 0)
    third = (row % PERIOD == (offset + 1) % PERIOD) & (row > 1)

    def moved(streams: Array) -> Array:
        return jnp.pad(streams[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))

    first_out, head_trace = head(streams)
    carries = jnp.where(second[None, :, None, None], moved(first_out), streams)
    second_out, _ = head(carries)
    carries = jnp.where(third[None, :, None, None], moved(second_out), carries)
    third_out, _ = head(carries)
    drafts = tuple(
        head_logits(params, out, config=config) for out in (first_out, second_out, third_out)
    )
    return Forward(logits, drafts, (row >= 0, second, third), traces, head_trace)


def losses(
    params: Params, tokens: Array, offset: Array, *, config: ModelConfig, remat: bool = True
) -> Losses:
    """All parts of the loss on ``tokens`` [B, T + 1]."""
    f = forward(params, tokens, offset, config=config, remat=remat)
    logs = jax.nn.log_softmax(f.trunk)
    token = -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1))
    wanted = jax.lax.stop_gradient(jnp.exp(logs[:, 1:]))
    drafts = []
    for logits, mask in zip(f.drafts, f.masks, strict=True):
        distance = -jnp.sum(wanted * jax.nn.log_softmax(logits[:, :-1]), axis=-1)
        weight = mask[:-1].astype(jnp.float32)
        drafts.append(jnp.sum(distance * weight) / (jnp.sum(weight) * tokens.shape[0]))
    traces = [*f.traces, f.head_trace]
    balance = sum((_balance(trace) for trace in traces), start=jnp.zeros(()))
    return Losses(token, tuple(drafts), balance / len(traces), _index(params, f, config))


def _balance(trace: LayerTrace) -> Array:
    """Load balance of one router: 1 when every expert is used alike."""
    experts = trace.routing.logits.shape[-1]
    share = jnp.mean(jax.nn.softmax(trace.routing.logits), axis=(0, 1))
    used = jnp.mean(jax.nn.one_hot(trace.routing.experts, experts), axis=(0, 1, 2))
    return experts * jnp.sum(share * used)


def _index(params: Params, f: Forward, config: ModelConfig) -> Array:
    """How far the indexers' scores are from where attention looks, in nats per query.

    Selection passes no gradient, so indexers learn from full attention, which is computed
    on a few sequences for that purpose; nothing but the indexers learns from it.
    """
    layers = [
        (params["model"]["layers"][str(i)]["self_attn"], trace, config.rope_theta)
        for i, trace in enumerate(f.traces)
        if trace.selected is not None
    ]
    theta = head_layer(config).theta
    layers.append((params["mtp"]["layers"]["0"]["self_attn"], f.head_trace, theta))
    parts = [_index_of(config, *layer) for layer in layers]
    return sum(parts, start=jnp.zeros(())) / len(parts)


def _index_of(config: ModelConfig, weights: Any, trace: LayerTrace, theta: float) -> Array:
    x = jax.lax.stop_gradient(trace.mixer_input[:INDEX_SEQUENCES])
    batch, length = x.shape[:2]
    ratio = config.indexer_compress_ratio
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    module = GatedAttention(config, theta)
    variables = {"params": weights}
    with ops.implementation("reference"):  # kernels have no gradients
        p = module.apply(variables, x, positions, method="project")
        aligned = p.index_key[:, : length // ratio * ratio]
        blocks = module.apply(
            variables,
            aligned,
            jnp.zeros((batch,), jnp.int32),
            method=lambda m, a, f: m.indexer.block_keys(a, f),
        )
    scores = block_scores(p.index_query, blocks)
    visible = jnp.arange(blocks.shape[1]) < ((positions + 1) // ratio)[..., None]
    logs = jax.nn.log_softmax(jnp.where(visible, scores, -1e9))
    share = config.num_attention_heads // config.num_key_value_heads
    keys = jnp.repeat(p.key, share, axis=2)
    attention = jnp.einsum("btnd,bsnd->bnts", p.query, keys) / config.head_dim**0.5
    causal = jnp.arange(length) <= positions[0][:, None]
    attention = jax.nn.softmax(jnp.where(causal, attention, -jnp.inf)).mean(axis=1)
    mass = attention[..., : blocks.shape[1] * ratio].reshape(batch, length, -1, ratio).sum(-1)
    mass = jnp.where(visible, mass, 0.0)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    mass = jax.lax.stop_gradient(mass / jnp.where(total > 0, total, 1.0))
    return -jnp.mean(jnp.sum(mass * logs, axis=-1))
