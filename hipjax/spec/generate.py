"""The host loop of one request: checks, prefill, windows, statistics.

Source: decoding-spec sections 2 and 7.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from hipjax import checks
from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.state import DecodeState
from hipjax.spec.config import SamplingConfig, SpeculationConfig
from hipjax.spec.stats import Stats
from hipjax.spec.step import StepOut, prefill_chunk, step
from hipjax.typing import Array, Params

FinishReason = Literal["stop", "length"]
PROMPT_CHUNK = 64
_SMALLEST_CAPACITY = 256

_prefill = jax.jit(prefill_chunk, static_argnames="config", donate_argnames="state")


@functools.partial(jax.jit, static_argnames=("config", "drafts"), donate_argnames="state")
def _window(
    params: Params,
    state: DecodeState,
    seed: Array,
    budget: Array,
    stops: Array,
    *,
    config: ModelConfig,
    drafts: int,
) -> tuple[DecodeState, Array, Array, Array]:
    """One step; returns the state, the next seed and budget, and the packed report."""
    state, out = step(params, state, seed, budget, stops, config=config, drafts=drafts)
    last = jnp.take_along_axis(out.tokens, jnp.maximum(out.emitted - 1, 0)[:, None], axis=1)
    return state, last[:, 0], budget - out.emitted, out.packed()


@dataclasses.dataclass(frozen=True)
class Window:
    """What one step of a request emitted.

    Attributes:
      tokens: int32 array of the emitted ids, at least one.
      drafted: drafts that were verified; 0 for the first token and for plain steps.
      accepted: drafts that were kept.
      finish_reason: why the request ends with this window; None while it goes on.
      stats: the request's counts so far, this window included.
    """

    tokens: np.ndarray
    drafted: int
    accepted: int
    finish_reason: FinishReason | None
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished request.

    Attributes:
      tokens: int32 array of all emitted ids; a stop id that ended the request is the last.
      finish_reason: "stop" for a stop id, "length" for the budget or the context's end.
      stats: counts and times.
    """

    tokens: np.ndarray
    finish_reason: FinishReason
    stats: Stats


def generate(
    params: Params,
    key: Array | None,
    prompt: Any,
    *,
    config: ModelConfig,
    sampling: SamplingConfig | None = None,
    max_new_tokens: int = 128,
    cache_dtype: DTypeLike = jnp.bfloat16,
    recurrent: str = "float32",
    implementation: ops.Implementation = "auto",
) -> Result:
    """Plain decoding of one request: one token per step.

    Arguments, errors and result are those of :func:`speculative_generate`.

    Example:
      >>> import hipjax
      >>> model = hipjax.load_nano()
      >>> ids = model.tokenizer.encode("import ").ids
      >>> result = hipjax.generate(
      ...     model.params, None, ids, config=model.config, max_new_tokens=4)
      >>> len(result.tokens), result.finish_reason
      (4, 'length')
    """
    request = _Request.checked(
        params,
        key,
        prompt,
        config,
        sampling,
        0,
        max_new_tokens,
        cache_dtype,
        recurrent,
        implementation,
    )
    return _collected(request.windows())


def speculative_generate(
    params: Params,
    key: Array | None,
    prompt: Any,
    *,
    config: ModelConfig,
    sampling: SamplingConfig | None = None,
    speculation: SpeculationConfig | None = None,
    max_new_tokens: int = 128,
    cache_dtype: DTypeLike = jnp.bfloat16,
    recurrent: str = "float32",
    implementation: ops.Implementation = "auto",
) -> Result:
    """Decodes one request with the model's own head as drafter; the ids are plain decoding's.

    Args:
      params: the whole parameter tree, as :func:`hipjax.load` returns it.
      key: a ``jax.random.key``, or None; greedy choice draws nothing.
      prompt: token ids, one-dimensional, at least one.
      config: the model's configuration.
      sampling: stop ids; None is ``SamplingConfig()``.
      speculation: drafts per window; None is ``SpeculationConfig()``.
      max_new_tokens: budget, at least 1; the end of the model's context ends a request too.
      cache_dtype: dtype of cached keys and values, bfloat16 or float32.
      recurrent: storage of the recurrent states: "float32"; "q8", eight bits, rounded with a
        noise that a token's position fixes; or "q8_nearest". The ids depend on it, but not
        on speculation.
      implementation: of the decode path: "kernel", "reference" (plain JAX), or "auto", which
        is kernels where they run and else plain JAX with one warning.

    Returns:
      The emitted ids, why they end, and statistics.

    Raises:
      TypeError, ValueError: an argument is not as stated; nothing has been computed then.

    Source: decoding-spec sections 2, 6.1 and 7.

    Example:
      >>> import hipjax
      >>> model = hipjax.load_nano()
      >>> ids = model.tokenizer.encode("import ").ids
      >>> result = hipjax.speculative_generate(
      ...     model.params, None, ids, config=model.config, max_new_tokens=4)
      >>> len(result.tokens), result.finish_reason
      (4, 'length')
    """
    return _collected(
        speculative_stream(
            params,
            key,
            prompt,
            config=config,
            sampling=sampling,
            speculation=speculation,
            max_new_tokens=max_new_tokens,
            cache_dtype=cache_dtype,
            recurrent=recurrent,
            implementation=implementation,
        )
    )


def speculative_stream(
    params: Params,
    key: Array | None,
    prompt: Any,
    *,
    config: ModelConfig,
    sampling: SamplingConfig | None = None,
    speculation: SpeculationConfig | None = None,
    max_new_tokens: int = 128,
    cache_dtype: DTypeLike = jnp.bfloat16,
    recurrent: str = "float32",
    implementation: ops.Implementation = "auto",
) -> Iterator[Window]:
    """The same, yielding each window as it ends; the first one holds the first token.

    Arguments are checked when this is called, not when the first window is asked for. All
    memory of the request belongs to the iterator: dropping it leaves nothing behind.
    """
    if not config.has_head:
        raise ValueError(
            "config has no MTP head (mtp_num_hidden_layers is 0), so it cannot draft; "
            "use hipjax.generate"
        )
    drafts = checks.instance("speculation", speculation, SpeculationConfig).mtp_k
    request = _Request.checked(
        params,
        key,
        prompt,
        config,
        sampling,
        drafts,
        max_new_tokens,
        cache_dtype,
        recurrent,
        implementation,
    )
    return request.windows()


def plain_stream(
    params: Params,
    key: Array | None,
    prompt: Any,
    *,
    config: ModelConfig,
    sampling: SamplingConfig | None = None,
    max_new_tokens: int = 128,
    cache_dtype: DTypeLike = jnp.bfloat16,
    recurrent: str = "float32",
    implementation: ops.Implementation = "auto",
) -> Iterator[Window]:
    """Plain decoding as a stream, with the arguments of :func:`generate`."""
    request = _Request.checked(
        params,
        key,
        prompt,
        config,
        sampling,
        0,
        max_new_tokens,
        cache_dtype,
        recurrent,
        implementation,
    )
    return request.windows()


def _collected(windows: Iterator[Window]) -> Result:
    tokens = []
    for window in windows:
        tokens.append(window.tokens)
    assert window.finish_reason is not None
    return Result(np.concatenate(tokens), window.finish_reason, window.stats)


@dataclasses.dataclass(frozen=True)
class _Request:
    """A checked request, ready to run."""

    params: Params
    prompt: np.ndarray
    config: ModelConfig
    stops: np.ndarray
    drafts: int
    budget: int
    cache_dtype: DTypeLike
    recurrent: str
    implementation: ops.Implementation

    @classmethod
    def checked(
        cls,
        params: Params,
        key: Array | None,
        prompt: Any,
        config: ModelConfig,
        sampling: SamplingConfig | None,
        drafts: int,
        max_new_tokens: int,
        cache_dtype: DTypeLike,
        recurrent: str,
        implementation: ops.Implementation,
    ) -> "_Request":
        checks.random_key(key)
        ids = checks.prompt(prompt, config.vocab_size, config.max_position_embeddings)
        sampling = checks.instance("sampling", sampling, SamplingConfig)
        stops = np.zeros(0, np.int32)
        if not sampling.ignore_eos:
            stops = checks.stop_ids(sampling.stop_token_ids, config.vocab_size, config.eos_token_id)
        budget = checks.integer("max_new_tokens", max_new_tokens, 1)
        room = config.max_position_embeddings - ids.size
        dtype = checks.cache_dtype(cache_dtype)
        storage = checks.recurrent(recurrent)
        wish = ops.checked_implementation(implementation)
        return cls(params, ids, config, stops, drafts, min(budget, room), dtype, storage, wish)

    def windows(self) -> Iterator[Window]:
        """Runs the request."""
        began = time.perf_counter()
        state = DecodeState.init(
            self.config,
            _capacity(self.prompt.size + self.budget, self.config.max_position_embeddings),
            cache_dtype=self.cache_dtype,
            recurrent=self.recurrent,
            head=self.drafts > 0,
        )
        self._compile_prefill(state)
        compiling = self._compiling(state) if self.budget > 1 else None
        state, seed, lost = self._prefill(state)
        token = np.array(seed)
        stats = Stats(
            emitted=1, nonfinite_rows=int(lost[0]), prefill_seconds=time.perf_counter() - began
        )
        reason = _reason(bool(np.isin(token, self.stops).any()), self.budget - 1)
        yield Window(token, 0, 0, reason, stats)
        if compiling is not None and reason is None:
            compiling.result()
        stops = jnp.asarray(self.stops)
        budget = jnp.array([self.budget - 1], jnp.int32)
        while reason is None:
            began = time.perf_counter()
            # Not around the loop: between two windows the setting must not reach the caller.
            with ops.implementation(self.implementation):
                state, seed, budget, report = _window(
                    self.params, state, seed, budget, stops, config=self.config, drafts=self.drafts
                )
            out = StepOut.unpacked(np.asarray(report))
            emitted, drafted, accepted = (
                int(x[0]) for x in (out.emitted, out.drafted, out.accepted)
            )
            stats = stats.after_window(
                drafted=drafted,
                accepted=accepted,
                emitted=emitted,
                head=self.drafts > 0,
                seconds=time.perf_counter() - began,
                lost=int(out.nonfinite[0]),
            )
            reason = _reason(bool(out.stopped[0]), self.budget - stats.emitted)
            yield Window(np.array(out.tokens[0, :emitted]), drafted, accepted, reason, stats)

    def _prefill(self, state: DecodeState) -> tuple[DecodeState, Array, Array]:
        """Consumes the prompt chunk by chunk; returns what the last chunk did."""
        ids = self.prompt
        for begin in range(0, ids.size, PROMPT_CHUNK):
            piece = ids[begin : begin + PROMPT_CHUNK]
            tokens = np.zeros((1, PROMPT_CHUNK), np.int32)
            tokens[0, : piece.size] = piece
            after = ids[begin + PROMPT_CHUNK] if begin + PROMPT_CHUNK < ids.size else -1
            with ops.implementation(self.implementation):
                state, pick, lost = _prefill(
                    self.params,
                    state,
                    jnp.asarray(tokens),
                    jnp.array([piece.size], jnp.int32),
                    jnp.array([after], jnp.int32),
                    config=self.config,
                )
        return state, pick, lost

    def _compile_prefill(self, state: DecodeState) -> None:
        """Compiles the prompt's program first and alone: the first token waits for it."""
        one = np.zeros(1, np.int32)
        arguments = (self.params, state, np.zeros((1, PROMPT_CHUNK), np.int32), one, one)
        with ops.implementation(self.implementation):
            _prefill.lower(*_shapes(arguments), config=self.config).compile()

    def _compiling(self, state: DecodeState) -> Future[Any]:
        """Compiles the window in a thread, while the prompt is consumed and handed out."""
        arguments = (self.params, state, np.zeros(1, np.int32), np.zeros(1, np.int32), self.stops)
        shapes, config, drafts = _shapes(arguments), self.config, self.drafts
        wish = self.implementation
        executor = ThreadPoolExecutor(1, "hipjax-compile")

        # The thread holds shapes only: a dropped request frees its memory at once. It has
        # jax's settings of its own.
        def compile_window() -> None:
            with ops.implementation(wish):
                _window.lower(*shapes, config=config, drafts=drafts).compile()

        future = executor.submit(compile_window)
        executor.shutdown(wait=False)
        return future


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _capacity(tokens: int, context: int) -> int:
    """Cache rows for so many tokens: few distinct sizes, so that few programs are compiled."""
    size = _SMALLEST_CAPACITY
    while size < tokens:
        size *= 2
    return min(size, context)


def _reason(stopped: bool, left: int) -> FinishReason | None:
    if stopped:
        return "stop"
    return None if left > 0 else "length"
