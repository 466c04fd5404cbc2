"""Logits of every position of given texts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from hipjax import checks
from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.state import DecodeState
from hipjax.model.trunk import trunk_logits, trunk_prompt, trunk_rows
from hipjax.typing import Array, Params

_ROWS = 4


def logits(
    params: Params,
    tokens: Any,
    *,
    config: ModelConfig,
    lengths: Any = None,
    chunk: int = 64,
    rows: bool = False,
    cache_dtype: DTypeLike = jnp.bfloat16,
    recurrent: str = "float32",
    implementation: ops.Implementation = "auto",
) -> Array:
    """Logits of the next token at every position; pure, and may be jitted.

    Args:
      params: the whole parameter tree.
      tokens: [T] or [B, T] token ids. Ids outside the vocabulary are an error where their
        values are known, and undefined behaviour under ``jit``.
      config: the model's configuration.
      lengths: [B] tokens of each sequence, the rest being padding; None means all T.
        Logits past a sequence's length are zero.
      chunk: tokens that run at once, at least 1.
      rows: use the numerics of the decode path in place of the prompt path's, which is plain
        JAX and may be differentiated.
      cache_dtype: dtype of cached keys and values, bfloat16 or float32.
      recurrent: storage of the recurrent states, "float32", "q8" or "q8_nearest".
      implementation: of the decode path: "kernel", "reference" (plain JAX), or "auto", which
        is kernels where they run and else plain JAX with one warning.

    Returns:
      float32 [T, V] or [B, T, V].

    Raises:
      TypeError, ValueError: an argument is not as stated, or the texts exceed the context.

    Example:
      >>> import hipjax
      >>> model = hipjax.load_nano()
      >>> hipjax.logits(model.params, [5, 6, 7], config=model.config).shape
      (3, 2048)
    """
    checks.boolean("rows", rows)
    wish = ops.checked_implementation(implementation)
    if wish == "kernel" and not rows:
        raise ValueError(
            "implementation is 'kernel', but only the decode path has kernels: rows=True"
        )
    chunk = checks.integer("chunk", chunk, 1)
    given = _checked_tokens(tokens, config)
    single, batch = given.ndim == 1, jnp.atleast_2d(given)
    length = batch.shape[1]
    count = _checked_lengths(lengths, batch.shape, single)
    chunk = min(_ROWS if rows else chunk, length)
    padded = jnp.pad(batch, ((0, 0), (0, -length % chunk)))
    pieces = jnp.moveaxis(padded.reshape(batch.shape[0], -1, chunk), 1, 0)
    state = DecodeState.init(
        config,
        padded.shape[1],
        batch=batch.shape[0],
        cache_dtype=cache_dtype,
        recurrent=recurrent,
        head=False,
    )

    def visit(state: DecodeState, piece: Array) -> tuple[DecodeState, Array]:
        left = jnp.clip(count - state.length, 0, chunk)
        if rows:
            tape = trunk_rows(params, piece, state, config=config)
            state, streams = tape.commit(left), tape.streams
        else:
            streams, state, _ = trunk_prompt(params, piece, left, state, config=config)
        live = jnp.arange(chunk) < left[:, None]
        return state, jnp.where(live[..., None], trunk_logits(params, streams, config=config), 0)

    with ops.implementation(wish if rows else "reference"):
        _, parts = lax.scan(visit, state, pieces)
    out = jnp.moveaxis(parts, 0, 1).reshape(batch.shape[0], -1, config.vocab_size)[:, :length]
    return out[0] if single else out


def _checked_tokens(tokens: Any, config: ModelConfig) -> Array:
    if isinstance(tokens, jax.core.Tracer):
        given: Any = tokens
        if not jnp.issubdtype(given.dtype, jnp.integer) or given.ndim not in (1, 2):
            raise TypeError(f"tokens is {given.aval}; it must hold integers, [T] or [B, T]")
    else:
        given = checks.integers("tokens", tokens, (1, 2), "[T] or [B, T]")
        checks.within("tokens", given, 0, config.vocab_size - 1)
    if given.size == 0:
        raise ValueError(f"tokens has shape {given.shape}; it must be [T] or [B, T], not empty")
    if given.shape[-1] > config.max_position_embeddings:
        raise ValueError(
            f"tokens has {given.shape[-1]} positions; the model's context is "
            f"{config.max_position_embeddings}"
        )
    return jnp.asarray(given, jnp.int32)


def _checked_lengths(lengths: Any, shape: tuple[int, ...], single: bool) -> Array:
    if lengths is None:
        return jnp.full((shape[0],), shape[1], jnp.int32)
    if isinstance(lengths, jax.core.Tracer):
        given: Any = lengths
    else:
        given = checks.integers("lengths", lengths, (0, 1), "[B]")
        checks.within("lengths", np.atleast_1d(given), 0, shape[1])
    if given.shape != (shape[0],) and not (single and given.shape == ()):
        raise ValueError(
            f"lengths has shape {given.shape}; it must hold one integer for each of the "
            f"{shape[0]} sequences"
        )
    return jnp.asarray(given, jnp.int32).reshape(shape[0])
