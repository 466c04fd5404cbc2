"""Greedy speculation equals plain decoding bit for bit: every token, and every state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from hipjax.ffi import ops, reference
from tests.spec.exact import Trail, decoded, differences, prompts

COUNT, BATCH, NEW_TOKENS = 60, 20, 256
BATCHES = [prompts(COUNT)[i : i + BATCH] for i in range(0, COUNT, BATCH)]
RECURRENT = ("float32", "q8")


@functools.cache
def plain(batch: int, recurrent: str) -> Trail:
    return decoded(BATCHES[batch], NEW_TOKENS, recurrent, itertools.repeat(0))


def mixed(seed: int) -> Iterator[int]:
    """Depths 0 to 7 in no order."""
    rng = np.random.default_rng(seed)
    while True:
        yield int(rng.integers(0, 8))


@pytest.mark.parametrize("recurrent", RECURRENT)
@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_every_token_and_every_state(batch: int, recurrent: str) -> None:
    wanted = plain(batch, recurrent)
    assert all(len(tokens) == NEW_TOKENS for tokens in wanted.tokens)
    for depth in range(1, 8):
        found = decoded(BATCHES[batch], NEW_TOKENS, recurrent, itertools.repeat(depth))
        assert not differences(found, wanted), depth
        assert found.accepted > 100  # speculation did happen


@pytest.mark.parametrize("recurrent", RECURRENT)
@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_depths_mixed_within_a_request(batch: int, recurrent: str) -> None:
    found = decoded(BATCHES[batch], NEW_TOKENS, recurrent, mixed(batch))
    assert not differences(found, plain(batch, recurrent))


def test_products_of_xla_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with XLA's dots in place of the row products, some state differs."""
    if jax.default_backend() != "cpu":
        pytest.skip("on an H200 XLA's dots of so small a model gave the same bits; a CPU's do not")

    def dots(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(reference.matrix_product(x, weight) for weight in weights)

    monkeypatch.setattr(ops, "row_products", dots)
    monkeypatch.setattr(ops, "row_product", reference.matrix_product)
    jax.clear_caches()
    try:
        few = BATCHES[0][:2]
        wanted = decoded(few, 64, "float32", itertools.repeat(0))
        found = decoded(few, 64, "float32", itertools.repeat(3))
        assert differences(found, wanted)
    finally:
        monkeypatch.undo()
        jax.clear_caches()


def test_a_single_bit_would_be_seen() -> None:
    """Negative control of the comparison: one state with one bit more, one other token."""
    wanted = plain(0, "float32")
    assert not differences(wanted, wanted)
    mark = wanted.states[3][100]
    spoiled = [dict(states) for states in wanted.states]
    spoiled[3][100] = bytes([mark[0] ^ 1]) + mark[1:]
    assert differences(Trail(wanted.tokens, spoiled, 0), wanted) == [
        "request 3: after 100 tokens, arrays [0] differ"
    ]
    tokens = [list(each) for each in wanted.tokens]
    tokens[5][7] += 1
    assert "request 5: token 7 " in differences(Trail(tokens, wanted.states, 0), wanted)[0]
