"""Argument checks of the public doors: what was given, what is allowed, before any work."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


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


def boolean(name: str, value: Any) -> bool:
    """``value`` if it is True or False.

    Raises:
      TypeError: it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; allowed: True or False")
    return value


def one_of(name: str, value: Any, allowed: Sequence[str]) -> Any:
    """``value`` if it is one of the ``allowed`` strings.

    Raises:
      TypeError: it is no string.
      ValueError: it is another string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
    return value


def instance(name: str, value: Any, kind: type[T]) -> T:
    """``value`` if it is of ``kind``; a fresh ``kind()`` for None.

    Raises:
      TypeError: it is something else.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be None or a {kind.__name__}")
    return value


def cache_dtype(value: Any) -> np.dtype[Any]:
    """The dtype of a cache of keys and values.

    Raises:
      ValueError: it is neither bfloat16 nor float32.
    """
    allowed = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    try:
        dtype = None if value is None else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        raise ValueError(f"cache_dtype is {value!r}; allowed: bfloat16, float32")
    return dtype


RECURRENT = ("float32", "q8", "q8_nearest")


def recurrent(value: Any) -> str:
    """The storage of a recurrent state.

    Raises:
      TypeError: it is no string.
      ValueError: it is none of ``RECURRENT``.
    """
    return one_of("recurrent", value, RECURRENT)


def integers(name: str, value: Any, axes: tuple[int, ...], allowed: str) -> np.ndarray:
    """``value`` as an array of integers with as many axes as one of ``axes``, in words ``allowed``.

    Raises:
      TypeError: it does not hold integers.
      ValueError: it is ragged, or has another number of axes.
    """
    if isinstance(value, str):
        raise TypeError(f"{name} is a string; it must be token ids: encode the text first")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} has rows of different lengths; pad them") from error
    if array.size == 0:
        array = array.astype(np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must hold integers")
    if array.ndim not in axes:
        raise ValueError(f"{name} has shape {array.shape}; it must be {allowed}")
    return array


def within(name: str, array: np.ndarray, low: int, high: int) -> None:
    """Refuses an array with an element outside ``[low, high]``.

    Raises:
      ValueError: there is one; the first is named.
    """
    outside = np.argwhere((array < low) | (array > high))
    if outside.size:
        where = tuple(int(i) for i in outside[0])
        place = "".join(f"[{i}]" for i in where)
        raise ValueError(f"{name}{place} is {int(array[where])}; allowed: {low} to {high}")


def token_ids(name: str, value: Any, vocab_size: int) -> np.ndarray:
    """``value`` as a flat int32 array of ids within the vocabulary.

    Raises:
      TypeError: it does not hold integers.
      ValueError: it is not one-dimensional, or an id lies outside ``[0, vocab_size)``.
    """
    array = integers(name, value, (1,), "one-dimensional")
    within(name, array, 0, vocab_size - 1)
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
    given = token_ids("stop_token_ids", value, vocab_size)
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
