"""The verdict on a window: a table worked out by hand, and a slow reference.

Token ids here are small letters of no model: 1 to 6 are ordinary, 8 and 9 end a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipjax.spec import accept

EOS, OTHER = 8, 9


class Case(NamedTuple):
    """One window of one sequence, and what it comes to."""

    drafts: Sequence[int]
    picks: Sequence[int]
    allowed: int
    stops: Sequence[int]
    accepted: int
    emitted: list[int]
    stopped: bool


# The emitted tokens are written out, so that a replacement or bonus is seen to be the target's.
TABLE = {
    # No stop in sight: the longest agreeing prefix, then the target's token of the next row.
    "all rejected": Case([1, 2, 3], [4, 2, 3, 5], 3, [EOS], 0, [4], False),
    "all accepted": Case([1, 2, 3], [1, 2, 3, 5], 3, [EOS], 3, [1, 2, 3, 5], False),
    "one accepted": Case([1, 2, 3], [1, 4, 3, 5], 3, [EOS], 1, [1, 4], False),
    "last rejected": Case([1, 2, 3], [1, 2, 4, 5], 3, [EOS], 2, [1, 2, 4], False),
    # Row 2 agrees with its draft, but was computed after a draft that is wrong.
    "agreement after a mismatch": Case([1, 2, 3], [4, 5, 3, 6], 3, [], 0, [4], False),
    "replacement equals a later draft": Case([1, 2, 3], [2, 3, 5, 6], 3, [], 0, [2], False),
    "drafts repeat": Case([1, 1, 1], [1, 1, 2, 1], 3, [], 2, [1, 1, 2], False),
    "one draft": Case([1], [1, 2], 1, [], 1, [1, 2], False),
    "one draft rejected": Case([1], [3, 2], 1, [], 0, [3], False),
    # The budget allows fewer drafts than there are: the row after the last allowed one is the
    # bonus, whether its draft agrees or not.
    "none allowed": Case([1, 2, 3], [1, 2, 3, 5], 0, [EOS], 0, [1], False),
    "none allowed, wrong": Case([1, 2, 3], [4, 2, 3, 5], 0, [EOS], 0, [4], False),
    "one allowed": Case([1, 2, 3], [1, 2, 3, 5], 1, [EOS], 1, [1, 2], False),
    "one allowed, wrong": Case([1, 2, 3], [4, 2, 3, 5], 1, [EOS], 0, [4], False),
    "two allowed": Case([1, 2, 3], [1, 2, 3, 5], 2, [EOS], 2, [1, 2, 3], False),
    # An accepted stop is the window's last token: accepted and emitted are equal.
    "stop as draft 0": Case([EOS, 2, 3], [EOS, 2, 3, 5], 3, [EOS], 1, [EOS], True),
    "stop as middle draft": Case([1, EOS, 3], [1, EOS, 3, 5], 3, [EOS], 2, [1, EOS], True),
    "stop as last draft": Case([1, 2, EOS], [1, 2, EOS, 5], 3, [EOS], 3, [1, 2, EOS], True),
    "stop twice": Case([EOS, EOS, 3], [EOS, EOS, 3, 5], 3, [EOS], 1, [EOS], True),
    "stop, then a mismatch": Case([EOS, 2, 3], [EOS, 4, 3, 5], 3, [EOS], 1, [EOS], True),
    # As replacement or bonus it ends the request too; everything before it stays.
    "stop as first replacement": Case([1, 2, 3], [EOS, 2, 3, 5], 3, [EOS], 0, [EOS], True),
    "stop as replacement": Case([1, 2, 3], [1, EOS, 3, 5], 3, [EOS], 1, [1, EOS], True),
    "stop as last replacement": Case([1, 2, 3], [1, 2, EOS, 5], 3, [EOS], 2, [1, 2, EOS], True),
    "stop as bonus": Case([1, 2, 3], [1, 2, 3, EOS], 3, [EOS], 3, [1, 2, 3, EOS], True),
    "stop as early bonus": Case([1, EOS, 3], [1, EOS, 3, 5], 1, [EOS], 1, [1, EOS], True),
    "stop as draft 0, none allowed": Case([EOS, 2], [EOS, 2, 3], 0, [EOS], 0, [EOS], True),
    # A stop that nothing emits does not stop.
    "stop past the mismatch": Case([1, 2, EOS], [4, 2, EOS, 5], 3, [EOS], 0, [4], False),
    "stop past the budget": Case([1, 2, EOS], [1, 2, EOS, 5], 1, [EOS], 1, [1, 2], False),
    "stop is a rejected draft": Case([1, EOS, 3], [1, 4, 3, 5], 3, [EOS], 1, [1, 4], False),
    "stop is the first draft, rejected": Case([EOS, 2, 3], [4, 2, 3, 5], 3, [EOS], 0, [4], False),
    "stop is the last draft, rejected": Case(
        [1, 2, EOS], [1, 2, 4, EOS], 3, [EOS], 2, [1, 2, 4], False
    ),
    # Several stops, in either order; none.
    "first of two stops": Case(
        [1, EOS, OTHER], [1, EOS, OTHER, 5], 3, [EOS, OTHER], 2, [1, EOS], True
    ),
    "second of two stops": Case(
        [1, OTHER, EOS], [1, OTHER, EOS, 5], 3, [EOS, OTHER], 2, [1, OTHER], True
    ),
    "one stop is a draft, the other replaces it": Case(
        [EOS, 2, 3], [OTHER, 2, 3, 5], 3, [EOS, OTHER], 0, [OTHER], True
    ),
    "no stops": Case([EOS, 2, 3], [EOS, 2, 3, OTHER], 3, [], 3, [EOS, 2, 3, OTHER], False),
    "no stops, rejected": Case([1, EOS, 3], [1, 4, 3, EOS], 3, [], 1, [1, 4], False),
    # Plain decoding is a window of no drafts.
    "no drafts": Case([], [3], 0, [EOS], 0, [3], False),
    "no drafts, stop": Case([], [EOS], 0, [EOS], 0, [EOS], True),
    "no drafts, no stops": Case([], [EOS], 0, [], 0, [EOS], False),
}

Judge = Callable[[Sequence[int], Sequence[int], int, Sequence[int]], tuple[int, int, bool]]


def reference(
    drafts: Sequence[int], picks: Sequence[int], allowed: int, stops: Sequence[int]
) -> tuple[int, int, bool]:
    """Accepted, emitted, stopped, token by token (decoding-spec 6.1 and 7)."""
    for index in range(allowed):
        if drafts[index] != picks[index]:
            return index, index + 1, picks[index] in stops
        if drafts[index] in stops:
            return index + 1, index + 1, True
    return allowed, allowed + 1, picks[allowed] in stops


def judged(cases: Sequence[Case]) -> list[tuple[int, int, bool]]:
    """The verdict on a batch of cases of one shape."""
    verdict = jax.jit(accept.greedy)(
        jnp.array([case.drafts for case in cases], jnp.int32).reshape(len(cases), -1),
        jnp.array([case.picks for case in cases], jnp.int32),
        jnp.array([case.allowed for case in cases], jnp.int32),
        jnp.array(cases[0].stops, jnp.int32),
    )
    assert [part.dtype for part in verdict] == [jnp.int32, jnp.int32, jnp.bool_]
    assert all(part.shape == (len(cases),) for part in verdict)
    return [
        (int(a), int(e), bool(s))
        for a, e, s in zip(*(np.asarray(part) for part in verdict), strict=True)
    ]


def expected(case: Case) -> tuple[int, int, bool]:
    return case.accepted, len(case.emitted), case.stopped


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_table(case: Case) -> None:
    assert judged([case]) == [expected(case)]
    assert list(case.picks[: len(case.emitted)]) == case.emitted


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_reference_on_the_table(case: Case) -> None:
    """The reference was not written from the table; where both agree, both are likely right."""
    assert reference(*case[:4]) == expected(case)


def test_rows_of_a_batch_are_independent() -> None:
    """All cases of one shape at once, in two orders, give what each gives alone."""
    shapes: dict[tuple[int, tuple[int, ...]], list[Case]] = {}
    for case in TABLE.values():
        shapes.setdefault((len(case.drafts), tuple(case.stops)), []).append(case)
    assert max(len(cases) for cases in shapes.values()) > 10
    for cases in shapes.values():
        assert judged(cases) == [expected(case) for case in cases]
        assert judged(cases[::-1]) == [expected(case) for case in cases[::-1]]


@st.composite
def batches(draw: st.DrawFn) -> list[Case]:
    """Four windows of one shape; four ids only, so that drafts often agree and often stop."""
    count, stops = draw(st.integers(0, 4)), draw(st.sampled_from([(), (3,), (2, 3)]))
    tokens = st.integers(0, 3)
    cases = []
    for _ in range(4):
        drafts = draw(st.lists(tokens, min_size=count, max_size=count))
        same = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        own = draw(st.lists(tokens, min_size=count + 1, max_size=count + 1))
        picks = [d if s else o for d, s, o in zip(drafts, same, own, strict=False)] + own[-1:]
        cases.append(Case(drafts, picks, draw(st.integers(0, count)), stops, 0, [], False))
    return cases


@given(batches())
def test_equals_the_reference(cases: list[Case]) -> None:
    found = judged(cases)
    assert found == [reference(*case[:4]) for case in cases]
    for (accepted, emitted, stopped), case in zip(found, cases, strict=True):
        assert accepted <= case.allowed
        assert accepted <= emitted <= accepted + 1
        assert emitted == accepted + 1 or stopped  # only an accepted stop goes without a follower
        assert not set(case.picks[: emitted - 1]) & set(case.stops)


@given(batches(), st.integers(0, 3))
def test_what_lies_past_the_verdict_does_not_matter(cases: list[Case], token: int) -> None:
    before = judged(cases)
    changed = []
    for case, (_, emitted, _) in zip(cases, before, strict=True):
        drafts = [*case.drafts[:emitted], *[token] * (len(case.drafts) - emitted)]
        picks = [*case.picks[:emitted], *[token] * (len(case.picks) - emitted)]
        changed.append(case._replace(drafts=drafts, picks=picks))
    assert judged(changed) == before


def test_under_vmap() -> None:
    cases = [case for case in TABLE.values() if len(case.drafts) == 3 and case.stops == [EOS]]
    drafts, picks, allowed = (
        jnp.array([case[part] for case in cases], jnp.int32)[:, None] for part in range(3)
    )
    mapped = jax.vmap(accept.greedy, in_axes=(0, 0, 0, None))
    verdict = mapped(drafts, picks, allowed, jnp.array([EOS]))
    rows = zip(*(np.asarray(part)[:, 0].tolist() for part in verdict), strict=True)
    assert list(rows) == [expected(case) for case in cases]


def _bonus_after_an_accepted_stop(d: Sequence[int], p: Sequence[int], n: int, s: Sequence[int]):
    accepted, emitted, stopped = reference(d, p, n, s)
    return accepted, accepted + 1, stopped and emitted == accepted + 1


def _agreements_anywhere(d: Sequence[int], p: Sequence[int], n: int, s: Sequence[int]):
    same = sum(a == b for a, b in zip(d[:n], p, strict=False))
    return same, same + 1, p[same] in s


def _stops_looked_up_among_drafts(d: Sequence[int], p: Sequence[int], n: int, s: Sequence[int]):
    accepted, emitted, _ = reference(d, p, n, s)
    return accepted, emitted, any(token in s for token in d[:emitted])


WRONG: dict[str, Judge] = {
    "bonus after an accepted stop": _bonus_after_an_accepted_stop,
    "agreements anywhere": _agreements_anywhere,
    "stops among the drafts": _stops_looked_up_among_drafts,
    "stops ignored": lambda d, p, n, s: reference(d, p, n, ()),
    "budget ignored": lambda d, p, n, s: reference(d, p, len(d), s),
    "first stop only": lambda d, p, n, s: reference(d, p, n, s[:1]),
    "no bonus": lambda d, p, n, s: (lambda a, e, z: (a, max(1, min(e, n)), z))(
        *reference(d, p, n, s)
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_table_notices(wrong: Judge) -> None:
    """Negative control: each of these rules fails on the table."""
    failing = [name for name, case in TABLE.items() if wrong(*case[:4]) != expected(case)]
    assert failing
