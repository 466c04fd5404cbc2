"""Root-mean-square norms."""

import jax.numpy as jnp
import numpy as np

from hipjax.ffi.call import call, stored
from hipjax.typing import Array, Float


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"], eps: float) -> Array:
    """Root-mean-square norm over the last axis, scaled by ``1 + weight``."""
    flat = x.reshape(-1, x.shape[-1])
    (out,) = call(
        "rms_norm", [flat], [stored(weight)], [(flat.shape[1:], jnp.float32)], eps=np.float32(eps)
    )
    return out.reshape(x.shape)


def stream_norm(x: Float[Array, "*rows C H"], weight: Float[Array, " D"], eps: float) -> Array:
    """The same, each stream normalised by itself and scaled by its part of the weight."""
    flat = x.reshape(-1, *x.shape[-2:])
    (out,) = call(
        "rms_norm", [flat], [stored(weight)], [(flat.shape[1:], jnp.float32)], eps=np.float32(eps)
    )
    return out.reshape(x.shape)
