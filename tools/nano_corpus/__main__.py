"""Command line of the corpus build: fetch, clean, train the tokenizer, pack."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import bpe
from .clean import deduplicate, tidy
from .documents import GENRES, Document, Source
from .extract import EXTRACTORS
from .fetch import fetch, members
from .logs import logs
from .sources import all_sources
from .transcripts import transcripts

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261129
BUDGETS = {"code": 45_000_000, "prose": 40_000_000, "structured": 36_000_000}
HELDOUT_BUDGET = 1_000_000
SYNTHETIC = {"transcripts": (15_000_000, 400_000), "logs": (4_500_000, 120_000)}
SAMPLE_BYTES = 5_000_000
PACKED_LIMIT = 44 * 2**20


def extract(source: Source, cache: Path) -> Iterator[Document]:
    """Yield the clean documents of one source in a fixed order, up to its byte limits.

    Members are shuffled, so that a limit takes a fair sample, but held-out ones come first, so
    that reading can stop once the training limit is reached.
    """
    rng = random.Random(SEED)
    found = members(fetch(source, cache), source)
    rng.shuffle(found)
    found.sort(key=lambda member: not source.holds_out(member[0]))
    used = {False: 0, True: 0}
    limits = {False: source.max_bytes, True: min(source.max_bytes, 300_000)}
    for member, content in found:
        if used[False] > 0.99 * limits[False]:
            break
        pieces = list(EXTRACTORS[source.kind](member, content))
        rng.shuffle(pieces)
        for path, raw in pieces:
            heldout = source.holds_out(path)
            if used[heldout] > 0.99 * limits[heldout]:
                continue
            text = tidy(source.genre, raw)
            if text is None:
                continue
            document = Document(source.name, path, source.genre, source.kind, text, heldout)
            if used[heldout] + document.size <= limits[heldout]:
                used[heldout] += document.size
                yield document


def synthesize(documents: list[Document]) -> list[Document]:
    """Make transcripts and logs: training ones from training text, held-out ones from the rest."""
    made = []
    for heldout in (False, True):
        base = [d for d in documents if d.heldout == heldout]
        for name, generate in (("transcripts", transcripts), ("logs", logs)):
            budget = SYNTHETIC[name][heldout]
            seed = SEED + len(name) + 1000 * heldout
            for number, text in enumerate(generate(base, seed, budget)):
                made.append(
                    Document(
                        f"generated {name}", str(number), "structured", "generated", text, heldout
                    )
                )
    return made


def select(documents: list[Document], budget: int) -> list[Document]:
    """Shuffle with the fixed seed and keep as many documents as the budget allows."""
    shuffled = list(documents)
    random.Random(SEED).shuffle(shuffled)
    kept = []
    for document in shuffled:
        if document.size <= budget:
            budget -= document.size
            kept.append(document)
    return kept


def pack(documents: list[Document], tokenizer: Tokenizer, path: Path) -> dict[str, object]:
    """Encode the documents, end each with id 0, save them and describe the file."""
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 512):
        texts = [document.text for document in documents[start : start + 512]]
        parts.extend(
            np.array([*encoding.ids, 0], dtype=np.uint16)
            for encoding in tokenizer.encode_batch_fast(texts)
        )
    tokens = np.concatenate(parts)
    size = sum(document.size for document in documents)
    np.savez_compressed(path, tokens=tokens, bytes=np.int64(size))
    return {
        "documents": len(documents),
        "bytes": size,
        "tokens": int(tokens.size),
        "bytes_per_token": round(size / (tokens.size - len(documents)), 4),
        "file_bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def provenance(sources: list[Source], used: list[Document]) -> list[dict[str, object]]:
    """List every source with its licence and what was taken from it."""
    rows: list[dict[str, object]] = []
    for source in sources:
        mine = [
            d
            for d in used
            if (d.source, d.genre, d.kind) == (source.name, source.genre, source.kind)
        ]
        rows.append(
            {
                "package": source.name,
                "version": source.version,
                "registry": source.registry,
                "licence": source.licence,
                "genre": source.genre,
                "kind": source.kind,
                "documents": len(mine),
                "bytes": sum(d.size for d in mine),
                "heldout_bytes": sum(d.size for d in mine if d.heldout),
            }
        )
    for name in SYNTHETIC:
        mine = [d for d in used if d.source == f"generated {name}"]
        rows.append(
            {
                "package": f"generated {name}",
                "version": str(SEED),
                "registry": None,
                "licence": "as the quoted sources",
                "genre": "structured",
                "kind": "generated",
                "documents": len(mine),
                "bytes": sum(d.size for d in mine),
                "heldout_bytes": sum(d.size for d in mine if d.heldout),
            }
        )
    return rows


def build(cache: Path, output: Path, tokenizer_path: Path) -> None:
    """Run all stages and write the arrays, the tokenizer and the report."""
    sources = all_sources()
    documents: list[Document] = []
    for source in sources:
        documents.extend(extract(source, cache))
    documents = deduplicate(documents)
    documents.extend(deduplicate(synthesize(documents)))
    train = {
        g: select([d for d in documents if d.genre == g and not d.heldout], BUDGETS[g])
        for g in GENRES
    }
    heldout = {
        g: select([d for d in documents if d.genre == g and d.heldout], HELDOUT_BUDGET)
        for g in GENRES
    }
    sample = [d.text for g in GENRES for d in select(train[g], SAMPLE_BYTES)]
    tokenizer = bpe.train(sample, tokenizer_path)

    output.mkdir(parents=True, exist_ok=True)
    share = 1.0
    while True:
        chosen = {f"train_{g}": select(train[g], int(BUDGETS[g] * share)) for g in GENRES}
        chosen.update({f"heldout_{g}": heldout[g] for g in GENRES})
        arrays = {
            name: pack(part, tokenizer, output / f"{name}.npz") for name, part in chosen.items()
        }
        total = sum(int(str(entry["file_bytes"])) for entry in arrays.values())
        print(f"share {share:.3f}: {total / 2**20:.2f} MiB")
        if total <= PACKED_LIMIT:
            break
        share *= 0.985 * PACKED_LIMIT / total

    used = [document for part in chosen.values() for document in part]
    report = {
        "seed": SEED,
        "tokenizer_sha256": hashlib.sha256(tokenizer_path.read_bytes()).hexdigest(),
        "arrays": arrays,
        "total_file_bytes": total,
        "sources": provenance(sources, used),
        "heldout": {
            g: sorted(
                {
                    f"{d.source}: {d.path.split('#')[0]}"
                    for d in heldout[g]
                    if not d.source.startswith("generated")
                }
            )
            for g in GENRES
        },
    }
    (output / "corpus.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(arrays, indent=1))


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cache",
        type=Path,
        default=ROOT.parent / "corpus_cache",
        help="folder that keeps the downloaded archives",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "nano",
        help="folder that receives the arrays and corpus.json",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=ROOT / "hipjax" / "assets" / "nano" / "tokenizer.json",
        help="file that receives the tokenizer",
    )
    arguments = parser.parse_args()
    build(arguments.cache, arguments.output, arguments.tokenizer)


if __name__ == "__main__":
    main()
