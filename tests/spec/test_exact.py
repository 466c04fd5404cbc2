"""Greedy speculation equals plain decoding bit for bit: every token, and every state."""

from __future__ import annotations

import itertools

import jax
import pytest

from hipjax.ffi import ops, reference
from tests.spec.exact import (
    BATCHES,
    Trail,
    batch_of,
    check_every_depth,
    check_mixed_depths,
    decoded,
    differences,
    plain,
)


@pytest.mark.parametrize("batch", BATCHES)
def test_every_token_and_every_state(batch: int) -> None:
    check_every_depth(batch, "float32")


@pytest.mark.parametrize("batch", BATCHES)
def test_depths_mixed_within_a_request(batch: int) -> None:
    check_mixed_depths(batch, "float32")


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
        few = batch_of(0)[:2]
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
