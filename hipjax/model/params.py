"""The parameter tree: its shapes, a fresh random one, and how it is counted.

The tree mirrors the checkpoint's names: ``params["model"]["layers"]["0"]["mlp"]…``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict

from hipjax.model.config import ModelConfig
from hipjax.model.mtp import Entry, head_layer
from hipjax.model.residual import HyperConnection
from hipjax.model.state import DecodeState
from hipjax.model.trunk import trunk_layer
from hipjax.typing import Array, Params


def init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    """A randomly initialised parameter tree in float32.

    Args:
      config: the model's configuration.
      key: a ``jax.random.key``.
    """
    c = config
    state = DecodeState.init(c, c.indexer_compress_ratio, cache_dtype=jnp.float32, head=False)
    streams = jnp.zeros((1, 1, c.hc_count, c.hidden_size))
    tokens = jnp.zeros((1, 1), jnp.int32)
    one = jnp.ones((1,), jnp.int32)
    normal = nn.initializers.normal(c.initializer_range)
    keys = iter(jax.random.split(key, c.num_hidden_layers + 6))

    def mixer() -> Any:
        module = HyperConnection(c, inject=False)
        return module.init(next(keys), streams, method="mix")["params"]

    layers = {}
    for index, layer_state in enumerate(state.layers):
        layer = trunk_layer(c, index)
        arguments = (streams, tokens, layer_state, state.length, one)
        layers[str(index)] = layer.init(next(keys), *arguments, method="prompt")["params"]
    tree: dict[str, Any] = {
        "model": {
            "embed_tokens": {"weight": normal(next(keys), (c.vocab_size, c.hidden_size))},
            "layers": layers,
            "hyper_connection_mixer": mixer(),
        },
        "lm_head": {"weight": normal(next(keys), (c.vocab_size, c.hidden_size))},
    }
    if c.has_head:
        head = DecodeState.init(c, c.indexer_compress_ratio, cache_dtype=jnp.float32).head
        assert head is not None
        arguments = (streams, tokens, head.layer, state.length, one)
        tree["mtp"] = {
            **Entry(c).init(next(keys), streams[:, :, 0], streams)["params"],
            "layers": {"0": head_layer(c).init(next(keys), *arguments, method="prompt")["params"]},
            "hyper_connection_mixer": mixer(),
        }
    return tree


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by its dotted name, without allocating any."""
    tree = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def flat(params: Params) -> dict[str, Any]:
    """The leaves of a parameter tree by their dotted names."""
    return dict(flatten_dict(dict(params), sep="."))
