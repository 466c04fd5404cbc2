"""The n-gram embedding: gate and norm of a row, and the convolution over rows."""

import jax.numpy as jnp
import numpy as np

from hipjax.ffi.call import call, stored
from hipjax.ffi.operands import floats, weight_vector
from hipjax.typing import Array, Float


def ple_gate(
    key: Float[Array, "*rows C H"],
    streams: Float[Array, "*rows C H"],
    value: Float[Array, "*rows H"],
    norms: tuple[Float[Array, " D"], Float[Array, " D"], Float[Array, " D"]],
    eps: float,
    scale: Float[Array, "*one"] | None = None,
) -> tuple[Float[Array, "*rows C H"], Float[Array, "*rows C H"]]:
    """The n-gram value, let through per stream, and that normalised for the convolution."""
    floats("key", key)
    rows, inner = key.shape[:-2], key.shape[-2:]
    floats("streams", streams, key.shape)
    floats("value", value, (*rows, inner[1]))
    names = ("norm_key", "norm_query", "norm_conv")
    shared = [
        weight_vector(name, stored(norm), inner[0] * inner[1])
        for name, norm in zip(names, norms, strict=True)
    ]
    if scale is not None:
        shared.append(weight_vector("scale", stored(scale), 1))
    items = [key.reshape(-1, *inner), streams.reshape(-1, *inner), value.reshape(-1, inner[1])]
    results = [(inner, jnp.float32)] * 2
    gated, normed = call("ple_gate", items, shared, results, eps=np.float32(eps))
    return gated.reshape(key.shape), normed.reshape(key.shape)


def ple_output(
    streams: Float[Array, "B T C H"],
    gated: Float[Array, "B T C H"],
    columns: Float[Array, "B past_and_T C H"],
    weight: Float[Array, "D 1 taps"],
    dilation: int,
) -> Float[Array, "B T C H"]:
    """The streams with the gated value and its convolution over time added."""
    floats("streams", streams)
    floats("gated", gated, streams.shape)
    batch, rows, *inner = streams.shape
    width, taps = inner[0] * inner[1], weight.shape[-1]
    floats("columns", columns, (batch, (taps - 1) * dilation + rows, *inner))
    weight = weight_vector("weight", stored(weight), width * taps)
    items = [x.reshape(*x.shape[:2], width) for x in (streams, gated, columns)]
    results = [((rows, width), jnp.float32)]
    (out,) = call("ple_output", items, [weight.reshape(width, taps)], results, dilation=dilation)
    return out.reshape(streams.shape)
