"""What a request counts, and the identities between the counts (decoding-spec 16)."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipjax import Stats


class Seen(NamedTuple):
    """One window as the statistics are told of it."""

    drafted: int
    accepted: int
    emitted: int
    head: bool = True
    lost: int = 0


# First the window, then what it adds: replacements, bonuses. A window of the head ends in one
# of three ways: a replacement, a bonus, an accepted draft that ends the request.
ENDS = {
    "all rejected": (Seen(3, 0, 1), 1, 0),
    "some accepted": (Seen(3, 2, 3), 1, 0),
    "all accepted": (Seen(3, 3, 4), 0, 1),
    "accepted stop in the middle": (Seen(3, 2, 2), 0, 0),
    "accepted stop at the end": (Seen(3, 3, 3), 0, 0),
    "no room for a draft": (Seen(0, 0, 1), 0, 1),
    "plain": (Seen(0, 0, 1, head=False), 0, 0),
}


def counted(windows: list[Seen]) -> Stats:
    stats = Stats(emitted=1)
    for seen in windows:
        stats = stats.after_window(**seen._asdict(), seconds=0.25)
    return stats


def check_identities(stats: Stats, windows: list[Seen]) -> None:
    """Everything the counts owe each other, and the windows they were made from."""
    heads = [seen for seen in windows if seen.head]
    assert stats.emitted == 1 + sum(seen.emitted for seen in windows)
    assert stats.drafted == sum(seen.drafted for seen in windows) == sum(stats.drafted_by_depth)
    assert stats.accepted == sum(seen.accepted for seen in windows) == sum(stats.accepted_by_depth)
    assert stats.accepted <= stats.drafted
    assert (stats.mtp_windows, stats.ar_windows) == (len(heads), len(windows) - len(heads))
    assert stats.windows == len(windows)
    stopped = sum(seen.accepted == seen.emitted for seen in heads)
    assert stats.replacements + stats.bonuses + stopped == stats.mtp_windows
    assert stats.emitted - 1 == (
        stats.accepted + stats.replacements + stats.bonuses + stats.ar_windows
    )
    depths = len(stats.drafted_by_depth)
    assert depths == len(stats.accepted_by_depth) == max((s.drafted for s in windows), default=0)
    for depth in range(depths):
        assert stats.drafted_by_depth[depth] == sum(seen.drafted > depth for seen in windows)
        assert stats.accepted_by_depth[depth] == sum(seen.accepted > depth for seen in windows)
    assert stats.nonfinite_rows == sum(seen.lost for seen in windows)


@pytest.mark.parametrize(("seen", "replacements", "bonuses"), ENDS.values(), ids=ENDS)
def test_how_a_window_ends(seen: Seen, replacements: int, bonuses: int) -> None:
    stats = counted([seen])
    assert (stats.replacements, stats.bonuses) == (replacements, bonuses)
    check_identities(stats, [seen])


def test_a_request_by_hand() -> None:
    windows = [Seen(3, 2, 3), Seen(3, 3, 4, lost=1), Seen(2, 0, 1), Seen(1, 1, 1)]
    stats = counted(windows)
    assert stats == Stats(
        emitted=10,
        mtp_windows=4,
        drafted=9,
        accepted=6,
        drafted_by_depth=(4, 3, 2),
        accepted_by_depth=(3, 2, 1),
        replacements=2,
        bonuses=1,
        nonfinite_rows=1,
        decode_seconds=1.0,
    )
    assert stats.acceptance_rate == 0.667  # three decimals
    assert stats.tokens_per_window == 9 / 4
    assert stats.tokens_per_second == 9.0
    check_identities(stats, windows)


def test_without_windows() -> None:
    for stats in (Stats(), Stats(emitted=1)):
        assert (stats.windows, stats.acceptance_rate) == (0, 0.0)
        assert (stats.tokens_per_window, stats.tokens_per_second) == (0.0, 0.0)
    check_identities(Stats(emitted=1), [])


def test_as_json() -> None:
    stats = counted([Seen(3, 2, 3), Seen(1, 0, 1)])
    loaded = json.loads(json.dumps(stats.to_dict()))
    assert loaded["accepted_by_depth"] == [1, 1, 0]
    for name in ("acceptance_rate", "tokens_per_window", "tokens_per_second", "emitted"):
        assert loaded[name] == getattr(stats, name)
    assert counted([]).to_dict().keys() == loaded.keys()


@st.composite
def seen(draw: st.DrawFn) -> Seen:
    if draw(st.booleans()):
        return Seen(0, 0, 1, head=False, lost=draw(st.integers(0, 1)))
    drafted = draw(st.integers(0, 10))
    accepted = draw(st.integers(0, drafted))
    stop = accepted > 0 and draw(st.booleans())
    emitted = accepted + (not stop)
    return Seen(drafted, accepted, emitted, lost=draw(st.integers(0, emitted)))


@given(st.lists(seen(), max_size=12))
def test_identities(windows: list[Seen]) -> None:
    stats = counted(windows)
    check_identities(stats, windows)
    assert stats.acceptance_rate == (
        round(stats.accepted / stats.drafted, 3) if stats.drafted else 0
    )
    if windows:
        assert stats.tokens_per_window == (stats.emitted - 1) / len(windows)


@given(st.lists(seen(), max_size=8), st.randoms())
def test_order_does_not_matter(windows: list[Seen], random: object) -> None:
    shuffled = list(windows)
    random.shuffle(shuffled)
    assert counted(shuffled) == counted(windows)


def test_a_wrong_count_is_noticed() -> None:
    """Negative control: the identities do not hold for the counts of other windows."""
    windows = [Seen(3, 2, 3), Seen(3, 3, 4), Seen(0, 0, 1, head=False)]
    stats = counted(windows)
    others = (
        Seen(3, 1, 2),  # one less accepted
        Seen(2, 2, 3),  # one less drafted
        Seen(3, 2, 2),  # a stop in place of a replacement
        Seen(3, 2, 3, lost=1),
        Seen(3, 2, 3, head=False),
    )
    for other in others:
        with pytest.raises(AssertionError):
            check_identities(stats, [other, *windows[1:]])
