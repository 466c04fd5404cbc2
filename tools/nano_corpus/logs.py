"""Writes log files of several formats from seeded random events.

Module, function and package names come from the corpus, so that the logs look like those of a
real system without being copied from one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from .documents import Document

LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "INFO", "WARNING", "ERROR")
VERBS = ("started", "finished", "skipped", "retried", "queued", "cancelled", "refreshed", "loaded")
ERRORS = (
    "ValueError",
    "KeyError",
    "TimeoutError",
    "ConnectionResetError",
    "PermissionError",
    "FileNotFoundError",
    "TypeError",
    "RuntimeError",
)


class Clock:
    """A time that advances by random steps."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = datetime(2021, 1, 1) + timedelta(seconds=rng.randrange(150_000_000))

    def tick(self) -> datetime:
        """Advance and return the time."""
        self.now += timedelta(milliseconds=int(self.rng.expovariate(1 / 900)) + 1)
        return self.now


class Names:
    """Names taken from the corpus, of which each log file uses only a handful."""

    def __init__(self, rng: random.Random, documents: list[Document]) -> None:
        picked = rng.sample(documents, min(len(documents), 12))
        self.paths = [re.sub(r"^.*python3\.11/", "", d.path) for d in picked]
        self.modules = [p.removesuffix(".py").replace("/", ".").lstrip(".") for p in self.paths]
        self.packages = sorted({d.source for d in picked})
        found = [name for d in picked for name in re.findall(r"def (\w+)", d.text)[:40]]
        self.functions = found or ["main"]
        self.lines = [
            line.strip()
            for d in picked
            for line in d.text.split("\n")[20:200]
            if 12 < len(line.strip()) < 90 and "(" in line
        ] or ["main()"]


def _message(rng: random.Random, names: Names) -> str:
    function = rng.choice(names.functions)
    number = rng.randrange(1, 5000)
    return rng.choice(
        (
            f"{function} {rng.choice(VERBS)} in {rng.uniform(0.1, 900):.1f} ms",
            f"{rng.choice(names.packages)}: {number} items {rng.choice(VERBS)}",
            f"cache {rng.choice(('hit', 'miss'))} for key {function}:{number}",
            f"worker {rng.randrange(16)} {rng.choice(VERBS)} task {function}[{number}]",
            f"retrying {function} after {rng.choice(ERRORS)} (attempt {rng.randrange(1, 6)}/5)",
            f"connection from 10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)} "
            f"{rng.choice(('opened', 'closed', 'reset'))}",
            f"wrote {number} rows to {rng.choice(names.functions)} ({rng.randrange(1, 400)} KiB)",
        )
    )


def _traceback(rng: random.Random, names: Names) -> str:
    rows = ["Traceback (most recent call last):"]
    for _ in range(rng.randint(1, 4)):
        rows.append(
            f'  File "/srv/app/{rng.choice(names.paths)}", line {rng.randrange(10, 900)}, '
            f"in {rng.choice(names.functions)}"
        )
        rows.append(f"    {rng.choice(names.lines)}")
    rows.append(f"{rng.choice(ERRORS)}: {rng.choice(names.functions)} failed")
    return "\n".join(rows)


def _python_log(rng: random.Random, names: Names, clock: Clock) -> str:
    level = rng.choice(LEVELS)
    stamp = clock.tick().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
    line = f"{stamp} {level:<7} {rng.choice(names.modules)}: {_message(rng, names)}"
    return line + "\n" + _traceback(rng, names) if level == "ERROR" else line


def _json_log(rng: random.Random, names: Names, clock: Clock) -> str:
    event = {
        "ts": clock.tick().isoformat(timespec="milliseconds") + "Z",
        "level": rng.choice(LEVELS).lower(),
        "logger": rng.choice(names.modules),
        "msg": _message(rng, names),
        "duration_ms": round(rng.uniform(0.2, 800), 1),
    }
    if rng.random() < 0.4:
        event["request_id"] = f"{rng.getrandbits(32):08x}"
    return json.dumps(event)


def _access_log(rng: random.Random, names: Names, clock: Clock) -> str:
    stamp = clock.tick().strftime("%d/%b/%Y:%H:%M:%S +0000")
    status = rng.choice((200, 200, 200, 200, 201, 204, 301, 304, 404, 500))
    method = rng.choice(("GET", "GET", "GET", "POST", "PUT", "DELETE"))
    agent = rng.choice(("curl/8.5.0", "Mozilla/5.0 (X11; Linux x86_64)", "python-requests/2.31"))
    return (
        f'192.168.{rng.randrange(8)}.{rng.randrange(1, 255)} - - [{stamp}] "{method} '
        f'/{rng.choice(names.packages)}/{rng.choice(names.functions)} HTTP/1.1" {status} '
        f'{rng.randrange(90, 60000)} "-" "{agent}"'
    )


def _syslog(rng: random.Random, names: Names, clock: Clock) -> str:
    stamp = clock.tick().strftime("%b %d %H:%M:%S")
    return (
        f"{stamp} host{rng.randrange(1, 4)} {rng.choice(names.packages)}"
        f"[{rng.randrange(300, 32000)}]: {_message(rng, names)}"
    )


def _klog(rng: random.Random, names: Names, clock: Clock) -> str:
    stamp = clock.tick().strftime("%m%d %H:%M:%S.%f")
    return (
        f"{rng.choice('IIIWE')}{stamp} {rng.randrange(1, 9):>7} "
        f"{rng.choice(names.paths).rsplit('/', 1)[-1]}:{rng.randrange(20, 900)}] "
        f'"{rng.choice(names.functions)} {rng.choice(VERBS)}" '
        f'pod="default/{rng.choice(names.packages)}-{rng.randrange(9)}"'
    )


def _pytest_log(rng: random.Random, names: Names, clock: Clock) -> str:
    stem = rng.choice(names.paths).rsplit("/", 1)[-1].removesuffix(".py")
    outcome = rng.choice(("PASSED", "PASSED", "PASSED", "PASSED", "SKIPPED", "FAILED"))
    return (
        f"tests/test_{stem}.py::test_{rng.choice(names.functions)} {outcome} "
        f"[{rng.randrange(101):>3}%]"
    )


def _key_value(rng: random.Random, names: Names, clock: Clock) -> str:
    stamp = clock.tick().isoformat(timespec="seconds")
    return (
        f"time={stamp} level={rng.choice(LEVELS).lower()} caller="
        f'{rng.choice(names.paths)}:{rng.randrange(10, 900)} msg="{_message(rng, names)}" '
        f"user={rng.choice(('alice', 'bob', 'carol', 'dave', 'ci'))}"
    )


def _git_log(rng: random.Random, names: Names, clock: Clock) -> str:
    stamp = clock.tick().strftime("%a %b %d %H:%M:%S %Y +0000")
    action = rng.choice(("Fix", "Add", "Remove", "Refactor", "Document", "Speed up", "Test"))
    return (
        f"commit {rng.getrandbits(160):040x}\nDate:   {stamp}\n\n"
        f"    {action} {rng.choice(names.functions)} in {rng.choice(names.modules)}\n\n"
        f" {rng.choice(names.paths)} | {rng.randrange(1, 90)} +++--\n"
    )


def _training_log(rng: random.Random, names: Names, clock: Clock) -> str:
    step = int(clock.tick().timestamp()) % 100_000
    return (
        f"step {step:>6} | loss {rng.uniform(1, 6):.4f} | lr {rng.uniform(1e-5, 1e-3):.2e} | "
        f"{rng.randrange(900, 90000)} tok/s | {rng.choice(names.packages)}"
    )


FORMATS: tuple[Callable[[random.Random, Names, Clock], str], ...] = (
    _python_log,
    _python_log,
    _json_log,
    _access_log,
    _syslog,
    _klog,
    _pytest_log,
    _key_value,
    _git_log,
    _training_log,
)


def logs(documents: list[Document], seed: int, budget: int) -> Iterator[str]:
    """Yield log files over names of the given code documents, ``budget`` characters in all."""
    rng = random.Random(seed)
    code = [d for d in documents if d.genre == "code"]
    total = 0
    while total < budget:
        names = Names(rng, code)
        clock = Clock(rng)
        write = rng.choice(FORMATS)
        text = "".join(write(rng, names, clock) + "\n" for _ in range(rng.randint(15, 90)))
        total += len(text)
        yield text
