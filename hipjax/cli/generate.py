"""``hipjax generate``."""

import argparse
import functools
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hipjax
from hipjax.cli.errors import FAILED, CommandError, input_errors
from hipjax.cli.output import JsonLines, Terminal
from hipjax.cli.runtime import devices, use_cache
from hipjax.text import TextStream

_Start = Callable[[], Iterator[hipjax.Window]]


def run(args: argparse.Namespace) -> int:
    """Streams one continuation, then says how it went."""
    if args.compare and args.no_speculation:
        raise CommandError("argument --compare: not allowed with argument --no-speculation")
    with input_errors():
        speculation = hipjax.SpeculationConfig(
            **({} if args.mtp_k is None else {"mtp_k": args.mtp_k})
        )
        cache = use_cache()
        first_start = cache is not None and not any(cache.glob("*"))
        model = _load(args.model, args.dtype)
        if model.tokenizer is None:
            raise ValueError(f"{args.model}: there is no tokenizer.json to read PROMPT with")
        request: dict[str, Any] = {
            "params": model.params,
            "key": None,
            "prompt": _encoded(model, args.prompt),
            "config": model.config,
            "sampling": hipjax.SamplingConfig(ignore_eos=args.ignore_eos),
            "max_new_tokens": args.max_new_tokens,
            "recurrent": args.recurrent,
            "implementation": args.implementation,
        }
        plain: _Start = functools.partial(hipjax.plain_stream, **request)
        start = plain
        if not args.no_speculation:
            start = functools.partial(hipjax.speculative_stream, **request, speculation=speculation)
        windows = start()  # checks the request; computes nothing before the first window
    if first_start and sys.stderr.isatty():
        print(f"Compiling; later starts find it done in {cache}", file=sys.stderr)

    output = JsonLines() if args.json else Terminal()
    output.prompt(args.prompt)
    stream = TextStream(model.tokenizer)
    tokens: list[int] = []
    for window in _ahead(windows):
        new = window.tokens.tolist()
        text = stream.push(new) + (stream.end() if window.finish_reason else "")
        tokens += new
        output.window(window, text)
    rates = _compared(start, plain, tokens) if args.compare else None
    output.result(model.tokenizer.decode(tokens), tokens, window, rates)
    return 0


def _load(folder: str | None, dtype: str) -> hipjax.FlashNext:
    on_cpu = devices()[0].platform == "cpu"
    wanted = "float32" if dtype == "float32" or (dtype == "auto" and on_cpu) else None
    if folder is None:
        return hipjax.load_nano(dtype=wanted)
    return hipjax.load(folder, dtype=wanted)


def _encoded(model: hipjax.FlashNext, prompt: str) -> list[int]:
    assert model.tokenizer is not None
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError("PROMPT is not valid UTF-8") from error
    return model.tokenizer.encode(prompt).ids


def _ahead(windows: Iterator[hipjax.Window]) -> Iterator[hipjax.Window]:
    """The same windows, run by a thread, because Ctrl-C cannot interrupt the compiler.

    It does interrupt a wait for the thread.
    """
    ready: queue.SimpleQueue[hipjax.Window | BaseException | None] = queue.SimpleQueue()
    wanted = True

    def work() -> None:
        try:
            for window in windows:
                ready.put(window)
                if not wanted:
                    return
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    threading.Thread(target=work, name="hipjax-decode", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        wanted = False


def _compared(speculative: _Start, plain: _Start, tokens: list[int]) -> dict[str, Any]:
    """Runs both ways once more, now that neither has to compile.

    Args:
      speculative: begins a request that has been run before.
      plain: begins the same by plain decoding.
      tokens: what the request emitted.

    Raises:
      CommandError: one of the two emitted something else.
    """
    for _ in itertools.islice(_ahead(plain()), 2):
        pass
    rates = []
    for name, start in (("speculation", speculative), ("plain decoding", plain)):
        windows = list(_ahead(start()))
        again = [i for window in windows for i in window.tokens.tolist()]
        if again != tokens:
            pairs = itertools.zip_longest(again, tokens)
            place = next(i for i, (a, b) in enumerate(pairs) if a != b)
            raise CommandError(
                f"a second run by {name} emitted other tokens from index {place} on: this is a "
                "bug of hipjax",
                FAILED,
            )
        rates.append(windows[-1].stats.tokens_per_second)
    return {
        "tokens_equal": True,
        "speculative_tokens_per_second": rates[0],
        "plain_tokens_per_second": rates[1],
        "speedup": rates[0] / rates[1] if rates[1] else None,
    }
