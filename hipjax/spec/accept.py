"""The verdict on a window: which drafts stand, and what the window emits.

Source: decoding-spec sections 6.1 and 7. Arrays in, arrays out.
"""

from typing import NamedTuple

import jax.numpy as jnp

from hipjax.typing import Array, Int


class Verdict(NamedTuple):
    """What a window of k drafts, verified in R = k + 1 rows, comes to.

    Attributes:
      accepted: [B] drafts kept.
      emitted: [B] tokens the window emits, which are the first of the target's picks; also
        the number of rows that become final.
      stopped: [B] whether the last of them ends the request.
    """

    accepted: Array
    emitted: Array
    stopped: Array


def greedy(
    drafts: Int[Array, "B k"],
    picks: Int[Array, "B R"],
    allowed: Int[Array, " B"],
    stops: Int[Array, " stops"],
) -> Verdict:
    """Keeps the longest prefix of drafts that the target would have chosen itself.

    The target's pick at the first mismatch replaces the draft; after a full match its pick
    of the last row is the bonus. An accepted draft that ends the request ends the window
    too: it stays the pending seed, no bonus follows, and its row is not final.

    Args:
      drafts: proposed tokens.
      picks: the target's choice at every row.
      allowed: [B] how many leading drafts may be considered, 0 to k.
      stops: ids that end the request; may be empty.
    """
    index = jnp.arange(drafts.shape[1])
    same = (drafts == picks[:, :-1]) & (index < allowed[:, None])
    accepted = jnp.sum(jnp.cumprod(same, axis=1), axis=1)
    ends = jnp.any(picks[..., None] == stops, axis=-1)
    first_end = jnp.argmax(ends, axis=1)
    emitted = jnp.minimum(accepted, jnp.where(jnp.any(ends, axis=1), first_end, accepted)) + 1
    accepted = jnp.minimum(accepted, emitted)
    stopped = jnp.take_along_axis(ends, emitted[:, None] - 1, axis=1)[:, 0]
    return Verdict(accepted.astype(jnp.int32), emitted.astype(jnp.int32), stopped)
