"""Greedy generation on the tiny model: speculation is plain decoding, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import hipjax
from hipjax import SpeculationConfig
from hipjax.spec import generate as doors
from tests.model.support import changed, leaf
from tests.spec import support
from tests.spec.support import BUDGET, CONTEXT, PROMPTS, misled, plain, quick, stream
from tests.tiny import TINY, prompt_ids

DEPTHS = pytest.mark.parametrize("k", range(1, 8))
pytestmark = pytest.mark.usefixtures("quick")
__all__ = ["quick"]


def patterns(k: int) -> dict[str, list[int]]:
    """How many drafts the windows of a request accept."""
    return {
        "right": [k] * BUDGET,
        "wrong first": [0] * BUDGET,
        "mixed": [*range(k + 1), *range(k, -1, -1)] * BUDGET,
    }


def expected_windows(pattern: list[int], k: int, budget: int) -> Iterator[tuple[int, int, int]]:
    """Drafted, accepted and emitted of every window, by the rules of budget and verdict."""
    left = budget - 1
    for accepted in pattern:
        if left == 0:
            return
        drafted = min(k, left - 1)
        accepted = min(accepted, drafted)
        yield drafted, accepted, accepted + 1
        left -= accepted + 1


def test_plain_decoding_takes_the_best_logit() -> None:
    """Every token is the argmax of the logits that ``hipjax.logits`` finds for what precedes."""
    texts = [[*prompt, *plain(name).tokens] for name, prompt in PROMPTS.items()]
    for best, text in zip(support.best_ids(texts), texts, strict=True):
        picks, emitted = best[-BUDGET - 1 : -1], np.array(text[-BUDGET:])
        np.testing.assert_array_equal(emitted, picks)
        # Negative control: one position off, hardly any token is the best one.
        assert (emitted[1:] == picks[:-1]).mean() < 0.5
        assert len(set(emitted.tolist())) > BUDGET / 4  # nor does the run stand still


@DEPTHS
def test_speculation_equals_plain_decoding(k: int) -> None:
    """With the head's own drafts and with scripted ones, which give every kind of window."""
    for name, prompt in PROMPTS.items():
        tokens = plain(name).tokens
        _, result = support.collected(stream(prompt, k))
        np.testing.assert_array_equal(result.tokens, tokens, err_msg=name)
        assert result.stats.drafted > 0
        for kind, pattern in patterns(k).items():
            drafts = misled(prompt, tokens, pattern, k)
            windows, result = support.collected(stream(prompt, k, drafts=drafts))
            np.testing.assert_array_equal(result.tokens, tokens, err_msg=f"{name}, {kind}")
            assert result.finish_reason == "length"
            seen = [(w.drafted, w.accepted, len(w.tokens)) for w in windows[1:]]
            assert seen == list(expected_windows(pattern, k, BUDGET)), (name, kind)


@DEPTHS
def test_budgets(k: int) -> None:
    """Never a token more, also when all drafts are right; the last window drafts what fits."""
    prompt, tokens = PROMPTS["short"], plain("short").tokens
    right = misled(prompt, tokens, [], k)
    for budget in sorted({1, 2, 3, k, k + 1, k + 2, k + 3}):
        for drafts in (None, right):
            options = {"drafts": drafts, "max_new_tokens": budget}
            windows, result = support.collected(stream(prompt, k, **options))
            np.testing.assert_array_equal(result.tokens, tokens[:budget])
            assert result.finish_reason == "length"
            assert result.stats.emitted == budget
        assert [(w.drafted, w.accepted, len(w.tokens)) for w in windows[1:]] == list(
            expected_windows([k] * budget, k, budget)
        )


def test_end_of_the_context() -> None:
    """A request ends where the context is full, whatever its budget; its last rows count too."""
    texts, lengths = [], (CONTEXT - 1, CONTEXT - 2, CONTEXT - 5, CONTEXT - 13)
    for length in lengths:
        prompt = prompt_ids(TINY, 5, length)
        _, result = support.collected(stream(prompt, 0, max_new_tokens=100))
        assert (len(result.tokens), result.finish_reason) == (CONTEXT - length, "length")
        texts.append([*prompt, *result.tokens])
        right = misled(prompt, result.tokens, [], 3)
        some = misled(prompt, result.tokens, [0, 2, 1, 3, 0], 3)
        for k in (3, 7):
            for drafts in (None, right, some):
                _, found = support.collected(stream(prompt, k, drafts=drafts, max_new_tokens=100))
                np.testing.assert_array_equal(found.tokens, result.tokens)
                assert found.finish_reason == "length"
    for best, text, length in zip(support.best_ids(texts), texts, lengths, strict=True):
        assert text[length:] == best[length - 1 : -1].tolist()


def test_doors_agree() -> None:
    """The doors that wait give what the streams give."""
    config, params = support.model()
    prompt = PROMPTS["short"]
    options = {"config": config, "sampling": support.sampling(), "cache_dtype": jnp.float32}
    options |= {"max_new_tokens": BUDGET}
    found = hipjax.generate(params, None, prompt, **options)
    np.testing.assert_array_equal(found.tokens, plain("short").tokens)
    assert (found.stats.mtp_windows, found.stats.ar_windows) == (0, BUDGET - 1)
    found = hipjax.speculative_generate(
        params, None, prompt.tolist(), speculation=SpeculationConfig(mtp_k=3), **options
    )
    default = hipjax.speculative_generate(params, None, prompt, **options)
    for result in (found, default):
        np.testing.assert_array_equal(result.tokens, plain("short").tokens)
        assert result.tokens.dtype == np.int32
        assert result.stats.ar_windows == 0 and len(result.stats.drafted_by_depth) == 3


@pytest.mark.parametrize("beyond", [0, 5, 2**30], ids=["vocabulary size", "more", "far more"])
def test_drafts_outside_the_vocabulary(beyond: int) -> None:
    """They are never emitted, and what they leave in the state harms nothing."""
    for name in ("short", "a chunk"):
        prompt, tokens = PROMPTS[name], plain(name).tokens
        for places in (range(1, BUDGET), range(1, BUDGET, 2), range(3, BUDGET, 4)):
            drafts = tokens.copy()
            drafts[list(places)] = TINY["text_config"]["vocab_size"] + beyond
            scripted = support.script(drafts.tolist(), len(prompt))
            _, result = support.collected(stream(prompt, 3, drafts=scripted))
            np.testing.assert_array_equal(result.tokens, tokens)
            assert result.stats.nonfinite_rows == 0
        assert result.stats.accepted > 0  # of the right ones between them


@pytest.mark.parametrize("k", [0, 3])
def test_without_a_finite_logit(k: int) -> None:
    """The choice is id 0, and every such row is counted, that of the first token too."""
    _, params = support.model()
    poisoned = changed(params, "lm_head.weight", leaf(params, "lm_head.weight") * jnp.nan)
    _, result = support.collected(stream(PROMPTS["short"], k, params=poisoned, max_new_tokens=9))
    assert result.tokens.tolist() == [0] * 9
    assert result.stats.nonfinite_rows == 9
    assert plain("short").stats.nonfinite_rows == 0


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_logit_that_is_not_finite_is_never_chosen(value: float) -> None:
    """One id drops out; speculation still equals plain decoding."""
    _, params = support.model()
    ids, counts = np.unique(plain("short").tokens, return_counts=True)
    banned = int(ids[counts.argmax()])
    head = leaf(params, "lm_head.weight")
    poisoned = changed(params, "lm_head.weight", head.at[banned].set(value))
    options = {"params": poisoned, "max_new_tokens": 20}
    _, expected = support.collected(stream(PROMPTS["short"], 0, **options))
    _, result = support.collected(stream(PROMPTS["short"], 3, **options))
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    assert banned not in result.tokens and banned in plain("short").tokens[:20]
    assert result.stats.nonfinite_rows == 0


def test_a_broken_head_costs_acceptance_alone() -> None:
    """Its rows are NaN throughout; the trunk never reads them."""
    _, params = support.model()
    broken = changed(params, "mtp.fc_hidden.weight", leaf(params, "mtp.fc_hidden.weight") * jnp.nan)
    _, result = support.collected(stream(PROMPTS["a chunk"], 3, params=broken))
    np.testing.assert_array_equal(result.tokens, plain("a chunk").tokens)
    assert result.stats.nonfinite_rows == 0


def test_one_trace_for_each_number_of_drafts() -> None:
    """Prompts, budgets, stop ids and drafts are values: none of them compiles anything."""
    names = ("short", "three chunks", "one token")
    for k in (0, 3):
        for name, budget, stop in zip(names, (5, 40, 2), (511, 7, 300), strict=True):
            list(stream(PROMPTS[name], k, max_new_tokens=budget, stop=stop))
            list(stream(PROMPTS[name], k, drafts=support.script([3] * 300)))
    seen = {key[1] for key in support.TRACES if key[0] == "window"}
    assert seen >= {0, 3} and any(key[0] == "prefill" for key in support.TRACES)
    assert set(support.TRACES.values()) == {1}, support.TRACES


@pytest.mark.parametrize(
    ("tokens", "context", "rows"),
    [
        (2, 4096, 256),
        (256, 4096, 256),
        (257, 4096, 512),
        (4096, 4096, 4096),
        (700, 1000, 1000),
        (5, 128, 128),
        (262_144, 262_144, 262_144),
    ],
)
def test_capacity(tokens: int, context: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubled until it holds the request, never past the context."""
    monkeypatch.setattr(doors, "_SMALLEST_CAPACITY", 256)
    assert doors._capacity(tokens, context) == rows
