"""Hyper-connections: what a branch reads from the streams, and how its output joins them."""

import jax.numpy as jnp

from hipjax.ffi.call import call, stored
from hipjax.ffi.kernels.product import SILU, STRENGTH, products
from hipjax.ffi.operands import floats, weight_matrix
from hipjax.typing import Array, Float


def hyper_mix(
    normed: Float[Array, "*rows C H"],
    down: Float[Array, "low D"],
    up: Float[Array, "D low"],
    inject: Float[Array, "C D"] | None = None,
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows C"] | None]:
    """Gated mean of the normalised streams: what a branch reads.

    With ``inject``, also how strongly each stream takes the branch's output up, in (0, 2).
    Two launches: both products of the streams, then the gates with their mean.
    """
    floats("normed", normed)
    rows, (count, hidden) = normed.shape[:-2], normed.shape[-2:]
    items = normed.reshape(-1, count, hidden)
    weights, finishes = [down], [SILU]
    if inject is not None:
        weights.append(weight_matrix("inject", stored(inject), count * hidden, count))
        finishes.append(STRENGTH)
    low, *strength = products(
        items.reshape(-1, count * hidden), weights, finishes, divisor=float(count)
    )
    up = weight_matrix("up", stored(up), down.shape[0], count * hidden)
    (mixed,) = call("hyper_mix_up", [low, items], [up], [((hidden,), jnp.float32)])
    mixed = mixed.reshape(*rows, hidden)
    return mixed, strength[0].reshape(*rows, count) if strength else None


def hyper_combine(
    streams: Float[Array, "*rows C H"],
    branch: Float[Array, "*rows H"],
    strength: Float[Array, "*rows C"],
) -> Float[Array, "*rows C H"]:
    """Adds a branch's output to every stream, rounded once."""
    floats("streams", streams)
    rows, inner = streams.shape[:-2], streams.shape[-2:]
    floats("branch", branch, (*rows, inner[1]))
    floats("strength", strength, (*rows, inner[0]))
    items = [streams.reshape(-1, *inner), branch.reshape(-1, inner[1])]
    items.append(strength.reshape(-1, inner[0]))
    (out,) = call("hyper_combine", items, [], [(inner, jnp.float32)])
    return out.reshape(streams.shape)
