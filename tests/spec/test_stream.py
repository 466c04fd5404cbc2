"""Streams: what they yield, what they leave behind, and that they do not meet."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from hipjax import Window
from tests.spec import support
from tests.spec.support import BUDGET, PROMPTS, misled, plain, quick, stream
from tests.spec.test_stats import Seen, check_identities

K = 3
pytestmark = pytest.mark.usefixtures("quick")
__all__ = ["quick"]


def mixed(name: str) -> jax.Array:
    """Drafts of which windows accept none, some and all."""
    return misled(PROMPTS[name], plain(name).tokens, [0, 2, 3, 1, 0, 3] * BUDGET, K)


def live() -> int:
    gc.collect()
    return len(jax.live_arrays())


@pytest.mark.parametrize("k", [0, K])
def test_windows(k: int) -> None:
    """The first holds the first token; together they are the result; none is empty."""
    drafts = mixed("short") if k else None
    windows, result = support.collected(stream(PROMPTS["short"], k, drafts=drafts))
    first, *later = windows
    assert (first.tokens.tolist(), first.drafted, first.accepted) == (
        [plain("short").tokens[0]],
        0,
        0,
    )
    assert all(1 <= len(window.tokens) <= window.drafted + 1 for window in windows)
    assert all(window.accepted <= window.drafted <= k for window in windows)
    assert all(window.tokens.dtype == np.int32 and window.tokens.ndim == 1 for window in windows)
    assert [window.finish_reason for window in windows] == [None] * len(later) + ["length"]
    np.testing.assert_array_equal(result.tokens, plain("short").tokens)
    if k:
        assert {window.accepted for window in later} == {0, 1, 2, 3}
    else:
        assert len(windows) == BUDGET


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("stop", [False, True])
def test_statistics(k: int, stop: bool) -> None:
    """After every window its statistics are what can be counted from the windows so far."""
    last = 9  # the window of right drafts in which it falls accepts it
    options = {"stop": int(plain("short").tokens[last])} if stop else {}
    drafts = mixed("short") if k else None
    seen: list[Seen] = []
    windows = list(stream(PROMPTS["short"], k, drafts=drafts, **options))
    for number, window in enumerate(windows):
        if number:
            seen.append(Seen(window.drafted, window.accepted, len(window.tokens), head=k > 0))
        check_identities(window.stats, seen)
    stats = windows[-1].stats
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    times = [window.stats.decode_seconds for window in windows]
    assert times == sorted(times) and times[0] == 0
    if k:
        accepted_stop = windows[-1].accepted == len(windows[-1].tokens)
        assert accepted_stop == stop
        assert stats.accepted > 0 and stats.replacements > 0 and stats.bonuses > 0


def test_a_cancelled_stream_leaves_nothing_behind() -> None:
    """Closed or dropped, early or late; and the next request starts from nothing."""
    name = "a chunk"
    drafts, expected = mixed(name), plain(name).tokens.tolist()
    for k in (0, K):
        list(stream(PROMPTS[name], k, drafts=drafts))  # what is made once has been made
        before = live()
        windows = stream(PROMPTS[name], k, drafts=drafts)
        found = [token for _ in range(3) for token in next(windows).tokens.tolist()]
        assert live() > before + 10  # negative control: a request does hold arrays
        windows.close()
        assert live() == before
        assert list(windows) == []
        assert found == expected[: len(found)]
        for read in (0, 1, 2):
            windows = stream(PROMPTS[name], k, drafts=drafts)
            for _ in range(read):
                next(windows)
            del windows
            assert live() == before
        later = [window.tokens.tolist() for window in stream(PROMPTS[name], k, drafts=drafts)]
        assert [token for tokens in later for token in tokens] == expected
        assert live() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hipjax")]


def test_a_finished_stream_leaves_nothing_behind() -> None:
    """Not even while the iterator is kept."""
    list(stream(PROMPTS["short"], K))
    before = live()
    windows = stream(PROMPTS["short"], K)
    assert sum(len(window.tokens) for window in windows) == BUDGET
    assert live() == before
    assert next(windows, None) is None


def test_an_unread_stream_holds_nothing() -> None:
    list(stream(PROMPTS["short"], K))
    before = live()
    windows = stream(PROMPTS["short"], K)
    assert live() == before
    windows.close()


def in_turn(streams: list[Iterator[Window]]) -> list[list[Window]]:
    """All windows of several streams, read one window at a time from each."""
    seen: list[list[Window]] = [[] for _ in streams]
    open_ones = list(enumerate(streams))
    while open_ones:
        for pair in list(open_ones):
            number, windows = pair
            window = next(windows, None)
            if window is None:
                open_ones.remove(pair)
            else:
                seen[number].append(window)
    return seen


def test_streams_do_not_influence_each_other() -> None:
    """Two that speculate, one plain, and one of the same prompt; each is as if it were alone."""
    requests = [("short", K, mixed("short")), ("a chunk", K, None), ("one token", 0, None)]
    requests += [("short", K, mixed("short")), ("three chunks", K, mixed("three chunks"))]
    together = in_turn([stream(PROMPTS[name], k, drafts=drafts) for name, k, drafts in requests])
    for (name, k, drafts), windows in zip(requests, together, strict=True):
        alone = list(stream(PROMPTS[name], k, drafts=drafts))
        assert [w.tokens.tolist() for w in windows] == [w.tokens.tolist() for w in alone]
        assert [(w.drafted, w.accepted) for w in windows] == [
            (w.drafted, w.accepted) for w in alone
        ]
        tokens = np.concatenate([window.tokens for window in windows])
        np.testing.assert_array_equal(tokens, plain(name).tokens)
    # They were not all in step.
    assert len({tuple(len(window.tokens) for window in windows) for windows in together}) > 1
