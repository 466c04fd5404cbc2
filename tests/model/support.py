"""What the model's tests share: parameters, the two routes through the trunk, comparisons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hipjax.model.config import ModelConfig
from hipjax.model.mtp import extend, head_logits, head_prompt, head_rows
from hipjax.model.state import DecodeState
from hipjax.model.trunk import trunk_logits, trunk_prompt, trunk_rows
from tests.tiny import TINY, TINY_TWO_PLE, Config, Tensors, random_tensors

CONFIGS: dict[str, Config] = {"tiny": TINY, "two_ple": TINY_TWO_PLE}
CAPACITY = 104  # the longest golden prompt and a window, in whole blocks of 4 and of 2

CONTEXT = 262_144  # of the released model

Params = dict[str, Any]
Setup = tuple[ModelConfig, Params]


def params_from(tensors: Tensors) -> Params:
    """The nested parameter tree of a checkpoint's tensors (prefix "model.", fused experts)."""
    whole: dict[str, Any] = {}
    shards: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        table, is_shard, number = name.removesuffix(".weight").partition(".shard_")
        if is_shard:
            shards.setdefault(f"{table}.weight", {})[int(number)] = value
        elif value.dtype != np.int64:
            whole[name] = value
    for name, parts in shards.items():
        whole[name] = np.concatenate([parts[number] for number in sorted(parts)])
    tree: Params = {}
    for name, value in whole.items():
        *path, last = name.split(".")
        functools.reduce(lambda node, key: node.setdefault(key, {}), path, tree)[last] = (
            jnp.asarray(value)
        )
    return tree


def changed(params: Params, name: str, value: jax.Array) -> Params:
    """The tree with one dotted name replaced, which must have been there."""
    first, _, rest = name.partition(".")
    assert first in params, name
    return params | {first: changed(params[first], rest, value) if rest else value}


def leaf(params: Params, name: str) -> jax.Array:
    """One parameter by its dotted name."""
    return functools.reduce(lambda node, key: node[key], name.split("."), params)


@functools.cache
def model(name: str, seed: int = 0) -> Setup:
    """A tiny configuration and its random parameters."""
    config = CONFIGS[name]
    return ModelConfig.from_dict(config), params_from(random_tensors(config, seed))


@functools.cache
def flash_next() -> ModelConfig:
    """The configuration of the released model."""
    return ModelConfig.from_file(Path(__file__).parent.parent / "configs" / "flash_next.json")


def state_shapes(capacity: int, dtype: Any = jnp.bfloat16, *, head: bool = True) -> DecodeState:
    """Shapes and dtypes of the released model's state."""
    return jax.eval_shape(
        lambda: DecodeState.init(flash_next(), capacity, cache_dtype=dtype, head=head)
    )


def fresh(config: ModelConfig, **options: Any) -> DecodeState:
    """An empty float32 state, as all comparisons with a float32 reference use."""
    options = {"capacity": CAPACITY, "cache_dtype": jnp.float32, "head": False} | options
    return DecodeState.init(config, **options)


prompt_chunk = jax.jit(trunk_prompt, static_argnames=("config", "remat"))
decode_rows = jax.jit(trunk_rows, static_argnames="config")
logits_of = jax.jit(trunk_logits, static_argnames="config")
draft_rows = jax.jit(head_rows, static_argnames="config")
draft_prompt = jax.jit(head_prompt, static_argnames="config")
draft_logits = jax.jit(head_logits, static_argnames="config")
extend_head = jax.jit(extend, static_argnames="config")
commit = jax.jit(lambda tape, kept: tape.commit(kept))
canonical = jax.jit(lambda state: state.canonical())


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """Halves the time of tests that compile much and do not depend on how well."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        # Other tests are to run what users run.
        jax.clear_caches()


def ids(values: Any) -> jax.Array:
    """Token ids of one sequence as a batch of one."""
    return jnp.asarray(np.asarray(values, np.int32))[None]


def counts(*values: int) -> jax.Array:
    """One number per sequence."""
    return jnp.array(values, jnp.int32)


def prefill(
    params: Params, tokens: np.ndarray, state: DecodeState, config: ModelConfig, chunk: int
) -> tuple[np.ndarray, DecodeState, list[Any]]:
    """Streams [T, C, H] of one sequence's tokens, the state after them, the chunks' traces.

    The last chunk is filled up with tokens that must not count.
    """
    streams, traces = [], []
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        padded = np.full(chunk, (begin * 7 + 3) % config.vocab_size, np.int32)
        padded[: len(part)] = part
        out, state, trace = prompt_chunk(
            params, ids(padded), counts(len(part)), state, config=config
        )
        streams.append(np.asarray(out[0, : len(part)]))
        traces.append(trace)
    return np.concatenate(streams), state, traces


def step_rows(
    params: Params, tokens: np.ndarray, state: DecodeState, config: ModelConfig, rows: int
) -> tuple[np.ndarray, DecodeState]:
    """Streams [T, C, H] of one sequence's tokens decoded ``rows`` at once, all of them kept."""
    assert len(tokens) % rows == 0
    streams = []
    for begin in range(0, len(tokens), rows):
        tape = decode_rows(params, ids(tokens[begin : begin + rows]), state, config=config)
        state = commit(tape, counts(rows))
        streams.append(np.asarray(tape.streams[0]))
    return np.concatenate(streams), state


def named_leaves(tree: Any) -> dict[str, np.ndarray]:
    """Every array of a pytree under its path."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in found}


def worst_difference(found: Any, expected: Any) -> float:
    """Largest difference of two pytrees' float arrays; everything else must be equal.

    A float array is compared relative to its own largest value, or to 1 where that is larger.

    Raises:
      AssertionError: names, shapes, dtypes or integers differ, or a value is not finite.
    """
    ours, theirs = named_leaves(found), named_leaves(expected)
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        if not np.issubdtype(value.dtype, np.floating):
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
        elif value.size:
            assert np.isfinite(value).all() and np.isfinite(ours[name]).all(), name
            scale = max(1.0, float(np.abs(value).max()))
            worst = max(worst, float(np.abs(ours[name] - value).max()) / scale)
    return worst
