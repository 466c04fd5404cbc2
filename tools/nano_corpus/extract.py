"""Turns archive members of various formats into plain text documents."""

from __future__ import annotations

import html
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from email.parser import Parser
from html.parser import HTMLParser
from typing import Any

from .render import render_json

PIECE_BYTES = 24_000
_BLOCKS = frozenset(
    (
        "p",
        "div",
        "section",
        "article",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "li",
        "ul",
        "ol",
        "dl",
        "dt",
        "dd",
        "tr",
        "table",
        "blockquote",
        "br",
        "hr",
    )
)
_VOID = frozenset(
    (
        "br",
        "hr",
        "img",
        "input",
        "meta",
        "link",
        "area",
        "base",
        "col",
        "embed",
        "source",
        "track",
        "wbr",
    )
)
_SKIPPED_TAGS = frozenset(
    (
        "script",
        "style",
        "nav",
        "footer",
        "head",
        "aside",
        "form",
        "button",
        "svg",
    )
)
_SKIPPED_CLASS = re.compile(
    r"(?<!with)sidebar|navbar|related|headerlink|navheader|navfooter|footer|breadcrumb|\btoc\b"
    r"|\bcontents\b|menu|permalink|viewcode|linenos|wy-nav-(?:side|top)|hdlink|toctree"
    r"|docs-actions|section-srclink"
)


class _TextParser(HTMLParser):
    """Collects the paragraphs of a page and leaves navigation and scripts out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._text: list[str] = []
        self._preformatted = 0

    def _flush(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        text = text.strip("\n") if self._preformatted else re.sub(r"\s+", " ", text).strip()
        if text.strip(" -"):
            self.paragraphs.append(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an opening tag and whether its content is to be skipped."""
        if tag in _BLOCKS and not self._preformatted:
            self._flush()
        if tag in _VOID:
            return
        if tag == "pre":
            self._flush()
            self._preformatted += 1
        marks = " ".join(value or "" for key, value in attrs if key in ("class", "id", "role"))
        outer = bool(self._open) and self._open[-1][1]
        # <body> may carry layout classes that say nothing about its content.
        own = tag in _SKIPPED_TAGS or (
            tag not in ("body", "html", "main") and bool(_SKIPPED_CLASS.search(marks))
        )
        self._open.append((tag, outer or own))
        if tag == "li" and not (outer or own):
            self._text.append("- ")

    def handle_endtag(self, tag: str) -> None:
        """Close ``tag`` together with unclosed tags inside it."""
        if tag == "pre" and self._preformatted:
            self._flush()
            self._preformatted -= 1
        elif tag in _BLOCKS and not self._preformatted:
            self._flush()
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == tag:
                del self._open[index:]
                break

    def handle_data(self, data: str) -> None:
        """Keep text unless it stands in a skipped element."""
        if not (self._open and self._open[-1][1]):
            self._text.append(data)

    def close(self) -> None:
        """Finish the last paragraph."""
        super().close()
        self._flush()


def _decode(content: bytes) -> str | None:
    """Decode UTF-8 and return None for anything else."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _pieces(paragraphs: list[str], limit: int = PIECE_BYTES) -> Iterator[str]:
    """Join paragraphs into texts of about ``limit`` characters."""
    batch: list[str] = []
    size = 0
    for paragraph in paragraphs:
        batch.append(paragraph)
        size += len(paragraph)
        if size >= limit:
            yield "\n\n".join(batch) + "\n"
            batch, size = [], 0
    if batch:
        yield "\n\n".join(batch) + "\n"


def _python(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    text = _decode(content)
    if text is not None:
        yield path, text


def _html(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    text = _decode(content)
    if text is None:
        text = content.decode("latin-1")
    parser = _TextParser()
    parser.feed(text)
    parser.close()
    kept = [part.replace("¶", "").rstrip() for part in parser.paragraphs if part.count("\n") < 40]
    for number, piece in enumerate(_pieces(kept, 60_000)):
        yield f"{path}#{number}", piece


def _pod(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Strip the markup of a Perl manual page and leave its verbatim blocks as they are."""
    text = _decode(content)
    if text is None:
        return
    kept = []
    for block in re.split(r"\n[ \t]*\n", text):
        if re.match(r"=(?:over|back|cut|pod|encoding|for|begin|end)\b", block):
            continue
        block = re.sub(r"^=(?:head\d|item)\s*\*?\s*", "", block)
        if not block.startswith((" ", "\t")):
            for _ in range(3):
                block = re.sub(r"[XZ]<[^<>]*>", "", block)
                block = re.sub(r"L<(?:[^<>|]*\|)([^<>]*)>", r"\1", block)
                block = re.sub(r"[BCFILSU]<(?:<+ )?([^<>]*?)(?: >+)?>", r"\1", block)
            block = re.sub(r"E<(\w+)>", r"&\1;", block)
            block = html.unescape(block)
        if block.strip():
            kept.append(block.strip("\n"))
    for number, piece in enumerate(_pieces(kept, 60_000)):
        yield f"{path}#{number}", piece


def _dictionary(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Split a dictd database into groups of entries, without its indentation."""
    text = content.decode("utf-8", errors="ignore")
    blocks = [re.sub(r"(?m)^ {1,8}", "", block) for block in re.split(r"\n\s*\n", text)]
    start = next((i for i, block in enumerate(blocks) if i > 3 and len(block) > 200), 0)
    for number, piece in enumerate(_pieces([b.strip("\n") for b in blocks[start:] if b.strip()])):
        yield f"{path}#{number}", piece


def _rdb(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Read the string vectors of an R lazy-load database: one book a vector, one line a string."""
    position = 0
    while position + 4 < len(content):
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(content[position + 4 :])
        except zlib.error:
            return
        position = len(content) - len(inflater.unused_data)
        lines = []
        for match in re.finditer(rb"\x00[\x00-\xff]{2}\x09(?=[\x00-\xff]{4})", data, re.DOTALL):
            (length,) = struct.unpack(">i", data[match.end() : match.end() + 4])
            if 0 <= length < 2000:
                start = match.end() + 4
                lines.append(data[start : start + length].decode("utf-8", errors="ignore"))
        if len(lines) < 1000:
            continue
        title = next(line for line in lines if line.strip())
        paragraphs = [p for p in "\n".join(lines).split("\n\n") if p.strip()]
        for number, piece in enumerate(_pieces(paragraphs)):
            yield f"{path}/{title}#{number}", piece


def _json_text(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Take the ``text`` of a JSON record, or all long strings of a list of records."""
    record = json.loads(content)
    rows = record if isinstance(record, list) else [record]
    texts = []
    for row in rows:
        text = row if isinstance(row, str) else row.get("text", "")
        texts.append(text.replace("\r\n", "\n").strip())
    paragraphs = [p for text in texts for p in re.split(r"\n\s*\n", text) if p.strip()]
    for number, piece in enumerate(_pieces(paragraphs)):
        yield f"{path}#{number}", piece


def _subtrees(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield parts of a JSON value whose rendering takes roughly 0.5 to 12 kB."""
    size = len(json.dumps(value))
    if size <= 12_000 or not isinstance(value, (dict, list)):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    batch: dict[str, Any] = {}
    total = 0
    for key, child in items:
        child_size = len(json.dumps(child))
        if child_size > 6_000:
            yield from _subtrees(child, f"{path}/{key}")
            continue
        batch[str(key)] = child
        total += child_size
        if total > 6_000:
            yield f"{path}/{key}", batch if isinstance(value, dict) else list(batch.values())
            batch, total = {}, 0
    if batch:
        yield f"{path}/rest", batch if isinstance(value, dict) else list(batch.values())


def _json(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    try:
        value = json.loads(content)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return
    if path.endswith("package.json"):
        yield path, json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        return
    for part, subtree in _subtrees(value, path):
        yield part, render_json(part, subtree)


def _markdown(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    text = _decode(content)
    if text is None:
        return
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    for number, piece in enumerate(_pieces(re.split(r"\n{2,}(?=#)", text), 30_000)):
        yield f"{path}#{number}", piece


def _metadata(path: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Take the long description (the README) of a wheel."""
    body = Parser().parsestr(content.decode("utf-8", errors="ignore")).get_payload()
    if isinstance(body, str):
        yield from _markdown(path, body.encode())


EXTRACTORS: dict[str, Callable[[str, bytes], Iterator[tuple[str, str]]]] = {
    "python": _python,
    "html": _html,
    "pod": _pod,
    "dictionary": _dictionary,
    "rdb": _rdb,
    "json_text": _json_text,
    "json": _json,
    "markdown": _markdown,
    "metadata": _metadata,
}
