"""What kernels take, checked at trace time: the argument, what was given, what is allowed."""

import jax.numpy as jnp

from hipjax.typing import Array

_STORAGES = (jnp.float32, jnp.bfloat16, jnp.uint16)


def floats(name: str, x: Array, shape: tuple[int, ...] | None = None) -> Array:
    """``x`` if it is float32, and of ``shape`` where one is given.

    Raises:
      TypeError: it has another dtype.
      ValueError: it has another shape, no axis, or nothing along the last one.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be float32")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}; it must be {shape}")
    if not x.shape or not x.shape[-1]:
        raise ValueError(f"{name} has shape {x.shape}; its last axis must hold at least one value")
    return x


def weight_vector(name: str, x: Array, size: int) -> Array:
    """``x`` if it is a stored parameter of ``size`` values.

    Raises:
      TypeError, ValueError: it has another dtype; it has another size.
    """
    _stored(name, x)
    if x.size != size:
        raise ValueError(f"{name} has shape {x.shape}; it must hold {size} values")
    return x


def weight_matrix(name: str, x: Array, depth: int, outputs: int | None = None) -> Array:
    """``x`` if it is a stored weight in [out, in] layout for rows of ``depth`` values.

    Raises:
      TypeError, ValueError: it has another dtype; it has another shape.
    """
    _stored(name, x)
    wanted = x.shape[0] if outputs is None and x.ndim else outputs
    if x.shape != (wanted, depth):
        said = "outputs" if outputs is None else outputs
        raise ValueError(f"{name} has shape {x.shape}; it must be ({said}, {depth})")
    return x


def _stored(name: str, x: Array) -> None:
    if x.dtype not in _STORAGES:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: float32, bfloat16, uint16")
