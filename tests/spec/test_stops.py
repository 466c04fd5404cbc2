"""Stop ids at every place of a window, against the budget, and ``ignore_eos``.

The stop ids are tokens that plain decoding emits, so that a request ends in its middle. They fall
on the place of the window that the scripted drafts put them.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from hipjax import SamplingConfig, checks
from tests.model.support import changed, leaf
from tests.spec import support
from tests.spec.support import BUDGET, PROMPTS, misled, plain, quick, stream
from tests.tiny import TINY

K = 3
EOS = TINY["text_config"]["eos_token_id"]
NAME = "short"
pytestmark = pytest.mark.usefixtures("quick")
__all__ = ["quick"]


@functools.cache
def first_seen() -> list[int]:
    """Indices of the tokens that plain decoding has not emitted before."""
    tokens = plain(NAME).tokens.tolist()
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("last", range(13))
def test_at_every_token(last: int) -> None:
    """Whichever token is the stop, it is the last; with right, wrong and own drafts."""
    prompt, tokens = PROMPTS[NAME], plain(NAME).tokens
    assert first_seen()[:13] == list(range(13))  # so every place is tried
    stop = int(tokens[last])
    for k in (0, 1, 3, 7):
        scripts = [misled(prompt, tokens, pattern, k) for pattern in ([], [0] * 13, [0, 2, 1, 0])]
        for drafts in [None, *scripts] if k else [None]:
            windows, result = support.collected(stream(prompt, k, drafts=drafts, stop=stop))
            np.testing.assert_array_equal(result.tokens, tokens[: last + 1])
            assert result.finish_reason == "stop"
            assert [w.finish_reason for w in windows[:-1]] == [None] * (len(windows) - 1)
            assert result.stats.emitted == last + 1


# The window that emits tokens 1 to 4 ends with the stop: how many of its drafts are right, which
# of its tokens is the stop, and how many drafts are then accepted, tokens emitted, and counted as
# replacements and bonuses.
PLACES = {
    "first draft": (3, 0, 1, 1, (0, 0)),
    "middle draft": (3, 1, 2, 2, (0, 0)),
    "last draft": (3, 2, 3, 3, (0, 0)),
    "bonus": (3, 3, 3, 4, (0, 1)),
    "first replacement": (0, 0, 0, 1, (1, 0)),
    "middle replacement": (1, 1, 1, 2, (1, 0)),
    "last replacement": (2, 2, 2, 3, (1, 0)),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_at_every_place_of_a_window(place: tuple[int, int, int, int, tuple[int, int]]) -> None:
    right, where, accepted, emitted, counted = place
    prompt, tokens = PROMPTS[NAME], plain(NAME).tokens
    drafts = misled(prompt, tokens, [right], K)
    windows, result = support.collected(
        stream(prompt, K, drafts=drafts, stop=int(tokens[1 + where]))
    )
    assert len(windows) == 2
    assert (windows[1].drafted, windows[1].accepted, len(windows[1].tokens)) == (
        K,
        accepted,
        emitted,
    )
    assert result.finish_reason == "stop"
    np.testing.assert_array_equal(result.tokens, tokens[: where + 2])
    assert (result.stats.replacements, result.stats.bonuses) == counted


def test_a_rejected_draft_does_not_stop() -> None:
    """A stop id that the head proposes and the model does not choose is forgotten."""
    prompt, tokens = PROMPTS[NAME], plain(NAME).tokens
    for stop in (support.NEVER, EOS):
        drafts = support.script([stop] * BUDGET, len(prompt))
        _, result = support.collected(stream(prompt, K, drafts=drafts))
        np.testing.assert_array_equal(result.tokens, tokens)
        assert (result.finish_reason, result.stats.accepted) == ("length", 0)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_stop_and_budget(k: int) -> None:
    """The budget's last token being a stop is a stop; one less is the end of the budget."""
    prompt, tokens = PROMPTS[NAME], plain(NAME).tokens
    right = misled(prompt, tokens, [], k)
    for last in range(9):
        stop = int(tokens[last])
        for drafts in (None, right):
            for budget, reason in ((last, "length"), (last + 1, "stop"), (last + 2, "stop")):
                if budget:
                    options = {"drafts": drafts, "stop": stop, "max_new_tokens": budget}
                    _, result = support.collected(stream(prompt, k, **options))
                    assert result.finish_reason == reason, (last, budget)
                    wanted = tokens[: min(budget, last + 1)]
                    np.testing.assert_array_equal(result.tokens, wanted)


@functools.cache
def eos_emitter() -> tuple[dict, np.ndarray, int]:
    """Parameters under which plain decoding emits end of sequence; its tokens; the first place.

    The output rows of that id and of one that is emitted often change places.
    """
    _, params = support.model()
    weight = leaf(params, "lm_head.weight")
    for other in dict.fromkeys(plain(NAME).tokens[5:].tolist()):
        swapped = weight.at[jnp.array([EOS, other])].set(weight[jnp.array([other, EOS])])
        exchanged = changed(params, "lm_head.weight", swapped)
        options = {"params": exchanged, "sampling": SamplingConfig(ignore_eos=True)}
        _, result = support.collected(stream(PROMPTS[NAME], 0, **options))
        places = np.flatnonzero(result.tokens == EOS)
        if places.size > 1 and places[0] > 2:
            return exchanged, result.tokens, int(places[0])
    raise AssertionError("no exchange makes end of sequence come twice")


@pytest.mark.parametrize("k", [0, K])
def test_end_of_sequence_needs_no_asking(k: int) -> None:
    """The model's own id ends a request beside the given ones; ``ignore_eos`` makes it a token."""
    params, tokens, first = eos_emitter()
    assert len(tokens) == BUDGET
    right = misled(PROMPTS[NAME], tokens, [], K)
    for drafts in (None, right) if k else (None,):
        options = {"params": params, "drafts": drafts}
        _, result = support.collected(stream(PROMPTS[NAME], k, **options))
        np.testing.assert_array_equal(result.tokens, tokens[: first + 1])
        assert result.finish_reason == "stop"
        options["sampling"] = SamplingConfig(ignore_eos=True)
        _, result = support.collected(stream(PROMPTS[NAME], k, **options))
        np.testing.assert_array_equal(result.tokens, tokens)
        assert result.finish_reason == "length"


def test_which_ids_stop() -> None:
    """Those of the request and the model's own, each once, sorted."""
    assert checks.stop_ids((), 512, 7).tolist() == [7]
    assert checks.stop_ids((9, 7, 3, 9), 512, 7).tolist() == [3, 7, 9]
    assert checks.stop_ids((9, 3), 512, None).tolist() == [3, 9]
    assert checks.stop_ids((), 512, None).tolist() == []
