"""Which cached blocks the queries of a prompt chunk read (QSA), as a mask.

Source: model-spec section 3.6. Exact top-k, lower block first on ties; decoded rows have
the same selection as a list, see ``ops.select_blocks``.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hipjax.ffi.reference_attention import masked_scores
from hipjax.typing import Array, Bool, Float, Int, Num


def selected_mask(
    query: Float[Array, "B T N width"],
    blocks: Num[Array, "B blocks width"],
    visible: Int[Array, "B T"],
    budget: int,
) -> Bool[Array, "B T blocks"]:
    """The best ``budget`` of each query's ``visible`` blocks as a mask over all blocks."""
    index = jnp.arange(blocks.shape[1])
    scores = masked_scores(query, blocks, index, jnp.int32(0), visible)
    best, at = lax.top_k(scores, min(budget, blocks.shape[1]))
    cut = best[..., -1:]
    last_tie = jnp.max(jnp.where(best == cut, at, -1), axis=-1, keepdims=True)
    chosen = (scores > cut) | ((scores == cut) & (index <= last_tie))
    return jax.lax.stop_gradient(chosen & (index < visible[..., None]))
