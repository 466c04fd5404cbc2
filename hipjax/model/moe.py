"""Mixture of experts with one shared expert.

Source: model-spec section 3.7. Decoded rows read just the experts they chose. A prompt
sorts its tokens by expert and runs blocks of tokens that share one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.layers import Linear, together
from hipjax.typing import Array, Float, Int

_GATHER_BYTES = 64 * 2**20


class Routing(NamedTuple):
    """Router logits [B, T, E], the chosen experts [B, T, K] and their weights [B, T, K]."""

    logits: Array
    experts: Array
    weights: Array


class Shared(NamedTuple):
    """The shared expert's output [B, T, H], and the logit of its weight [B, T, 1]."""

    output: Array
    logit: Array


class Experts(nn.Module):
    """The routed experts' weights, fused over experts and over gate and up."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        width = c.moe_intermediate_size
        self.gate_up_proj = self.param(
            "gate_up_proj", init, (c.num_experts, 2 * width, c.hidden_size)
        )
        self.down_proj = self.param("down_proj", init, (c.num_experts, c.hidden_size, width))

    def rows(
        self, x: Float[Array, "B R H"], routing: Routing, shared: Shared
    ) -> Float[Array, "B R H"]:
        """Each row's experts, weighted and summed, and the shared expert's part."""
        chosen = routing.experts, routing.weights
        return ops.expert_rows(x, self.gate_up_proj, self.down_proj, *chosen, *shared)

    def prompt(self, x: Float[Array, "B T H"], routing: Routing) -> Float[Array, "B T H"]:
        """The same for many tokens, by blocks of tokens that chose the same expert."""
        flat = x.reshape(-1, x.shape[-1])
        chosen = routing.experts.shape[-1]
        mixed = expert_blocks(
            flat,
            self.gate_up_proj,
            self.down_proj,
            routing.experts.reshape(-1, chosen),
            routing.weights.reshape(-1, chosen),
        )
        return mixed.reshape(x.shape)


class SharedExpert(nn.Module):
    """The weights of the expert that every token passes through."""

    config: ModelConfig

    def setup(self) -> None:
        c, scale = self.config, self.config.initializer_range
        width = c.shared_expert_intermediate_size
        self.gate_proj = Linear(c.hidden_size, width, scale)
        self.up_proj = Linear(c.hidden_size, width, scale)
        self.down_proj = Linear(width, c.hidden_size, scale)


class MoE(nn.Module):
    """Router, routed experts and the shared expert."""

    config: ModelConfig

    def setup(self) -> None:
        c, scale = self.config, self.config.initializer_range
        self.gate = Linear(c.hidden_size, c.num_experts, scale)
        self.experts = Experts(c)
        self.shared_expert = SharedExpert(c)
        self.shared_expert_gate = Linear(c.hidden_size, 1, scale)

    def everywhere(self, x: Float[Array, "B T H"]) -> tuple[Routing, Shared]:
        """What every token computes: the router's verdict and the shared expert."""
        c, shared = self.config, self.shared_expert
        logits, gate, up, share = together(
            x, self.gate, shared.gate_proj, shared.up_proj, self.shared_expert_gate
        )
        routing = Routing(logits, *ops.route(logits, c.num_experts_per_tok, c.norm_topk_prob))
        return routing, Shared(shared.down_proj(ops.swiglu(gate, up)), share)

    def rows(self, x: Float[Array, "B R H"]) -> Float[Array, "B R H"]:
        """Decoded rows."""
        return self.experts.rows(x, *self.everywhere(x))

    def prompt(self, x: Float[Array, "B T H"]) -> tuple[Float[Array, "B T H"], Routing]:
        """A prompt chunk, and the router's verdict on it."""
        routing, shared = self.everywhere(x)
        mixed = self.experts.prompt(x, routing)
        return mixed + nn.sigmoid(shared.logit) * shared.output, routing


def expert_blocks(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "E two_I H"],
    down: Float[Array, "E H I"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
) -> Float[Array, "T H"]:
    """Weighted sum of every token's experts, an expert's weights serving whole blocks.

    Choices are sorted by expert and each expert's are padded to whole blocks, whose number
    is bounded by the shapes alone. Blocks run a few at a time, so that the weights gathered
    at once stay within ``_GATHER_BYTES``.
    """
    tokens, chosen = experts.shape
    count = gate_up.shape[0]
    size = _block_size(tokens * chosen, count)
    blocks = tokens * chosen // size + min(count, tokens * chosen)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sorted_experts = experts.reshape(-1)[order]
    per_expert = jnp.zeros(count, jnp.int32).at[experts.reshape(-1)].add(1)
    first_choice = jnp.cumsum(per_expert) - per_expert
    block_count = -(-per_expert // size)
    first_block = jnp.cumsum(block_count) - block_count
    rank = jnp.arange(tokens * chosen) - first_choice[sorted_experts]
    slot = first_block[sorted_experts] * size + rank
    source = jnp.full(blocks * size, tokens, jnp.int32).at[slot].set(order // chosen)
    owner = jnp.searchsorted(jnp.cumsum(block_count), jnp.arange(blocks), side="right")
    padded = jnp.concatenate([x, jnp.zeros((1, x.shape[1]))])

    def run(block: tuple[Array, Array]) -> Array:
        expert, rows = block
        gate, up = jnp.split(ops.matrix_product(padded[rows], gate_up[expert]), 2, axis=-1)
        return ops.matrix_product(ops.swiglu(gate, up), down[expert])

    each = (gate_up[0].size + down[0].size) * 4
    at_once = max(1, min(blocks, _GATHER_BYTES // each))
    owner = jnp.minimum(owner, count - 1)
    done = lax.map(run, (owner, source.reshape(blocks, size)), batch_size=at_once)
    back = jnp.zeros(tokens * chosen, jnp.int32).at[order].set(slot)
    parts = done.reshape(blocks * size, -1)[back].reshape(tokens, chosen, -1)
    return jnp.einsum("tkh,tk->th", parts, weights, precision=lax.Precision.HIGHEST)


def _block_size(choices: int, experts: int) -> int:
    """A power of two near the choices per expert, between 1 and 64."""
    size = 1
    while size < 64 and size * experts < choices:
        size *= 2
    return size
