"""The two records that every stage of the corpus build exchanges."""

from __future__ import annotations

import re
from dataclasses import dataclass

GENRES = ("code", "prose", "structured")


@dataclass(frozen=True)
class Source:
    """One pinned distribution and the rule that selects text from it.

    ``kind`` names the extractor in ``extract.py``, ``include`` and ``exclude`` are regular
    expressions searched in member paths, and ``heldout`` is one more that moves the matching
    members out of training.  ``max_bytes`` bounds what a single package may contribute, so that
    no project's style dominates.
    """

    registry: str
    name: str
    version: str
    licence: str
    genre: str
    kind: str
    include: str
    exclude: str = r"(?!)"
    heldout: str = r"(?!)"
    max_bytes: int = 1_000_000

    def selects(self, path: str) -> bool:
        """Tell whether the archive member ``path`` belongs to this source."""
        return bool(re.search(self.include, path)) and not re.search(self.exclude, path)

    def holds_out(self, path: str) -> bool:
        """Tell whether the archive member ``path`` is reserved for evaluation."""
        return bool(re.search(self.heldout, path))


@dataclass(frozen=True)
class Document:
    """A piece of clean text, with its origin for the provenance report."""

    source: str
    path: str
    genre: str
    kind: str
    text: str
    heldout: bool = False

    @property
    def size(self) -> int:
        """Number of UTF-8 bytes of the text."""
        return len(self.text.encode())
