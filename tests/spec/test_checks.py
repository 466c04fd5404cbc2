"""What the public doors refuse: at the call, in words, before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import hipjax
from hipjax import SamplingConfig, SpeculationConfig
from hipjax.ffi import ops
from hipjax.ffi.registration import Verdict
from hipjax.model import score
from hipjax.model.state import DecodeState
from hipjax.spec import generate as doors
from tests.model import support

Door = Callable[..., Any]

DOORS: dict[str, Door] = {
    "generate": hipjax.generate,
    "speculative_generate": hipjax.speculative_generate,
    "plain_stream": hipjax.plain_stream,
    "speculative_stream": hipjax.speculative_stream,
}
EVERY_DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
SPECULATIVE = {name: door for name, door in DOORS.items() if name.startswith("speculative")}


class ComputedError(Exception):
    """Raised where a call would begin to compute."""


def computed(*_: Any, **__: Any) -> Any:
    raise ComputedError


@pytest.fixture(autouse=True)
def as_a_user_sees_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No state is made, no program runs; and annotations are unchecked, as outside of tests.

    With annotations checked, some of the values below would never reach the checks.
    """

    for program in ("_prefill", "_window"):  # which may be lowered, but not run
        monkeypatch.setattr(doors, program, mock.Mock(side_effect=ComputedError))
    monkeypatch.setattr(score, "trunk_prompt", computed)
    monkeypatch.setattr(score, "trunk_rows", computed)
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def call(door: Door, prompt: Any = (1, 2, 3), key: Any = None, **options: Any) -> Any:
    config, params = support.model("tiny")
    return door(params, key, prompt, **{"config": config} | options)


def refused(kind: type[Exception], said: tuple[str, ...], run: Callable[[], Any]) -> None:
    """The call itself raises, also where it would return an iterator; the message has ``said``."""
    with pytest.raises(kind) as caught:
        run()
    for part in said:
        assert part in str(caught.value), str(caught.value)


CONTEXT = 512
# Value, kind of error, and what the message says: the argument, what was given, what is allowed.
PROMPTS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "empty": ([], ValueError, ("prompt", "empty", "at least one")),
    "empty array": (np.zeros(0, np.int32), ValueError, ("prompt", "empty")),
    "negative": ([1, -1, 2], ValueError, ("prompt[1]", "-1", "0 to 511")),
    "vocabulary size": ([1, 2, 512], ValueError, ("prompt[2]", "512", "0 to 511")),
    "huge": (np.array([2**40]), ValueError, ("prompt[0]", str(2**40), "0 to 511")),
    "floats": ([1.0, 2.0], TypeError, ("prompt", "float64", "integers")),
    "booleans": ([True, False], TypeError, ("prompt", "bool", "integers")),
    "string": ("def f():", TypeError, ("prompt", "string", "token ids")),
    "bytes": (b"def f():", TypeError, ("prompt", "integers")),
    "strings": (["def", "f"], TypeError, ("prompt", "integers")),
    "none": (None, TypeError, ("prompt", "integers")),
    "two-dimensional": ([[1, 2], [3, 4]], ValueError, ("prompt", "(2, 2)", "one-dimensional")),
    "number": (7, ValueError, ("prompt", "()", "one-dimensional")),
    "ragged": ([[1], [2, 3]], (TypeError, ValueError), ("prompt",)),
    "context": ([1] * CONTEXT, ValueError, ("prompt", "512", "at most 511")),
    "longer than the context": ([1] * 600, ValueError, ("prompt", "600", "at most 511")),
}


@EVERY_DOOR
@pytest.mark.parametrize(("value", "kind", "said"), PROMPTS.values(), ids=PROMPTS)
def test_prompt(door: Door, value: Any, kind: type[Exception], said: tuple[str, ...]) -> None:
    refused(kind, said, lambda: call(door, value))


@EVERY_DOOR
@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (0, ValueError, ("max_new_tokens", "0", "at least 1")),
        (-5, ValueError, ("max_new_tokens", "-5", "at least 1")),
        (True, TypeError, ("max_new_tokens", "True", "integer")),
        (1.5, TypeError, ("max_new_tokens", "1.5", "integer")),
        ("8", TypeError, ("max_new_tokens", "'8'", "integer")),
        (None, TypeError, ("max_new_tokens", "None", "integer")),
    ],
)
def test_budget(door: Door, value: Any, kind: type[Exception], said: tuple[str, ...]) -> None:
    refused(kind, said, lambda: call(door, max_new_tokens=value))


@EVERY_DOOR
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: jax.random.PRNGKey(0), ("key", "jax.random.key")),
        (lambda: jax.random.split(jax.random.key(0), 2), ("key", "(2,)", "single")),
        (lambda: np.zeros(2, np.uint32), ("key", "jax.random.key")),
        (lambda: 7, ("key", "7", "jax.random.key")),
        (lambda: "seed", ("key", "'seed'", "jax.random.key")),
    ],
    ids=["raw", "batch", "numpy", "number", "string"],
)
def test_key(door: Door, make: Callable[[], Any], said: tuple[str, ...]) -> None:
    refused(TypeError, said, lambda: call(door, key=make()))


@EVERY_DOOR
@pytest.mark.parametrize("value", [jnp.float16, jnp.int8, None, "half"], ids=str)
def test_cache_dtype(door: Door, value: Any) -> None:
    said = ("cache_dtype", "bfloat16", "float32")
    refused((TypeError, ValueError), said, lambda: call(door, cache_dtype=value))


@EVERY_DOOR
@pytest.mark.parametrize("value", ["q4", "Q8", ""])
def test_recurrent(door: Door, value: str) -> None:
    said = ("recurrent", repr(value), "float32, q8, q8_nearest")
    refused(ValueError, said, lambda: call(door, recurrent=value))


@EVERY_DOOR
@pytest.mark.parametrize("value", ["gpu", "Kernel", ""])
def test_implementation(door: Door, value: str) -> None:
    said = ("implementation", repr(value), "auto, kernel, reference")
    refused(ValueError, said, lambda: call(door, implementation=value))


@EVERY_DOOR
def test_kernels_that_cannot_run(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where kernels are asked for by name; where they are not, it gets on without."""
    monkeypatch.setattr(ops, "verdict", lambda _: Verdict(False, "the moon is full"))
    said = ("implementation", "'kernel'", "the moon is full")
    refused(ValueError, said, lambda: call(door, implementation="kernel"))
    for allowed in ("auto", "reference"):
        with pytest.raises(ComputedError):
            next(call(door, implementation=allowed))


@EVERY_DOOR
@pytest.mark.parametrize("stops", [(512,), (3, 4000)])
def test_stop_ids_outside_the_vocabulary(door: Door, stops: tuple[int, ...]) -> None:
    said = ("stop_token_ids", str(stops[-1]), "0 to 511")
    sampling = SamplingConfig(stop_token_ids=stops)
    refused(ValueError, said, lambda: call(door, sampling=sampling))


@pytest.mark.parametrize("door", SPECULATIVE.values(), ids=SPECULATIVE)
def test_model_without_a_head(door: Door) -> None:
    config, _ = support.model("tiny")
    bare = dataclasses.replace(config, mtp_num_hidden_layers=0, mtp_rope_theta=None)
    refused(ValueError, ("no MTP head", "hipjax.generate"), lambda: call(door, config=bare))


@pytest.mark.parametrize(
    ("value", "kind"),
    [(value, ValueError) for value in (0, 11, -1)]
    + [(value, TypeError) for value in (True, 3.0, "3", None)],
)
def test_mtp_k(value: Any, kind: type[Exception]) -> None:
    allowed = "1 to 10" if kind is ValueError else "integer"
    refused(kind, ("mtp_k", repr(value), allowed), lambda: SpeculationConfig(mtp_k=value))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"stop_token_ids": (5,), "ignore_eos": True}, ValueError, ("ignore_eos", "stop_token_id")),
        ({"stop_token_ids": (-1,)}, ValueError, ("stop_token_ids", "-1", "at least 0")),
        ({"stop_token_ids": (1.5,)}, TypeError, ("stop_token_ids", "1.5", "integer")),
        ({"stop_token_ids": (True,)}, TypeError, ("stop_token_ids", "True", "integer")),
        ({"stop_token_ids": "ab"}, TypeError, ("stop_token_ids", "integer")),
        ({"stop_token_ids": 5}, TypeError, ("stop_token_ids", "5")),
        ({"ignore_eos": "no"}, TypeError, ("ignore_eos", "'no'")),
    ],
    ids=str,
)
def test_sampling(given: dict[str, Any], kind: type[Exception], said: tuple[str, ...]) -> None:
    refused(kind, said, lambda: SamplingConfig(**given))


@pytest.mark.parametrize("config", [SamplingConfig, SpeculationConfig])
def test_settings_are_frozen_hashable_and_named(config: type) -> None:
    assert hash(config()) == hash(config()) and config() == config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), dataclasses.fields(config)[0].name, 1)
    with pytest.raises(TypeError):
        config(temprature=1)  # an unknown name is not ignored
    with pytest.raises(TypeError):
        config(3)


LOGITS: dict[str, tuple[Any, dict[str, Any], Any, tuple[str, ...]]] = {
    "empty": ([], {}, (TypeError, ValueError), ("tokens",)),
    "empty batch": (np.zeros((2, 0), np.int32), {}, ValueError, ("tokens", "(2, 0)", "not empty")),
    "negative": ([3, -1], {}, ValueError, ("tokens", "-1", "0 to 511")),
    "vocabulary size": ([3, 512], {}, ValueError, ("tokens", "512", "0 to 511")),
    "past 32 bits": (np.array([2**32]), {}, ValueError, ("tokens", "0 to 511")),
    "floats": ([1.0], {}, TypeError, ("tokens", "float", "integers")),
    "booleans": ([True], {}, TypeError, ("tokens", "bool", "integers")),
    "string": ("abc", {}, TypeError, ("tokens",)),
    "number": (5, {}, ValueError, ("tokens", "()", "[T] or [B, T]")),
    "three axes": ([[[1]]], {}, ValueError, ("tokens", "(1, 1, 1)", "[T] or [B, T]")),
    "longer than the context": ([1] * 513, {}, ValueError, ("tokens", "513", "512")),
    "chunk 0": ([1, 2], {"chunk": 0}, ValueError, ("chunk", "0", "at least 1")),
    "chunk 1.5": ([1, 2], {"chunk": 1.5}, TypeError, ("chunk", "1.5")),
    "lengths of another batch": ([1, 2], {"lengths": [1, 2]}, ValueError, ("lengths", "(2,)")),
    "lengths of floats": (
        [1, 2],
        {"lengths": [1.0]},
        (TypeError, ValueError),
        ("lengths", "float"),
    ),
    "length past the end": ([1, 2], {"lengths": [3]}, ValueError, ("lengths", "3")),
    "negative length": ([1, 2], {"lengths": [-1]}, ValueError, ("lengths", "-1")),
    "cache_dtype": ([1, 2], {"cache_dtype": jnp.float16}, ValueError, ("cache_dtype", "float32")),
    "recurrent": ([1, 2], {"recurrent": "q4"}, ValueError, ("recurrent", "q8_nearest")),
    "implementation": ([1, 2], {"implementation": "xla"}, ValueError, ("implementation", "auto")),
}


@pytest.mark.parametrize(("tokens", "options", "kind", "said"), LOGITS.values(), ids=LOGITS)
def test_logits(tokens: Any, options: dict[str, Any], kind: Any, said: tuple[str, ...]) -> None:
    config, params = support.model("tiny")
    refused(kind, said, lambda: hipjax.logits(params, tokens, config=config, **options))


@pytest.mark.parametrize(
    "tokens",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), jnp.array([1, 2, 3]), [[1, 2], [3, 4]]],
    ids=["list", "tuple", "NumPy array", "device array", "list of lists"],
)
@pytest.mark.parametrize("options", [{}, {"rows": True}, {"chunk": 2}], ids=str)
def test_allowed_logits(tokens: Any, options: dict[str, Any]) -> None:
    """Negative control: these get as far as the model, without a warning."""
    config, params = support.model("tiny")
    with pytest.raises(ComputedError):
        hipjax.logits(params, tokens, config=config, **options)


ALLOWED: dict[str, dict[str, Any]] = {
    "list": {"prompt": [1, 2]},
    "int64 array": {"prompt": np.array([0, 511])},
    "device array": {"prompt": jnp.array([3])},
    "range": {"prompt": range(4)},
    "one below the context": {"prompt": [1] * (CONTEXT - 1)},
    "key": {"key": jax.random.key(0)},
    "NumPy integer": {"max_new_tokens": np.int64(3)},
    "stop ids": {"sampling": SamplingConfig(stop_token_ids=(0, 511))},
    "float32": {"cache_dtype": jnp.float32},
    "dtype object": {"cache_dtype": np.dtype("float32")},
    "dtype by name": {"cache_dtype": "float32"},
    "kernels": {"implementation": "kernel"},
    "plain JAX": {"implementation": "reference"},
    "eight bits": {"recurrent": "q8"},
    "eight bits to nearest": {"recurrent": "q8_nearest"},
}


@EVERY_DOOR
@pytest.mark.parametrize("given", ALLOWED.values(), ids=ALLOWED)
def test_allowed(door: Door, given: dict[str, Any]) -> None:
    """Negative control: what is allowed gets as far as the first program, and no error is ours."""
    with pytest.raises(ComputedError):
        result = call(door, **given)
        next(result)


def test_nothing_is_allocated_before_the_first_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that nobody reads costs nothing; a refused call has not made a state either."""
    monkeypatch.setattr(DecodeState, "init", computed)
    for door in DOORS.values():
        refused(ValueError, ("prompt",), lambda door=door: call(door, []))
    for door in (hipjax.plain_stream, hipjax.speculative_stream):
        stream = call(door)
        with pytest.raises(ComputedError):
            next(stream)
