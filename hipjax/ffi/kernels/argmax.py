"""The greedy choice."""

from typing import Any

import jax.numpy as jnp

from hipjax.ffi.call import call
from hipjax.ffi.operands import floats
from hipjax.typing import Array, Bool, Float, Int

_PIECE = 8192  # Argmax::kPiece


def argmax(logits: Float[Array, "*rows V"]) -> tuple[Int[Array, "*rows"], Bool[Array, "*rows"]]:
    """Greedy choice: non-finite logits never win, the lowest id wins a tie, else id 0.

    Also whether the row had not a single finite logit.
    """
    floats("logits", logits)
    rows, width = logits.shape[:-1], logits.shape[-1]
    pieces = -(-width // _PIECE)
    results: list[tuple[tuple[int, ...], Any]] = [((), jnp.int32)] * 2
    if pieces > 1:
        results += [((pieces,), jnp.float32), ((pieces,), jnp.int32)]
    best, lost, *_ = call("argmax", [logits.reshape(-1, width)], [], results)
    return best.reshape(rows), lost.reshape(rows) != 0
