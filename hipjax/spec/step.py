"""One step of decoding, pure: the same for one row and for a window.

Source: decoding-spec section 2. The number of drafts is static, everything else traced.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.mtp import extend, head_prompt
from hipjax.model.state import DecodeState
from hipjax.model.trunk import trunk_logits, trunk_prompt, trunk_rows
from hipjax.spec import accept
from hipjax.spec.draft import head_drafts
from hipjax.typing import Array, Int, Leaf, Params


class StepOut(NamedTuple):
    """What a step reports to the host.

    Attributes:
      tokens: [B, R] the emitted tokens, the first ``emitted`` of each row.
      emitted: [B] how many.
      drafted: [B] drafts that were considered.
      accepted: [B] drafts that were kept.
      stopped: [B] whether the last emitted token ends the request.
      nonfinite: [B] verified rows up to the verdict without a single finite logit.
    """

    tokens: Leaf
    emitted: Leaf
    drafted: Leaf
    accepted: Leaf
    stopped: Leaf
    nonfinite: Leaf

    def packed(self) -> Int[Array, "B report"]:
        """The report as one array, so that one transfer brings it to the host."""
        counts = jnp.stack(self[1:], axis=1).astype(jnp.int32)
        return jnp.concatenate([counts, self.tokens], axis=1)

    @classmethod
    def unpacked(cls, report: np.ndarray) -> "StepOut":
        """The inverse of :meth:`packed`, on the host."""
        counts = len(cls._fields) - 1
        return cls(report[:, counts:], *report[:, :counts].T)


def prefill_chunk(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    following: Int[Array, " B"],
    *,
    config: ModelConfig,
) -> tuple[DecodeState, Int[Array, " B"], Int[Array, " B"]]:
    """Consumes one chunk of a prompt with trunk and head.

    Args:
      params: the whole parameter tree.
      state: the state before the chunk.
      tokens: the chunk; only the first ``count`` of each sequence are real, at least one.
      count: see ``tokens``.
      following: the prompt's token after the chunk, or -1 where the prompt ends with it.
      config: the model's configuration.

    Returns:
      The state after the chunk, the model's choice of the token that follows it, and 1 where
      that row of logits has not a single finite one.
    """
    before = state.length
    streams, state, _ = trunk_prompt(params, tokens, count, state, config=config)
    logits = trunk_logits(params, state.carry, config=config)
    pick, lost = ops.argmax(logits)
    if state.head is not None:
        after = jnp.where(following >= 0, following, pick)
        shifted = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        last = jnp.arange(tokens.shape[1]) == count[:, None] - 1
        _, head, _ = head_prompt(
            params,
            jnp.where(last, after[:, None], shifted),
            streams,
            state.head,
            before,
            count,
            config=config,
        )
        state = state.replace(head=head)
    return state, pick, lost.astype(jnp.int32)


def step(
    params: Params,
    state: DecodeState,
    seed: Int[Array, " B"],
    budget: Int[Array, " B"],
    stops: Int[Array, " stops"],
    *,
    config: ModelConfig,
    drafts: int,
) -> tuple[DecodeState, StepOut]:
    """Drafts, verifies and commits one window; plain decoding is a window of no drafts.

    Args:
      params: the whole parameter tree.
      state: the state; with ``drafts`` > 0 its head is level with its trunk.
      seed: [B] the last emitted token, which neither trunk nor head has consumed.
      budget: [B] tokens that may still be emitted; a sequence with 0 is left as it is.
      stops: ids that end a request; may be empty.
      config: the model's configuration.
      drafts: drafts per window, 0 for plain decoding.

    Returns:
      The state after the window (trunk and head level), and its report.
    """
    block = seed[:, None]
    proposed = jnp.zeros((seed.shape[0], 0), jnp.int32)
    if drafts:
        proposed, state = head_drafts(params, state, config=config, count=drafts)
        block = jnp.concatenate([block, proposed], axis=1)
    tape = trunk_rows(params, block, state, config=config)
    logits = trunk_logits(params, tape.streams, config=config)
    picks, lost = ops.argmax(logits)
    allowed = jnp.clip(budget - 1, 0, drafts)
    verdict = accept.greedy(proposed, picks, allowed, stops)
    active = budget > 0
    emitted = jnp.where(active, verdict.emitted, 0)
    state = tape.commit(emitted)
    if state.head is not None:
        state = extend(params, picks, tape.streams, state, emitted, config=config)
    out = StepOut(
        tokens=picks,
        emitted=emitted,
        drafted=jnp.where(active, allowed, 0),
        accepted=jnp.where(active, verdict.accepted, 0),
        stopped=verdict.stopped & active,
        nonfinite=jnp.sum(lost & (jnp.arange(picks.shape[1]) < emitted[:, None]), axis=1),
    )
    return state, out
