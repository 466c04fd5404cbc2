"""What the tests of generation share: a scripted drafter, quick programs, prompts, plain runs.

A random head hardly ever agrees with a random trunk. So the drafts of these tests come from a
script where one is given: right tokens, wrong ones, stop ids, ids outside the vocabulary. The
script travels in the parameter tree, hence one compiled program serves all of them.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hipjax
from hipjax import ModelConfig, Result, SamplingConfig, SpeculationConfig, Window
from hipjax.model.state import DecodeState
from hipjax.spec import generate as doors
from hipjax.spec import step as steps
from hipjax.spec.draft import head_drafts
from hipjax.spec.step import StepOut
from tests.model import support
from tests.tiny import TINY, prompt_ids

Params = dict[str, Any]

CONTEXT = 512
OWN = -100  # where the script says this, the head's own draft stands
BUDGET = 40
# No run of these tests emits it. Every request gets one stop id beside the end of sequence, so
# that all requests have two and run the same program.
NEVER = 511
# One token, around the chunks of 64 in which a prompt is consumed, and past several of them.
PROMPTS = {
    name: prompt_ids(TINY, seed, length)
    for name, seed, length in (
        ("one token", 0, 1),
        ("short", 0, 40),
        ("one below a chunk", 1, 63),
        ("a chunk", 4, 64),
        ("one above a chunk", 2, 65),
        ("three chunks", 2, 130),
    )
}
# The programs of this package take XLA seconds to optimise and milliseconds to run.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TRACES: collections.Counter[tuple[Any, ...]] = collections.Counter()

_whole_window = doors._window.__wrapped__
_whole_prefill = doors._prefill.__wrapped__


def scripted_drafts(
    params: Params, state: DecodeState, *, config: ModelConfig, count: int
) -> tuple[jax.Array, DecodeState]:
    """The head's drafts, replaced by those of ``params["script"]`` [B, positions].

    The head does all of its work first, so that it leaves behind what it always leaves.
    """
    own, state = head_drafts(params, state, config=config, count=count)
    if "script" not in params:
        return own, state
    positions = state.length[:, None] + 1 + jnp.arange(count)
    script = jnp.take_along_axis(params["script"], positions, axis=1)
    return jnp.where(script == OWN, own, script), state


def _window(params: Params, state: DecodeState, *rest: Any, **static: Any) -> Any:
    shapes = tuple(part.shape for part in rest)
    TRACES["window", static["drafts"], "script" in params, state.head is not None, shapes] += 1
    with mock.patch.object(steps, "head_drafts", scripted_drafts):
        return _whole_window(params, state, *rest, **static)


def _prefill(params: Params, state: DecodeState, *rest: Any, **static: Any) -> Any:
    TRACES["prefill", state.head is not None, rest[0].shape] += 1
    return _whole_prefill(params, state, *rest, **static)


window = jax.jit(
    _window,
    static_argnames=("config", "drafts"),
    donate_argnames="state",
    compiler_options=_QUICK,
)
prefill = jax.jit(
    _prefill, static_argnames="config", donate_argnames="state", compiler_options=_QUICK
)


_logits = jax.jit(hipjax.logits, static_argnames=("config", "cache_dtype"), compiler_options=_QUICK)


def best_ids(texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The id of the best logit at every position of up to six texts, scored as whole texts."""
    config, params = support.model("tiny")
    tokens = np.zeros((6, CONTEXT), np.int32)
    lengths = np.zeros(6, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        lengths[row] = len(text)
    logits = _logits(params, tokens, config=config, lengths=lengths, cache_dtype=jnp.float32)
    best = np.asarray(logits).argmax(axis=-1)
    return [row[: len(text)] for row, text in zip(best, texts, strict=False)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts these programs behind the public doors, with one capacity for all requests."""
    monkeypatch.setattr(doors, "_window", window)
    monkeypatch.setattr(doors, "_prefill", prefill)
    monkeypatch.setattr(doors, "_SMALLEST_CAPACITY", CONTEXT)


@functools.cache
def model() -> tuple[ModelConfig, Params]:
    """The tiny configuration and its parameters, with an empty script."""
    config, params = support.model("tiny")
    return config, params | {"script": script([])}


def script(tokens: Sequence[int], begin: int = 0) -> jax.Array:
    """A script [1, positions] with ``tokens`` from position ``begin`` on, the head elsewhere."""
    drafts = np.full((1, CONTEXT + 16), OWN, np.int32)
    drafts[0, begin : begin + len(tokens)] = tokens
    return jnp.asarray(drafts)


def misled(prompt: np.ndarray, tokens: np.ndarray, accepted: Sequence[int], k: int) -> jax.Array:
    """The script for a request that emits ``tokens``, of whose windows accept so many drafts.

    Numbers of ``k`` leave a window right, smaller ones put a wrong draft after the right ones.
    """
    drafts, place = np.array(tokens), 0  # the index of the seed among the emitted tokens
    for number in accepted:
        wrong = place + number + 1
        if number < k and wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % 500
        place = wrong
    return script(drafts.tolist(), len(prompt))


def sampling(stop: int = NEVER) -> SamplingConfig:
    return SamplingConfig(stop_token_ids=(stop,))


def stream(
    prompt: np.ndarray,
    k: int,
    *,
    drafts: jax.Array | None = None,
    stop: int = NEVER,
    **options: Any,
) -> Iterator[Window]:
    """A request with ``k`` scripted drafts per window, or plain for 0."""
    config, params = model()
    params = options.pop("params", params)
    if drafts is not None:
        params = params | {"script": drafts}
    options = {
        "config": config,
        "max_new_tokens": BUDGET,
        "sampling": sampling(stop),
        "cache_dtype": jnp.float32,
    } | options
    if k == 0:
        return hipjax.plain_stream(params, None, prompt, **options)
    speculation = SpeculationConfig(mtp_k=k)
    return hipjax.speculative_stream(params, None, prompt, speculation=speculation, **options)


def collected(windows: Iterator[Window]) -> tuple[list[Window], Result]:
    """All windows of a stream, and what the doors that wait for the end make of them."""
    seen = list(windows)
    return seen, doors._collected(iter(seen))


@functools.cache
def plain(name: str) -> Result:
    """Plain decoding of one of the prompts; call it from a test that uses ``quick``."""
    _, result = collected(stream(PROMPTS[name], 0))
    assert NEVER not in result.tokens
    assert (len(result.tokens), result.finish_reason) == (BUDGET, "length")
    return result


def unpacked(report: Any) -> StepOut:
    return StepOut.unpacked(np.asarray(report))


def copied(state: DecodeState) -> DecodeState:
    """A state to hand to a program that takes its argument's memory over."""
    return jax.tree.map(jnp.copy, state)
