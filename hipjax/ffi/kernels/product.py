"""Products of rows with weight matrices."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from hipjax.ffi.call import call, stored
from hipjax.ffi.operands import floats, weight_matrix
from hipjax.typing import Array, Float

LONG_ROW = 8192
MATRICES = 4
NONE, SILU, STRENGTH, ADD, COMBINE = range(5)  # the kernel's enum Finish


def row_products(
    x: Float[Array, "*rows K"], weights: tuple[Float[Array, "_ K"], ...]
) -> tuple[Array, ...]:
    """The products of the same rows with several weights, each weight read once."""
    outs = products(x, weights, [NONE] * len(weights))
    return tuple(out.reshape(*x.shape[:-1], out.shape[-1]) for out in outs)


def row_product(x: Float[Array, "*rows K"], weight: Float[Array, "M K"]) -> Array:
    """The product of rows with one weight, see :func:`row_products`."""
    return row_products(x, (weight,))[0]


def row_product_add(
    x: Float[Array, "*rows C K"], weight: Float[Array, "M K"], other: Float[Array, "*rows M"]
) -> Float[Array, "*rows C M"]:
    """The product of every stream with one weight, and one row added to all of its streams."""
    streams = x.shape[-2]
    floats("other", other, (*x.shape[:-2], weight.shape[0]))
    (out,) = products(
        x.reshape(-1, *x.shape[-2:]),
        (weight,),
        [ADD],
        taken=[other.reshape(-1, other.shape[-1])],
        inner=(streams,),
        group=streams,
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


def row_product_combine(
    x: Float[Array, "*rows K"],
    weight: Float[Array, "M K"],
    streams: Float[Array, "*rows C M"],
    strength: Float[Array, "*rows C"],
) -> Float[Array, "*rows C M"]:
    """A branch's last product, added to every stream by its strength in the same launch."""
    rows, count = x.shape[:-1], streams.shape[-2]
    floats("streams", streams, (*rows, count, weight.shape[0]))
    floats("strength", strength, (*rows, count))
    (out,) = products(
        x.reshape(-1, x.shape[-1]),
        (weight,),
        [COMBINE],
        taken=[streams.reshape(-1, *streams.shape[-2:]), strength.reshape(-1, count)],
        inner=(count,),
    )
    return out.reshape(streams.shape)


def products(
    x: Array,
    weights: Sequence[Array],
    finishes: Sequence[int],
    *,
    taken: Sequence[Array] = (),
    inner: tuple[int, ...] = (),
    divisor: float = 1.0,
    group: int = 1,
) -> tuple[Array, ...]:
    """The products of rows with weights, each finished in its own way.

    Args:
      x: [..., K] rows.
      weights: 1 to ``MATRICES`` of them, [M, K] each.
      finishes: what happens to the values of each weight.
      taken: what the finishes ADD and COMBINE take, with a leading axis of items.
      inner: axes of ``x`` and of the results between that of the items and the last one; by
        default every row of ``x`` is an item.
      divisor: of SILU and STRENGTH.
      group: of ADD, rows that share one row of what is added.

    Returns:
      Per weight [items, *inner, M].
    """
    if not 1 <= len(weights) <= MATRICES:
        raise ValueError(f"weights has {len(weights)} matrices; allowed: 1 to {MATRICES}")
    floats("x", x)
    depth = x.shape[-1]
    weights = [weight_matrix(f"weights[{i}]", stored(w), depth) for i, w in enumerate(weights)]
    if len({w.dtype for w in weights}) > 1 and not taken:
        # A launch reads one storage; a widened weight has the same values and gives the same bits.
        return tuple(
            products(x, [w], [f], divisor=divisor)[0]
            for w, f in zip(weights, finishes, strict=True)
        )
    return call(
        "row_products",
        [x if taken else x.reshape(-1, depth), *taken],
        weights,
        [((*inner, w.shape[0]), jnp.float32) for w in weights],
        finishes=np.array(finishes, np.int64),
        quarters=int(depth >= LONG_ROW and depth % 32 == 0),
        divisor=np.float32(divisor),
        group=group,
    )
