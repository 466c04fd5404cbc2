"""The bundled model: what it is made of, and that speculation leaves its words as they are."""

from __future__ import annotations

import functools
import importlib.resources
import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest

import hipjax
from hipjax import FlashNext, Result, SamplingConfig, SpeculationConfig
from hipjax.spec import generate as doors
from tests.spec.prompts import GENRES

TOKENS = 200
CAPACITY = 512  # of every request here, so that a depth is compiled once
PROMPTS = [(genre, text) for genre, texts in GENRES.items() for text in texts]


def depths(number: int) -> tuple[int, int]:
    """Two depths for every prompt, such that all of 1 to 7 come up about equally often."""
    return number % 7 + 1, (number + 3) % 7 + 1


@functools.cache
def nano() -> FlashNext:
    return hipjax.load_nano(dtype=jnp.float32)


@functools.cache
def ids(text: str) -> tuple[int, ...]:
    tokenizer = nano().tokenizer
    assert tokenizer is not None
    return tuple(tokenizer.encode(text).ids)


@functools.cache
def run(text: str, k: int) -> Result:
    """TOKENS tokens after a prompt, drafted ``k`` at a time, or plain for 0."""
    model = nano()
    options = {
        "config": model.config,
        "sampling": SamplingConfig(ignore_eos=True),
        "max_new_tokens": TOKENS,
    }
    if k == 0:
        return hipjax.generate(model.params, None, ids(text), **options)
    speculation = SpeculationConfig(mtp_k=k)
    return hipjax.speculative_generate(
        model.params, None, ids(text), speculation=speculation, **options
    )


def difference(text: str, k: int, found: np.ndarray, plain: np.ndarray) -> str | None:
    """Where two results part, and how close the call was; None where they do not."""
    if np.array_equal(found, plain):
        return None
    place = int(np.flatnonzero(found != plain)[0])
    before = np.array([*ids(text), *plain[:place]])
    logits = hipjax.logits(nano().params, before, config=nano().config, rows=True)
    low, high = np.sort(np.asarray(logits[-1]))[-2:]
    return (
        f"{text[:30]!r}, k = {k}, token {place}: {found[place]} in place of {plain[place]}; "
        f"the two best logits are {high:.6f} and {low:.6f}"
    )


@pytest.fixture(autouse=True)
def one_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_SMALLEST_CAPACITY", CAPACITY)


def test_the_prompts() -> None:
    lengths = {genre: [len(ids(text)) for text in texts] for genre, texts in GENRES.items()}
    for genre, each in lengths.items():
        assert len(each) >= 8, genre
        assert min(each) <= 5 and 200 <= max(each) <= CAPACITY - TOKENS, (genre, each)
    uses = [k for number in range(len(PROMPTS)) for k in depths(number)]
    assert len(PROMPTS) >= 24
    assert all(uses.count(k) >= 6 for k in range(1, 8))


def test_speculation_leaves_the_words_as_they_are() -> None:
    """Every prompt at two depths, and not for want of accepted drafts."""
    apart, accepted, replaced = [], np.zeros(7, int), 0
    for number, (_, text) in enumerate(PROMPTS):
        plain = run(text, 0)
        assert len(plain.tokens) == TOKENS
        for k in depths(number):
            result = run(text, k)
            found = difference(text, k, result.tokens, plain.tokens)
            apart += [] if found is None else [found]
            assert result.stats.mtp_windows > 0 and result.stats.ar_windows == 0
            assert len(result.stats.accepted_by_depth) == k
            accepted[:k] += result.stats.accepted_by_depth
            replaced += result.stats.replacements
    assert not apart, "\n".join(apart)
    assert (accepted > 0).all(), accepted
    assert replaced > 100  # left to itself this model soon repeats itself, but not at once


def test_a_difference_would_be_seen() -> None:
    """Negative control: one other token is reported, with its place."""
    text = PROMPTS[0][1]
    plain = run(text, 0).tokens
    other = plain.copy()
    other[150] += 1
    found = difference(text, 3, other, plain)
    assert found is not None and "token 150" in found
    assert difference(text, 3, plain.copy(), plain) is None


@pytest.mark.parametrize("genre", GENRES)
def test_the_head_is_worth_asking(genre: str) -> None:
    """Its drafts are accepted at every depth, the nearer ones more often."""
    drafted, accepted = np.zeros(3), np.zeros(3)
    for number, (kind, text) in enumerate(PROMPTS):
        if kind == genre:
            for k in depths(number):
                stats = run(text, k).stats
                drafted[: min(k, 3)] += stats.drafted_by_depth[:3]
                accepted[: min(k, 3)] += stats.accepted_by_depth[:3]
    rates = accepted / drafted
    assert (rates > 0).all()
    # The bar for held-out text, less what eight prompts of 200 tokens may stray from it.
    assert rates[0] >= (0.40 if genre == "prose" else 0.55), rates


def test_the_file() -> None:
    folder = importlib.resources.files("hipjax") / "assets/nano"
    weights = folder / "model.safetensors"
    assert {"config.json", "tokenizer.json", "MODEL_CARD.md"} <= {e.name for e in folder.iterdir()}
    assert weights.stat().st_size <= 12e6
    with weights.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    dtypes = {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    integers = {name for name, dtype in dtypes.items() if dtype == "I64"}
    assert set(dtypes.values()) <= {"BF16", "I64"}
    assert all(".ple_embedding." in name for name in integers)  # the hashing's constants
    assert any(name.startswith("mtp.") for name in dtypes)


def test_every_mechanism_is_there() -> None:
    config = nano().config
    kinds = config.layer_types
    assert len(kinds) >= 8 and kinds.count("indexed_attention") >= 2
    assert kinds.count("linear_attention") >= 2
    assert config.hc_count == 4
    assert config.num_experts >= 16 and config.num_experts_per_tok >= 2
    assert config.shared_expert_intermediate_size > 0
    assert config.ple_layer_ids and config.has_head
    assert config.indexer_budget < config.max_position_embeddings >= 2048
    assert 1000 <= config.vocab_size <= 4096


def test_the_tokenizer_fits() -> None:
    model = nano()
    assert model.tokenizer is not None
    assert model.tokenizer.get_vocab_size() <= model.config.vocab_size
    for text in ("def f(x):\n\treturn x\n", "naïve – café 漢字 🙂", " two  spaces\r\n"):
        assert model.tokenizer.decode(list(ids(text))) == text
