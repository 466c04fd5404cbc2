"""How results are shown: to a person, or to a program."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hipjax.spec.generate import Window

# Control characters other than tab and newline could reprogram the terminal.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {
    code: 0xFFFD for code in range(0x7F, 0xA0)
}
_REASONS = {"stop": "end of text", "length": "budget or context used up", None: "unfinished"}


class JsonLines:
    """One object per line: a "window" for each window, then the "result"."""

    def prompt(self, text: str) -> None:
        """Shows nothing: a program knows its prompt."""

    def window(self, window: Window, text: str) -> None:
        """Shows what a window emitted, and the text that has become certain with it."""
        self._line(
            event="window",
            text=text,
            tokens=window.tokens.tolist(),
            drafted=window.drafted,
            accepted=window.accepted,
        )

    def result(
        self, text: str, tokens: list[int], last: Window, rates: Mapping[str, Any] | None
    ) -> None:
        """Shows the whole of it; ``rates`` are those of a comparison, if one was made."""
        self._line(
            event="result",
            text=text,
            tokens=tokens,
            finish_reason=last.finish_reason,
            stats=last.stats.to_dict(),
            **({} if rates is None else {"compare": rates}),
        )

    def _line(self, **values: Any) -> None:
        print(json.dumps(values), flush=True)


class Terminal:
    """The text as it grows, then a table; colours and the prompt on a terminal only."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()

    def prompt(self, text: str) -> None:
        """Shows the prompt, which the text continues."""
        if not self._live:
            return
        plain = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
        self._write(text, *(() if plain else ("\x1b[2m", "\x1b[22m")))

    def window(self, window: Window, text: str) -> None:
        """Shows text that has become certain."""
        self._write(text)

    def result(
        self, text: str, tokens: list[int], last: Window, rates: Mapping[str, Any] | None
    ) -> None:
        """Shows the statistics, ``rates`` of a comparison among them if one was made."""
        caption = "tok/s: tokens after the first, over the time of their windows; not compiling"
        self._write("\n\n")
        show_table("Statistics", _statistics(last, rates), caption)

    def _write(self, text: str, before: str = "", after: str = "") -> None:
        if self._live:
            text = text.translate(_CONTROLS)
        encoding = sys.stdout.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        sys.stdout.write(before + text + after)
        sys.stdout.flush()


def _statistics(last: Window, rates: Mapping[str, Any] | None) -> dict[str, str]:
    stats = last.stats
    rows = {
        "tokens": str(stats.emitted),
        "finish reason": f"{last.finish_reason} ({_REASONS[last.finish_reason]})",
        "windows": str(stats.windows),
    }
    by_depth = zip(stats.accepted_by_depth, stats.drafted_by_depth, strict=True)
    for depth, (accepted, drafted) in enumerate(by_depth, 1):
        share = f" ({accepted / drafted:.0%})" if drafted else ""
        rows[f"accepted at depth {depth}"] = f"{accepted} of {drafted}{share}"
    if stats.windows:
        rows["tokens per window"] = f"{stats.tokens_per_window:.2f}"
    rows["prefill"] = f"{stats.prefill_seconds:.2f} s, compiling included"
    if rates is None:
        rows["tok/s"] = _rate(stats.tokens_per_second)
    else:
        speedup = f", {rates['speedup']:.2f} × plain decoding" if rates["speedup"] else ""
        rows["tok/s, run again"] = _rate(rates["speculative_tokens_per_second"]) + speedup
        rows["tok/s, plain decoding"] = _rate(rates["plain_tokens_per_second"]) + ", same tokens"
    return rows


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.1f}" if tokens_per_second else "no window to measure"


def show_table(title: str, rows: Mapping[str, Any], caption: str | None = None) -> None:
    """Prints names and values as a table."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(str(value)))
    console = Console(file=sys.stdout)
    # Captured, because rich ends the program by itself when the reader has gone.
    with console.capture() as capture:
        console.print(table)
        if caption:
            console.print(Text(caption, style="dim"))
    sys.stdout.write(capture.get())
    sys.stdout.flush()
