"""Random layers of the gated delta rule for tests, and the operations on them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hipjax.ffi import ops


class Sizes(NamedTuple):
    """Key heads, value heads, key channels, value channels, taps."""

    key_heads: int
    heads: int
    keys: int
    values: int
    taps: int = 4


# The released model's heads, the bundled model's, the tests', and odd ones.
SIZES = {
    "released": Sizes(2, 6, 128, 128),
    "nano": Sizes(2, 6, 32, 32),
    "tiny": Sizes(2, 4, 16, 16),
    "middle": Sizes(1, 3, 64, 96),
    "odd": Sizes(3, 3, 33, 7, 3),
    "narrow": Sizes(1, 2, 5, 45, 1),
    "wide": Sizes(1, 1, 256, 256, 2),
}
EPS = 1e-6


def rows_of(sizes: Sizes, batch: int, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """What ``delta_rows`` and ``delta_commit`` take, by name, for ``rows`` rows."""
    s, rng = sizes, np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def unit(x: np.ndarray) -> np.ndarray:
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

    channels = 2 * s.key_heads * s.keys + s.heads * s.values
    return {
        "query": unit(normal(batch, rows, s.key_heads, s.keys)) / np.float32(s.keys**0.5),
        "key": unit(normal(batch, rows, s.key_heads, s.keys)),
        "value": normal(batch, rows, s.heads, s.values),
        "decay": -np.abs(normal(batch, rows, s.heads)),
        "strength": rng.uniform(0.1, 0.9, (batch, rows, s.heads)).astype(np.float32),
        "gate": normal(batch, rows, s.heads, s.values),
        "state": normal(batch, s.heads, s.keys, s.values),
        "weight": 1 + normal(s.values) / 4,
        "past": normal(batch, s.taps - 1, channels),
        "columns": normal(batch, rows, channels),
        "a": normal(batch, rows, s.heads),
        "b": normal(batch, rows, s.heads),
        "conv": normal(channels, 1, s.taps),
        "a_log": np.log(rng.uniform(1, 16, s.heads)).astype(np.float32),
        "dt_bias": normal(s.heads),
        "length": rng.integers(0, 1000, batch).astype(np.int32),
        "codes": rng.integers(-128, 128, (batch, s.heads, s.values, s.keys)).astype(np.int8),
        "scales": rng.uniform(0.001, 0.1, (batch, s.heads, s.values)).astype(np.float32),
    }


PER_ROW = ("query", "key", "value", "decay", "strength", "gate", "columns", "a", "b", "correction")


def one_row(given: dict[str, Any], row: int) -> dict[str, Any]:
    """The same with one of its rows only."""
    return {name: x[:, row : row + 1] if name in PER_ROW else x for name, x in given.items()}


def picked(given: dict[str, Any], *names: str) -> list[jax.Array]:
    return [jnp.asarray(given[name]) for name in names]


@functools.partial(jax.jit, static_argnames=("key_heads", "keys"))
def _inputs(*operands: jax.Array, key_heads: int, keys: int) -> tuple[jax.Array, ...]:
    return ops.delta_inputs(*operands, key_heads, keys)


def inputs(given: dict[str, Any], sizes: Sizes) -> tuple[jax.Array, ...]:
    operands = picked(given, "past", "columns", "a", "b", "conv", "a_log", "dt_bias")
    return _inputs(*operands, key_heads=sizes.key_heads, keys=sizes.keys)


_INPUTS = ("query", "key", "value", "decay", "strength", "gate")
_TAPE = ("key", "correction", "decay", "past", "columns", "kept")


@functools.partial(jax.jit, static_argnames=("gate", "nearest"))
def _rows(*operands: jax.Array, gate: str, nearest: bool | None) -> tuple[jax.Array, ...]:
    if nearest is None:
        return ops.delta_rows(*operands, EPS, gate)
    return ops.delta_rows_q8(*operands, EPS, gate, nearest)


def rows(
    given: dict[str, Any], gate: str = "sigmoid", nearest: bool | None = None
) -> tuple[jax.Array, ...]:
    """Outputs and corrections; from the Q8 state unless ``nearest`` is None."""
    state = ("state",) if nearest is None else ("codes", "scales", "length")
    return _rows(*picked(given, *_INPUTS, *state, "weight"), gate=gate, nearest=nearest)


@functools.partial(jax.jit, static_argnames="nearest")
def _commit(*operands: jax.Array, nearest: bool | None) -> tuple[jax.Array, ...]:
    if nearest is None:
        return ops.delta_commit(*operands)
    return ops.delta_commit_q8(*operands, nearest)


def commit(given: dict[str, Any], kept: Any, nearest: bool | None = None) -> tuple[jax.Array, ...]:
    """The convolution's inputs and the state, or codes and scales, after ``kept`` rows."""
    state = ("state",) if nearest is None else ("codes", "scales", "length")
    given = {**given, "kept": np.broadcast_to(np.int32(kept), given["key"].shape[:1])}
    return _commit(*picked(given, *_TAPE, *state), nearest=nearest)


def stepped(
    given: dict[str, Any], gate: str = "sigmoid", nearest: bool | None = None
) -> tuple[list[tuple[np.ndarray, ...]], list[dict[str, Any]]]:
    """Row after row alone, each committed: outputs and corrections, and the states before each.

    The last of the states is that after all rows.
    """
    names = ("past", "state") if nearest is None else ("past", "codes", "scales")
    results, states = [], [{name: given[name] for name in (*names, "length")}]
    for row in range(given["key"].shape[1]):
        alone = one_row(given, row) | states[-1]
        found = rows(alone, gate, nearest)
        results.append(tuple(np.asarray(x)[:, 0] for x in found))
        after = commit(alone | {"correction": found[1]}, 1, nearest)
        moved = dict(zip(names, map(np.asarray, after), strict=True))
        states.append(moved | {"length": states[-1]["length"] + np.int32(1)})
    return results, states
