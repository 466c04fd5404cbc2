"""Composes agent transcripts around real snippets of the corpus.

A small model that serves as a stand-in for an agent's model has to know the shape of a chat with
tool calls, and has to copy: a tool shows numbered lines, and the next edit call repeats some of
them.  Every transcript therefore works on one real file and quotes it several times.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .documents import Document

SCHEMAS: dict[str, tuple[str, dict[str, str]]] = {
    "read": (
        "Read a file and return its lines with line numbers.",
        {"path": "string", "start_line": "integer", "end_line": "integer"},
    ),
    "grep": (
        "Search the working tree for a regular expression.",
        {"pattern": "string", "path": "string"},
    ),
    "edit": (
        "Replace one occurrence of a text in a file.",
        {"path": "string", "old_string": "string", "new_string": "string"},
    ),
    "run": ("Run a shell command and return its output.", {"command": "string"}),
    "list": ("List the entries of a directory.", {"path": "string"}),
    "write": ("Create a file with the given content.", {"path": "string", "content": "string"}),
    "search": (
        "Search the documentation and return matching passages.",
        {"query": "string", "limit": "integer"},
    ),
    "fetch": ("Return the JSON document stored under a key.", {"key": "string"}),
}
NAMES = (
    {name: name for name in SCHEMAS},
    {
        "read": "read_file",
        "grep": "grep_search",
        "edit": "edit_file",
        "run": "run_command",
        "list": "list_dir",
        "write": "write_file",
        "search": "search_docs",
        "fetch": "get_json",
    },
    {
        "read": "Read",
        "grep": "Grep",
        "edit": "Edit",
        "run": "Bash",
        "list": "LS",
        "write": "Write",
        "search": "DocSearch",
        "fetch": "FetchRecord",
    },
)
ROLES = (
    "You are a coding agent. Work in small steps and check every change.",
    "You are a helpful assistant with access to the user's repository.",
    "You help a developer to maintain a Python project. Use the tools; do not guess.",
    "You are a careful software engineer. Read before you edit, and run the tests.",
    "You are an assistant that answers questions about a code base and its documentation.",
)
BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class Function:
    """A function of a real module: its name, first line (from 0), lines and own variables."""

    name: str
    start: int
    lines: tuple[str, ...]
    variables: tuple[str, ...]


def functions_of(text: str) -> list[Function]:
    """Return the functions of a module that are short enough to be shown whole."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.split("\n")
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        body = tuple(lines[node.lineno - 1 : node.end_lineno])
        if 4 <= len(body) <= 40:
            names = {
                name.id
                for name in ast.walk(node)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
            own = tuple(sorted(name for name in names if name not in BUILTINS and len(name) > 1))
            found.append(Function(node.name, node.lineno - 1, body, own))
    return found


def _words(name: str) -> str:
    """Read an identifier as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_+", " ", name).strip().lower() or name


def _numbered(lines: list[str] | tuple[str, ...], first: int, style: int) -> str:
    """Number lines in one of the layouts that tools use."""
    if style == 0:
        return "\n".join(f"{first + i:>6}\t{line}" for i, line in enumerate(lines))
    if style == 1:
        return "\n".join(f"{first + i}: {line}" for i, line in enumerate(lines))
    return "\n".join(f"{first + i:4d} | {line}" for i, line in enumerate(lines))


class Chat:
    """Accumulates the messages of one transcript."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = rng.choice(NAMES)
        self.style = rng.randrange(3)
        self.parts: list[str] = []

    def say(self, role: str, content: str) -> None:
        """Append a plain message."""
        self.parts.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")

    def system(self, tools: list[str]) -> None:
        """Append the system message, most often with the signatures of the tools."""
        text = self.rng.choice(ROLES)
        if self.rng.random() < 0.6:
            rows = []
            for tool in tools:
                description, fields = SCHEMAS[tool]
                properties = {key: {"type": kind} for key, kind in fields.items()}
                rows.append(
                    json.dumps(
                        {
                            "type": "function",
                            "function": {
                                "name": self.names[tool],
                                "description": description,
                                "parameters": {
                                    "type": "object",
                                    "properties": properties,
                                    "required": list(fields)[:1],
                                },
                            },
                        }
                    )
                )
            text += (
                "\n\n# Tools\n\nYou may call these functions:\n<tools>\n"
                + "\n".join(rows)
                + "\n</tools>\n\nReturn each call as a JSON object with the function name "
                "and the arguments within <tool_call></tool_call> tags."
            )
        self.say("system", text)

    def call(self, thought: str, tool: str, arguments: dict[str, Any], response: str) -> None:
        """Append an assistant turn that calls a tool, and the tool's answer."""
        body = json.dumps({"name": self.names[tool], "arguments": arguments}, ensure_ascii=False)
        lead = thought + "\n" if thought and self.rng.random() < 0.8 else ""
        self.say("assistant", f"{lead}<tool_call>\n{body}\n</tool_call>")
        self.say("user", f"<tool_response>\n{response}\n</tool_response>")

    def text(self) -> str:
        """Return the whole transcript."""
        return "".join(self.parts)


def _mutate(rng: random.Random, function: Function) -> tuple[list[str], list[str], str, str]:
    """Choose an edit of a function: old lines, new lines, the request and the summary."""
    lines = list(function.lines)
    choice = rng.randrange(4)
    usable = [
        name
        for name in function.variables
        if sum(bool(re.search(rf"\b{name}\b", line)) for line in lines) >= 2
    ]
    if choice <= 1 and usable:
        name = rng.choice(usable)
        new_name = rng.choice((f"{name}_value", f"new_{name}", f"current_{name}", f"{name}_item"))
        touched = [i for i, line in enumerate(lines) if re.search(rf"\b{name}\b", line)]
        old = lines[touched[0] : touched[-1] + 1]
        new = [
            re.sub(
                rf"(?<![.\w]){name}\b(?!\s*=[^=])|^(\s*){name}\b",
                lambda m: (m.group(1) or "") + new_name,
                line,
            )
            for line in old
        ]
        if new != old:
            return (
                old,
                new,
                f"Rename the variable `{name}` in `{function.name}` to `{new_name}`.",
                f"I renamed `{name}` to `{new_name}` in `{function.name}`.",
            )
    body = next((i + 1 for i, line in enumerate(lines) if line.rstrip().endswith(":")), 1)
    end = min(len(lines), body + rng.randint(1, 3))
    old = lines[:end]
    if choice == 2 and body < len(lines) and '"""' not in "".join(lines[body : body + 1]):
        pad = lines[body][: len(lines[body]) - len(lines[body].lstrip())]
        doc = f'{pad}"""{_words(function.name).capitalize()}."""'
        return (
            old,
            [*lines[:body], doc, *lines[body:end]],
            f"Add a docstring to `{function.name}`.",
            f"`{function.name}` now has a docstring.",
        )
    anchor = lines[-3:]
    pad = anchor[-1][: len(anchor[-1]) - len(anchor[-1].lstrip())]
    log = f'{pad}logger.debug("{_words(function.name)} called")'
    return (
        anchor,
        [*anchor[:-1], log, anchor[-1]],
        f"Log a debug message before the last line of `{function.name}`.",
        f"`{function.name}` logs a debug message before its last line.",
    )


def _test_run(rng: random.Random, path: str, names: list[str], failing: str | None) -> str:
    """Write what a test runner prints for tests of the given functions."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    rows = [
        f"tests/test_{stem}.py::test_{name} {'FAILED' if name == failing else 'PASSED'}"
        for name in names
    ]
    count = len(names)
    seconds = f"{rng.uniform(0.02, 9):.2f}s"
    tail = f"{count} passed in {seconds}"
    if failing:
        tail = f"1 failed, {count - 1} passed in {seconds}"
    return "\n".join([f"collected {count} items", "", *rows, "", f"===== {tail} ====="])


def _edit_chat(rng: random.Random, path: str, text: str, functions: list[Function]) -> str:
    chat = Chat(rng)
    chat.system(["read", "grep", "edit", "run"])
    function = rng.choice(functions)
    old, new, request, summary = _mutate(rng, function)
    lines = text.split("\n")
    chat.say(
        "user",
        rng.choice(("{r}", "In {p}: {r}", "{r} It is in {p}.", "Please do this: {r}")).format(
            r=request, p=path
        ),
    )
    hit = f"{path}:{function.start + 1}:{function.lines[0]}"
    uses = [
        f"{path}:{i + 1}:{line}"
        for i, line in enumerate(lines)
        if f"{function.name}(" in line and i != function.start
    ][:4]
    if rng.random() < 0.7:
        chat.call(
            f"I'll look for `{function.name}`.",
            "grep",
            {"pattern": f"def {function.name}" if not uses else function.name, "path": "."},
            "\n".join([hit, *uses]),
        )
    first = max(0, function.start - rng.randint(0, 6))
    last = min(len(lines), function.start + len(function.lines) + rng.randint(0, 4))
    chat.call(
        "Let me read the function.",
        "read",
        {"path": path, "start_line": first + 1, "end_line": last},
        _numbered(lines[first:last], first + 1, chat.style),
    )
    offset = next(
        (i for i in range(len(function.lines)) if list(function.lines[i : i + len(old)]) == old), 0
    )
    shown = _numbered(new, function.start + offset + 1, chat.style)
    chat.call(
        rng.choice(("Now I make the change.", "I'll edit these lines.", "")),
        "edit",
        {"path": path, "old_string": "\n".join(old), "new_string": "\n".join(new)},
        f"{path} has been updated:\n{shown}",
    )
    names = [item.name for item in rng.sample(functions, min(len(functions), rng.randint(2, 7)))]
    if function.name not in names:
        names.append(function.name)
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    command = f"python -m pytest -v tests/test_{stem}.py"
    if rng.random() < 0.3:
        chat.call(
            "I'll run the tests.",
            "run",
            {"command": command},
            _test_run(rng, path, names, function.name),
        )
        chat.call(
            "The change broke a test, so I go back to the old lines.",
            "edit",
            {"path": path, "old_string": "\n".join(new), "new_string": "\n".join(old)},
            f"{path} has been updated:\n{_numbered(old, function.start + offset + 1, chat.style)}",
        )
        chat.call("Once more.", "run", {"command": command}, _test_run(rng, path, names, None))
        chat.say(
            "assistant",
            f"The change to `{function.name}` made its test fail, so I reverted "
            f"it; {path} is as it was before.",
        )
        return chat.text()
    if rng.random() < 0.8:
        chat.call(
            "Let me run the tests.", "run", {"command": command}, _test_run(rng, path, names, None)
        )
        summary += " The tests pass."
    chat.say("assistant", summary)
    return chat.text()


def _explain_chat(rng: random.Random, path: str, text: str, functions: list[Function]) -> str:
    """Ask where things are defined: the answer cites paths, line numbers and signatures."""
    chat = Chat(rng)
    chat.system(["read", "grep", "list"])
    chosen = sorted(
        rng.sample(functions, min(len(functions), rng.randint(2, 6))), key=lambda item: item.start
    )
    chat.say(
        "user",
        rng.choice(
            (
                f"What is defined in {path}?",
                f"Give me an overview of {path}.",
                f"Which functions does {path} have?",
            )
        ),
    )
    chat.call(
        "",
        "grep",
        {"pattern": r"^\s*def ", "path": path},
        "\n".join(f"{item.start + 1}:{item.lines[0]}" for item in chosen),
    )
    for item in chosen[:2]:
        chat.call(
            f"I'll read `{item.name}`.",
            "read",
            {"path": path, "start_line": item.start + 1, "end_line": item.start + len(item.lines)},
            _numbered(item.lines, item.start + 1, chat.style),
        )
    rows = [
        f"- `{item.name}` (line {item.start + 1}): {_words(item.name)}, {len(item.lines)} lines"
        for item in chosen
    ]
    chat.say("assistant", f"{path} defines:\n" + "\n".join(rows))
    if rng.random() < 0.6:
        item = rng.choice(chosen)
        chat.say("user", f"Show me `{item.name}`.")
        chat.say("assistant", "```python\n" + "\n".join(item.lines) + "\n```")
    return chat.text()


def _write_chat(rng: random.Random, path: str, functions: list[Function]) -> str:
    """Move a real function to a new file."""
    chat = Chat(rng)
    chat.system(["read", "write", "run"])
    item = rng.choice(functions)
    target = f"{path.rsplit('/', 1)[0]}/{item.name.strip('_') or 'helper'}.py"
    pad = len(item.lines[0]) - len(item.lines[0].lstrip())
    code = "\n".join(line[pad:] for line in item.lines) + "\n"
    chat.say("user", f"Copy `{item.name}` from {path} to a file of its own.")
    chat.call(
        "First I read it.",
        "read",
        {"path": path, "start_line": item.start + 1, "end_line": item.start + len(item.lines)},
        _numbered(item.lines, item.start + 1, chat.style),
    )
    chat.call(
        "Now I write the new file.",
        "write",
        {"path": target, "content": code},
        f"Wrote {len(code)} bytes to {target}.",
    )
    chat.call("Does it compile?", "run", {"command": f"python -m py_compile {target}"}, "")
    chat.say("assistant", f"`{item.name}` is now also in {target}.")
    return chat.text()


def _docs_chat(rng: random.Random, prose: list[Document]) -> str:
    """Search documentation and answer with a quotation from the result."""
    chat = Chat(rng)
    chat.system(["search"])
    document = rng.choice(prose)
    paragraphs = [
        p
        for p in document.text.split("\n\n")
        if 120 < len(p) < 700 and p[0].isalpha() and ". " in p and "\n" not in p
    ]
    if not paragraphs:
        return ""
    chosen = rng.sample(paragraphs, min(3, len(paragraphs)))
    words = sorted({w for w in re.findall(r"[A-Za-z]{5,}", chosen[0])}, key=lambda w: (-len(w), w))
    query = " ".join(words[: rng.randint(2, 4)]).lower()
    chat.say(
        "user",
        rng.choice(
            (
                "What do the docs say about {q}?",
                "Find the passage on {q}.",
                "Where can I read about {q}?",
            )
        ).format(q=query),
    )
    rows = [{"rank": i + 1, "source": document.source, "text": p} for i, p in enumerate(chosen)]
    rng.shuffle(rows)
    chat.call(
        "",
        "search",
        {"query": query, "limit": len(rows)},
        json.dumps(rows, indent=rng.choice((None, 2)), ensure_ascii=False),
    )
    sentence = re.split(r"(?<=[.!?])\s", chosen[0].strip())[0]
    chat.say("assistant", f'The documentation of {document.source} says: "{sentence}"')
    return chat.text()


def _json_chat(rng: random.Random, records: list[Document]) -> str:
    """Fetch a JSON record and report one of its fields."""
    document = rng.choice(records)
    try:
        value = json.loads(document.text)
    except json.JSONDecodeError:
        return ""
    if not isinstance(value, dict) or len(document.text) > 5000:
        return ""
    chat = Chat(rng)
    chat.system(["fetch"])
    key = document.path.rsplit("/", 1)[-1].removesuffix(".json")
    field = rng.choice(sorted(value))
    chat.say("user", f"What is `{field}` in the record {key}?")
    chat.call("", "fetch", {"key": key}, document.text.rstrip("\n"))
    shown = json.dumps(value[field], indent=2, ensure_ascii=False)
    chat.say("assistant", f"`{field}` is:\n```json\n{shown}\n```")
    return chat.text()


def transcripts(documents: list[Document], seed: int, budget: int) -> Iterator[str]:
    """Yield transcripts over the given documents until ``budget`` characters are reached."""
    rng = random.Random(seed)
    code = [d for d in documents if d.genre == "code"]
    prose = [d for d in documents if d.genre == "prose"]
    records = [d for d in documents if d.text.startswith("{") and "/" in d.path]
    known: dict[str, list[Function]] = {}
    total = 0
    while total < budget:
        dice = rng.random()
        if dice < 0.13:
            text = _docs_chat(rng, prose)
        elif dice < 0.22 and records:
            text = _json_chat(rng, records)
        else:
            document = rng.choice(code)
            path = re.sub(r"^.*(?:python3\.11|package)/", "src/", document.path)
            functions = known.setdefault(document.path, functions_of(document.text))
            if len(functions) < 2:
                continue
            if dice < 0.72:
                text = _edit_chat(rng, path, document.text, functions)
            elif dice < 0.9:
                text = _explain_chat(rng, path, document.text, functions)
            else:
                text = _write_chat(rng, path, functions)
        if text:
            total += len(text)
            yield text
