"""Argument checks of the public doors: what was given, what is allowed, before any work."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int within ``[low, high]``.

    Raises:
      TypeError: it is not an integer.
      ValueError: it lies outside.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} is {value}; allowed: {allowed}")
    return int(value)


def token_ids(name: str, value: Any, vocab_size: int) -> np.ndarray:
    """``value`` as a flat int32 array of ids within the vocabulary.

    Raises:
      TypeError: it does not hold integers.
      ValueError: it is not one-dimensional, or an id lies outside ``[0, vocab_size)``.
    """
    if isinstance(value, str):
        raise TypeError(f"{name} is a string; it must be token ids: encode the text first")
    array = np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.dtype == bool or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must hold integers")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be one-dimensional")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        where = int(outside[0])
        raise ValueError(f"{name}[{where}] is {int(array[where])}; allowed: 0 to {vocab_size - 1}")
    return array.astype(np.int32)


def prompt(value: Any, vocab_size: int, context: int) -> np.ndarray:
    """A prompt that the model can continue by at least one token.

    Raises:
      TypeError, ValueError: as :func:`token_ids`; the prompt is empty or fills the context.
    """
    ids = token_ids("prompt", value, vocab_size)
    if ids.size == 0:
        raise ValueError("prompt is empty; it must hold at least one token")
    if ids.size >= context:
        raise ValueError(
            f"prompt has {ids.size} tokens; allowed: at most {context - 1}, one below the "
            f"model's context of {context}"
        )
    return ids


def stop_ids(value: Sequence[int], vocab_size: int, eos: int | None) -> np.ndarray:
    """The ids that end a request: the given ones and the model's end-of-sequence."""
    given = token_ids("stop_token_ids", list(value), vocab_size)
    own = [] if eos is None else [eos]
    return np.array(sorted({*given.tolist(), *own}), np.int32)


def random_key(value: Any) -> None:
    """Refuses what is neither None nor a single ``jax.random.key``.

    Raises:
      TypeError: it is something else.
    """
    if value is None:
        return
    if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key is {value!r}; it must be None or a jax.random.key")
    if value.shape != ():
        raise TypeError(f"key has shape {value.shape}; it must be a single key")
