"""Modules that hold one weight each, under the checkpoint's names.

A module is applied to its part of the parameter tree and keeps no state. Weights start
out in float32; a loaded checkpoint brings its own dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from hipjax.ffi import ops
from hipjax.typing import Array, Float, Params

Initializer = Callable[[Array, tuple[int, ...]], Array]


def apply(module: nn.Module, params: Params, *arguments: Any, method: str = "__call__") -> Any:
    """Runs a method of an unbound module on its part of the parameter tree."""
    return module.apply({"params": params}, *arguments, method=method)


class Weight(nn.Module):
    """One parameter called ``weight``."""

    shape: tuple[int, ...]
    start: Initializer

    def setup(self) -> None:
        self.weight = self.param("weight", self.start, self.shape)

    def __call__(self) -> Array:
        return self.weight


class Linear(nn.Module):
    """``x @ weight.T`` with the weight in [out, in] layout and no bias."""

    inputs: int
    outputs: int
    scale: float

    def setup(self) -> None:
        init = nn.initializers.normal(self.scale)
        self.weight = self.param("weight", init, (self.outputs, self.inputs))

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows M"]:
        return ops.row_product(x, self.weight)


def together(x: Float[Array, "*rows K"], *layers: Linear) -> tuple[Array, ...]:
    """Several linear layers on the same input, in one pass over its rows."""
    return ops.row_products(x, tuple(layer.weight for layer in layers))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, scaled by ``1 + weight``."""

    size: int
    eps: float

    def setup(self) -> None:
        self.weight = self.param("weight", nn.initializers.zeros, (self.size,))

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return ops.rms_norm(x, self.weight, self.eps)


class StreamNorm(nn.Module):
    """Every residual stream normalised by itself, one weight over all of them."""

    size: int
    eps: float

    def setup(self) -> None:
        self.weight = self.param("weight", nn.initializers.zeros, (self.size,))

    def __call__(self, x: Float[Array, "*rows C H"]) -> Float[Array, "*rows C H"]:
        return ops.stream_norm(x, self.weight, self.eps)


def conv_init(taps: int) -> Initializer:
    """Uniform start for a depthwise convolution with ``taps`` taps."""
    bound = taps**-0.5

    def init(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    return init
