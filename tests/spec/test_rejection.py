"""A rejected draft is forgotten: after every window the state is that of plain decoding.

Every array of trunk and head is compared, with the head of plain decoding kept level by windows
of no drafts. The faults that such a comparison is for are then put in on purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.model.mtp import extend, head_rows
from hipjax.model.state import AttentionState, DecodeState, DecodeTape, DeltaNetState
from hipjax.spec import step as steps
from tests.model.support import canonical, changed, leaf, worst_difference
from tests.spec import support
from tests.spec.support import PROMPTS, copied, misled, quick, unpacked
from tests.tiny import TINY

TOLERANCE = 1e-5
STEPS = 40
K = 3
pytestmark = pytest.mark.usefixtures("quick")
__all__ = ["quick"]

Start = tuple[DecodeState, jax.Array]


def filled(*prompts: np.ndarray) -> Start:
    """A state that has consumed the prompts, and the first tokens."""
    config, params = support.model()
    state = DecodeState.init(config, support.CONTEXT, batch=len(prompts), cache_dtype=jnp.float32)
    seed = jnp.zeros(len(prompts), jnp.int32)
    for begin in range(0, max(map(len, prompts)), 64):
        pieces = [prompt[begin : begin + 64] for prompt in prompts]
        tokens = np.zeros((len(prompts), 64), np.int32)
        for row, piece in zip(tokens, pieces, strict=True):
            row[: len(piece)] = piece
        after = [p[begin + 64] if begin + 64 < len(p) else -1 for p in prompts]
        counts = jnp.array([len(piece) for piece in pieces], jnp.int32)
        arguments = (jnp.asarray(tokens), counts, jnp.array(after, jnp.int32))
        state, seed, _ = support.prefill(params, state, *arguments, config=config)
    return state, seed


def advance(
    params: Any, start: Start, budget: Sequence[int], k: int, program: Any = None
) -> tuple[Start, Any]:
    """One window; the state that it starts from may be used again."""
    state, seed = start
    config, _ = support.model()
    stops = jnp.array([TINY["text_config"]["eos_token_id"], support.NEVER], jnp.int32)
    state, seed, _, report = (program or support.window)(
        params,
        copied(state),
        jnp.copy(seed),
        jnp.array(budget, jnp.int32),
        stops,
        config=config,
        drafts=k,
    )
    return (state, seed), unpacked(report)


@functools.cache
def plain(name: str) -> tuple[np.ndarray, list[DecodeState]]:
    """Tokens of plain decoding, and the canonical state before each but the first."""
    _, params = support.model()
    start = filled(PROMPTS[name])
    tokens, states = [int(start[1][0])], [canonical(start[0])]
    for _ in range(STEPS):
        start, out = advance(params, start, [STEPS], 0)
        tokens.append(int(out.tokens[0, 0]))
        states.append(canonical(start[0]))
    return np.array(tokens), states


def pattern(k: int) -> list[int]:
    """Accepted drafts, window by window: every number, and after every other number or nearly."""
    return ([0, k, k, 0, 0] + [n for low in range(k + 1) for n in (low, k - low)])[: 3 * k + 4]


def compare(name: str, k: int, params: Any, program: Any = None) -> list[tuple[int, int]]:
    """Follows a request of scripted drafts; the state must be plain decoding's all the way.

    Returns:
      Drafts accepted and tokens emitted, window by window.
    """
    tokens, states = plain(name)
    start = filled(PROMPTS[name])
    place, seen = 0, []
    while place + k + 1 <= STEPS and len(seen) < len(pattern(k)):
        start, out = advance(params, start, [STEPS], k, program)
        emitted = int(out.emitted[0])
        place += emitted
        found = canonical(start[0])
        assert worst_difference(found, states[place]) <= TOLERANCE, (len(seen), seen)
        assert out.tokens[0, :emitted].tolist() == tokens[place - emitted + 1 : place + 1].tolist()
        seen.append((int(out.accepted[0]), emitted))
    return seen


@pytest.mark.parametrize("name", ["short", "one above a chunk"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_state_after_every_window(name: str, k: int) -> None:
    tokens, _ = plain(name)
    _, params = support.model()
    script = misled(PROMPTS[name], tokens, pattern(k), k)
    seen = compare(name, k, params | {"script": script})
    assert [accepted for accepted, _ in seen] == pattern(k)[: len(seen)]
    assert {0, k} <= {accepted for accepted, _ in seen} and len(seen) > 6
    assert all(emitted == accepted + 1 for accepted, emitted in seen)


def test_with_drafts_outside_the_vocabulary() -> None:
    """Whatever such a row reads and writes is gone with it."""
    tokens, _ = plain("short")
    _, params = support.model()
    for beyond, every in ((0, 1), (0, 2), (5, 2), (2**30, 3)):
        drafts = tokens.copy()
        drafts[1::every] = TINY["text_config"]["vocab_size"] + beyond
        script = support.script(drafts.tolist(), len(PROMPTS["short"]))
        seen = compare("short", K, params | {"script": script})
        assert {accepted for accepted, _ in seen} <= set(range(every))


def test_with_a_broken_head() -> None:
    """Its own rows hold NaN, also past their length; the trunk is plain decoding's."""
    tokens, states = plain("short")
    _, params = support.model()
    broken = changed(params, "mtp.fc_hidden.weight", leaf(params, "mtp.fc_hidden.weight") * jnp.nan)
    start, place = filled(PROMPTS["short"]), 0
    for _ in range(5):
        start, out = advance(broken, start, [STEPS], K)
        place += int(out.emitted[0])
        found = canonical(start[0]).replace(head=None)
        assert worst_difference(found, states[place].replace(head=None)) <= TOLERANCE
        assert int(start[1][0]) == tokens[place]


NO_FAULT, FAULTS = (
    0,
    (
        "DeltaNet keeps one row more",
        "attention keeps one row more",
        "n-gram layer keeps one row more",
        "trunk's streams are of one row more",
        "head's pending keys are of its drafts",
        "head's rows are fed with its own streams",
        "head keeps one row more",
    ),
)


def _faulty(params: Any, state: DecodeState, *rest: Any, **static: Any) -> Any:
    """The window with the fault that ``params["fault"]`` numbers, from 1."""
    fault = params["fault"]
    commit = DecodeTape.commit

    def chosen(number: int, wrong: Any, right: Any) -> Any:
        return jax.tree.map(lambda w, r: jnp.where(fault == number, w, r), wrong, right)

    def commit_more(tape: DecodeTape, kept: jax.Array) -> DecodeState:
        right = commit(tape, kept)
        more = commit(tape, jnp.minimum(kept + 1, tape.streams.shape[1]))
        layers = []
        for wrong, layer in zip(more.layers, right.layers, strict=True):
            number = 1 if isinstance(layer.mixer, DeltaNetState) else 2
            mixer = chosen(number, wrong.mixer, layer.mixer)
            layers.append(layer.replace(mixer=mixer, ple=chosen(3, wrong.ple, layer.ple)))
        return right.replace(layers=tuple(layers), carry=chosen(4, more.carry, right.carry))

    def not_rewound(late: AttentionState, earlier: AttentionState) -> AttentionState:
        return late.replace(pending=chosen(5, late.pending, earlier.pending))

    def extend_wrongly(
        params: Any, tokens: Any, carries: Any, state: DecodeState, kept: Any, *, config: Any
    ) -> DecodeState:
        before = state.length - kept
        own, _ = head_rows(params, tokens, carries, state.head, before, config=config)
        fed = jnp.concatenate([carries[:, :1], own[:, :-1]], axis=1)
        carries = chosen(6, fed, carries)
        right = extend(params, tokens, carries, state, kept, config=config)
        over = jnp.minimum(kept + 1, tokens.shape[1])
        longer = state.replace(length=before + over)
        more = extend(params, tokens, carries, longer, over, config=config)
        return right.replace(head=chosen(7, more.head, right.head))

    with (
        mock.patch.object(DecodeTape, "commit", commit_more),
        mock.patch.object(AttentionState, "rewound", not_rewound),
        mock.patch.object(steps, "extend", extend_wrongly),
    ):
        return support._window(params, state, *rest, **static)


faulty = jax.jit(
    _faulty,
    static_argnames=("config", "drafts"),
    donate_argnames="state",
    compiler_options=support._QUICK,
)


def test_faults_are_noticed() -> None:
    """Negative control: the same comparison fails on every one, and on none without."""
    tokens, _ = plain("short")
    _, params = support.model()
    params = params | {"script": misled(PROMPTS["short"], tokens, pattern(K), K)}
    seen = compare("short", K, params | {"fault": jnp.int32(NO_FAULT)}, faulty)
    assert len(seen) > 6
    for number, name in enumerate(FAULTS, start=1):
        with pytest.raises(AssertionError):
            compare("short", K, params | {"fault": jnp.int32(number)}, faulty)
            pytest.fail(f"not noticed: {name}", pytrace=False)


def test_a_batch_is_each_of_its_sequences() -> None:
    """Three of different lengths, seeds, drafts and budgets, of which one has finished."""
    names, budgets = ("short", "one above a chunk", "one token"), [9, 0, 4]
    _, params = support.model()
    tokens = [plain(name)[0] for name in names]
    accepted = ([0, 2, 3], [3, 3], [1, 0, 2])
    scripts = [
        misled(PROMPTS[name], each, numbers, K)
        for name, each, numbers in zip(names, tokens, accepted, strict=True)
    ]
    together = params | {"script": jnp.concatenate(scripts)}
    batch = filled(*(PROMPTS[name] for name in names))
    begun = jax.tree.map(np.asarray, canonical(batch[0]))
    alone = [filled(PROMPTS[name]) for name in names]
    while any(budgets):
        batch, out = advance(together, batch, budgets, K)
        for number, script in enumerate(scripts):
            single, report = advance(
                params | {"script": script}, alone[number], [budgets[number]], K
            )
            emitted = int(out.emitted[number])
            assert [int(part[number]) for part in out[1:]] == [int(part[0]) for part in report[1:]]
            assert out.tokens[number, :emitted].tolist() == report.tokens[0, :emitted].tolist()
            one = jax.tree.map(lambda part, n=number: part[n][None], canonical(batch[0]))
            assert worst_difference(one, canonical(single[0])) <= TOLERANCE
            if budgets[number]:
                alone[number] = single
                assert int(batch[1][number]) == int(single[1][0])
            budgets[number] -= emitted
    # The finished one kept every bit, and said so.
    ended = jax.tree.map(np.asarray, canonical(batch[0]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), ended, begun)
    assert int(out.emitted[1]) == int(out.drafted[1]) == int(out.accepted[1]) == 0
    assert not out.stopped[1]
    assert np.asarray(batch[0].length).tolist() == [40 + 9, 65, 1 + 4]
