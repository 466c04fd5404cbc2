"""Filters that decide which extracted texts are worth training on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace

from .documents import Document

MAX_BYTES = 400_000
_GENERATED = re.compile(
    r"(?i)do not edit|auto-?generated|automatically generated|generated (?:by|from|using|with)\b"
)
_MARKERS = ("<|", "|>", "<tool_call>", "<tool_response>")
_LEGAL_COMMENT = re.compile(r"\A(?:#!.*\n)?(?:#.*\n|\s*\n)+")
_BLOB = re.compile(r"[A-Za-z0-9+/=_-]{200,}")


def _shorten(text: str) -> str:
    """Cut a text that is too long at a line end."""
    if len(text) <= MAX_BYTES:
        return text
    return text[: text.rfind("\n", 0, MAX_BYTES) + 1]


def _strip_legal_header(text: str) -> str:
    """Drop a leading comment that only repeats the licence: it would be learnt by heart."""
    match = _LEGAL_COMMENT.match(text)
    if match and re.search(r"(?i)licen[cs]e|copyright", match.group()):
        return text[match.end() :]
    return text


def tidy(genre: str, text: str) -> str | None:
    """Return the text to keep, or None if it is too short, generated, minified or tabular."""
    if any(marker in text for marker in _MARKERS) or "\x00" in text or "\ufffd" in text:
        return None
    if genre == "code":
        if _GENERATED.search(text[:600]):
            return None
        text = _strip_legal_header(text)
    text = _shorten(text)
    minimum = {"code": 250, "prose": 500, "structured": 150}[genre]
    if len(text) < minimum or _BLOB.search(text):
        return None
    lines = text.split("\n")
    digits = sum(character.isdigit() for character in text) / len(text)
    letters = sum(character.isalpha() or character == " " for character in text) / len(text)
    if digits > (0.08 if genre == "prose" else 0.15):
        return None
    if sum(ord(character) > 0x2FF for character in text) > 0.05 * len(text):
        return None
    if genre == "code" and (max(map(len, lines)) > 500 or len(text) / len(lines) > 90):
        return None
    if genre == "prose" and letters < 0.78:
        return None
    return text if text.endswith("\n") else text + "\n"


def _leading_key(text: str) -> str:
    """Hash the first words, so that copies of one file with small changes collide."""
    body = re.sub(r"(?m)^\s*#.*\n", "", text)
    head = re.sub(r"\W+", " ", body[:3000]).strip().lower()[:400]
    return hashlib.sha256(head.encode()).hexdigest()


def deduplicate(documents: Iterable[Document]) -> list[Document]:
    """Drop exact and near copies, and paragraphs of prose that were seen before.

    Generated documents share their first lines by design and are only compared as a whole.

    Held-out documents come first, so that it is the training copy that goes.
    """
    ordered = sorted(documents, key=lambda document: not document.heldout)
    seen: set[str] = set()
    paragraphs: set[str] = set()
    kept = []
    for document in ordered:
        text = document.text
        if document.genre == "prose":
            fresh = []
            for paragraph in text.rstrip("\n").split("\n\n"):
                if len(paragraph) < 60 or paragraph not in paragraphs:
                    fresh.append(paragraph)
                paragraphs.add(paragraph)
            text = "\n\n".join(fresh) + "\n"
            if len(text) < 500:
                continue
        keys = {hashlib.sha256(text.encode()).hexdigest()}
        if document.kind != "generated":
            keys.add(_leading_key(text))
        if keys & seen:
            continue
        seen |= keys
        kept.append(replace(document, text=text))
    return kept
