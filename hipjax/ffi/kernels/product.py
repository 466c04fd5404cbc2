"""Products of rows with weight matrices."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from hipjax.ffi.call import call, stored
from hipjax.typing import Array, Float

LONG_ROW = 8192
NONE, SILU, STRENGTH, ADD, COMBINE = range(5)  # the kernel's enum Finish


def row_products(
    x: Float[Array, "*rows K"], weights: tuple[Float[Array, "_ K"], ...]
) -> tuple[Array, ...]:
    """The products of the same rows with several weights, each weight read once."""
    outs = products(x, weights, [NONE] * len(weights))
    return tuple(out.reshape(*x.shape[:-1], -1) for out in outs)


def row_product(x: Float[Array, "*rows K"], weight: Float[Array, "M K"]) -> Array:
    """The product of rows with one weight, see :func:`row_products`."""
    return row_products(x, (weight,))[0]


def products(
    x: Array,
    weights: Sequence[Array],
    finishes: Sequence[int],
    *,
    divisor: float = 1.0,
    group: int = 1,
) -> tuple[Array, ...]:
    depth = x.shape[-1]
    return call(
        "row_products",
        [x.reshape(-1, depth)],
        [stored(w) for w in weights],
        [((w.shape[0],), jnp.float32) for w in weights],
        finishes=np.array(finishes, np.int64),
        quarters=int(depth >= LONG_ROW and depth % 32 == 0),
        divisor=np.float32(divisor),
        group=group,
    )
