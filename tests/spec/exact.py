"""Batches of prompts decoded side by side, with a fingerprint of every state on the way.

Speculation is exact if each window leaves behind, bit for bit, the state that plain decoding
has after the same tokens. States are compared by fingerprints that the device computes:
comparing the arrays themselves would take far longer than decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hipjax
from hipjax.model.state import DecodeState
from hipjax.spec.step import prefill_chunk, step
from tests.spec.prompts import GENRES

CHUNK = 64
CAPACITY = 512
COUNT, BATCH, NEW_TOKENS = 60, 20, 256
BATCHES = range(COUNT // BATCH)
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@functools.cache
def nano() -> hipjax.FlashNext:
    return hipjax.load_nano()


def prompts(count: int) -> list[tuple[int, ...]]:
    """Beginnings of the texts of all genres, of 1 to CHUNK tokens, all different."""
    tokenizer = nano().tokenizer
    assert tokenizer is not None
    whole = [tuple(tokenizer.encode(text).ids) for texts in GENRES.values() for text in texts]
    found: dict[tuple[int, ...], None] = {}
    for length in (CHUNK, 24, 9, 40, 4, 1):
        for ids in whole:
            found.setdefault(ids[:length])
    assert len(found) >= count
    return list(found)[:count]


def fingerprint(state: DecodeState) -> jax.Array:
    """[B, leaves, 2] of every array of a state, dead cache rows apart."""

    def one(leaf: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(leaf, _BITS[leaf.dtype.itemsize]).astype(jnp.uint32)
        flat = bits.reshape(leaf.shape[0], -1)
        place = jnp.arange(1, flat.shape[1] + 1, dtype=jnp.uint32)
        sums = []
        for factor in (2654435761, 2246822519):
            weights = (place * jnp.uint32(factor)) ^ (place >> 3) | 1
            sums.append(jnp.sum(flat * weights, axis=1, dtype=jnp.uint32))
        return jnp.stack(sums, axis=1)

    return jnp.stack([one(leaf) for leaf in jax.tree.leaves(state.canonical())], axis=1)


@functools.partial(jax.jit, static_argnames="recurrent")
def begin(
    params: Any, tokens: jax.Array, count: jax.Array, recurrent: str
) -> tuple[DecodeState, jax.Array]:
    """The state after the prompts, and the first tokens."""
    config = nano().config
    state = DecodeState.init(config, CAPACITY, batch=tokens.shape[0], recurrent=recurrent)
    after = jnp.full_like(count, -1)
    state, pick, _ = prefill_chunk(params, state, tokens, count, after, config=config)
    return state, pick


@functools.partial(jax.jit, static_argnames="drafts", donate_argnames="state")
def window(
    params: Any, state: DecodeState, seed: jax.Array, budget: jax.Array, drafts: int
) -> tuple[DecodeState, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """One window: state, next seeds, left budget, tokens, how many of them, fingerprints."""
    stops = jnp.zeros(0, jnp.int32)
    state, out = step(params, state, seed, budget, stops, config=nano().config, drafts=drafts)
    last = jnp.take_along_axis(out.tokens, jnp.maximum(out.emitted - 1, 0)[:, None], axis=1)
    seed = jnp.where(out.emitted > 0, last[:, 0], seed)
    return state, seed, budget - out.emitted, out.tokens, out.emitted, fingerprint(state)


@dataclasses.dataclass(frozen=True)
class Trail:
    """What a batch of requests emitted, and the state's fingerprint after each length.

    Attributes:
      tokens: per request, the emitted ids.
      states: per request, fingerprints by the number of tokens emitted so far.
      accepted: drafts that stood, over all requests.
    """

    tokens: list[list[int]]
    states: list[dict[int, bytes]]
    accepted: int


def decoded(
    batch: Sequence[tuple[int, ...]], new_tokens: int, recurrent: str, depths: Iterator[int]
) -> Trail:
    """Decodes a batch of prompts, with the next of ``depths`` drafts in every window."""
    tokens = np.zeros((len(batch), CHUNK), np.int32)
    for row, ids in zip(tokens, batch, strict=True):
        row[: len(ids)] = ids
    count = jnp.array([len(ids) for ids in batch], jnp.int32)
    params = nano().params
    state, seed = begin(params, jnp.asarray(tokens), count, recurrent)
    trail = Trail([[int(s)] for s in seed], [{} for _ in batch], 0)
    budget = jnp.full(len(batch), new_tokens - 1, jnp.int32)
    accepted = 0
    while int(jnp.max(budget)) > 0:
        state, seed, budget, out, emitted, prints = window(
            params, state, seed, budget, next(depths)
        )
        kept, given, marks = np.asarray(emitted), np.asarray(out), np.asarray(prints)
        for i, n in enumerate(kept):
            trail.tokens[i] += given[i, :n].tolist()
            trail.states[i][len(trail.tokens[i])] = marks[i].tobytes()
            accepted += max(0, int(n) - 1)
    return dataclasses.replace(trail, accepted=accepted)


def differences(found: Trail, plain: Trail) -> list[str]:
    """Where a trail leaves plain decoding's: its tokens, or a state after some tokens."""
    apart = []
    for i, (got, wanted) in enumerate(zip(found.tokens, plain.tokens, strict=True)):
        if got != wanted:
            place = next(j for j, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
            apart.append(f"request {i}: token {place} is {got[place]}, not {wanted[place]}")
            continue
        for length, mark in found.states[i].items():
            if mark != plain.states[i][length]:
                leaves = np.frombuffer(mark, np.uint32) != np.frombuffer(
                    plain.states[i][length], np.uint32
                )
                which = sorted({int(j) // 2 for j in np.flatnonzero(leaves)})
                apart.append(f"request {i}: after {length} tokens, arrays {which} differ")
                break
    return apart


def batch_of(number: int) -> list[tuple[int, ...]]:
    """One of the BATCHES of prompts."""
    return prompts(COUNT)[number * BATCH : (number + 1) * BATCH]


@functools.cache
def plain(number: int, recurrent: str) -> Trail:
    """Plain decoding of a batch."""
    return decoded(batch_of(number), NEW_TOKENS, recurrent, itertools.repeat(0))


def check_every_depth(number: int, recurrent: str) -> None:
    """Depths 1 to 7, each for whole requests: every token and every state."""
    wanted = plain(number, recurrent)
    assert all(len(tokens) == NEW_TOKENS for tokens in wanted.tokens)
    for depth in range(1, 8):
        found = decoded(batch_of(number), NEW_TOKENS, recurrent, itertools.repeat(depth))
        assert not differences(found, wanted), depth
        assert found.accepted > 100  # speculation did happen


def check_mixed_depths(number: int, recurrent: str) -> None:
    """Depths 0 to 7 in no order within every request."""
    depths = np.random.default_rng(number).integers(0, 8, 4 * NEW_TOKENS)
    found = decoded(batch_of(number), NEW_TOKENS, recurrent, iter(depths.tolist()))
    assert not differences(found, plain(number, recurrent))
