"""Candidates from the model's own head, chained token by token.

Source: model-spec section 5.3.
"""

import jax.numpy as jnp
from jax import lax

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.mtp import head_logits, head_rows
from hipjax.model.state import DecodeState, HeadState
from hipjax.typing import Array, Int, Params


def head_drafts(
    params: Params, state: DecodeState, *, config: ModelConfig, count: int
) -> tuple[Int[Array, "B count"], DecodeState]:
    """Drafts ``count`` tokens after the seed, greedily.

    The first is read from the head's newest row; each further one comes from a provisional
    row, fed with the draft before it and the head's own streams.

    Args:
      params: the whole parameter tree.
      state: a state whose head is level with its trunk.
      config: the model's configuration.
      count: drafts, at least 1.

    Returns:
      The drafts, and the state with the provisional rows taken back: its caches have been
      written past their length, nothing else has changed.
    """
    start = state.head
    assert start is not None

    def best(carry: Array) -> Array:
        return ops.argmax(head_logits(params, carry, config=config))[0]

    def extend(
        loop: tuple[HeadState, Array], depth: Array
    ) -> tuple[tuple[HeadState, Array], Array]:
        head, token = loop
        rows, tape = head_rows(
            params, token[:, None], head.carry[:, None], head, state.length + depth, config=config
        )
        head = HeadState(layer=tape.commit(jnp.ones_like(state.length)), carry=rows[:, 0])
        token = best(head.carry)
        return (head, token), token

    first = best(start.carry)
    (head, _), more = lax.scan(extend, (start, first), jnp.arange(count - 1))
    drafts = jnp.concatenate([first[:, None], jnp.moveaxis(more, 0, 1)], axis=1)
    back = start.replace(layer=head.layer.rewound(start.layer))
    return drafts, state.replace(head=back)
