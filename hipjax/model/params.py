"""The parameter tree: its shapes, a fresh random one, and how it is counted.

The tree mirrors the checkpoint's names: ``params["model"]["layers"]["0"]["mlp"]…``.
"""

from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict

from hipjax.model.config import ModelConfig
from hipjax.model.mtp import Entry, head_layer
from hipjax.model.residual import HyperConnection
from hipjax.model.trunk import trunk_layer
from hipjax.typing import Array, Params


def init_params(config: ModelConfig, key: Array) -> dict[str, Any]:
    """A randomly initialised parameter tree in float32.

    Args:
      config: the model's configuration.
      key: a ``jax.random.key``.
    """
    c = config
    normal = nn.initializers.normal(c.initializer_range)
    keys = iter(jax.random.split(key, c.num_hidden_layers + 6))

    def table() -> Array:
        return normal(next(keys), (c.vocab_size, c.hidden_size))

    def fresh(module: nn.Module) -> dict[str, Any]:
        return dict(module.init(next(keys), method=_declare)["params"])

    tree: dict[str, Any] = {
        "model": {
            "embed_tokens": {"weight": table()},
            "layers": {str(i): fresh(trunk_layer(c, i)) for i in range(c.num_hidden_layers)},
            "hyper_connection_mixer": fresh(HyperConnection(c, inject=False)),
        },
        "lm_head": {"weight": table()},
    }
    if c.has_head:
        tree["mtp"] = {
            **fresh(Entry(c)),
            "layers": {"0": fresh(head_layer(c))},
            "hyper_connection_mixer": fresh(HyperConnection(c, inject=False)),
        }
    return tree


def _declare(module: nn.Module) -> None:
    """Declares all parameters of a bound module; its computation is not traced."""
    hasattr(module, "weight")  # asking for an attribute that is not a field runs setup
    for name, child in list(vars(module).items()):
        if isinstance(child, nn.Module) and name != "parent":
            _declare(child)


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by its dotted name, without allocating any."""
    tree = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    return {name: leaf.shape for name, leaf in flat(tree).items()}


def flat(params: Params) -> dict[str, Any]:
    """The leaves of a parameter tree by their dotted names."""
    return dict(flatten_dict(dict(params), sep="."))
