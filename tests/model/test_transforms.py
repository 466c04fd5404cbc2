"""The model under jit, vmap, scan, grad and remat; how often it is traced; what imports do."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops
from hipjax.model.mtp import extend, head_logits, head_prompt
from hipjax.model.params import flat
from hipjax.model.state import DecodeState
from hipjax.model.trunk import trunk_logits, trunk_prompt, trunk_rows
from tests.model import support
from tests.tiny import prompt_ids

TOLERANCE = 1e-5
LENGTH = 40  # past the budget of the sparse attention


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with support.quick_compilation():
        yield


def loss(params: Any, tokens: jax.Array, remat: bool = False) -> jax.Array:
    """Cross entropy of the next token by the trunk and of the one after by the head."""
    config, _ = support.model("tiny")
    count = support.counts(LENGTH)
    state = DecodeState.init(config, LENGTH, cache_dtype=jnp.float32)
    chunk, after = tokens[:, :LENGTH], tokens[:, 1 : LENGTH + 1]
    streams, _, _ = trunk_prompt(params, chunk, count, state, config=config, remat=remat)
    rows, _, _ = head_prompt(params, after, streams, state.head, state.length, count, config=config)
    total = jnp.float32(0)
    with ops.implementation("reference"):  # kernels have no gradients
        trunk, head = (
            trunk_logits(params, streams, config=config),
            head_logits(params, rows, config=config),
        )
    for logits, wanted in ((trunk, after), (head, tokens[:, 2 : LENGTH + 2])):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None], axis=-1)
        total -= jnp.mean(chosen)
    return total


@functools.cache
def training() -> tuple[jax.Array, Any, Any]:
    """Tokens, and the loss and gradient that the other tests look at."""
    _, params = support.model("tiny")
    tokens = support.ids(prompt_ids(support.CONFIGS["tiny"], 0, LENGTH + 2))
    value, gradient = jax.jit(jax.value_and_grad(loss))(params, tokens)
    return tokens, value, gradient


def test_which_parameters_have_a_gradient() -> None:
    """All but the indexers': a selection is a choice, which nothing flows back through."""
    _, params = support.model("tiny")
    _, value, gradient = training()
    assert np.isfinite(value)
    gradients = flat(gradient)
    assert gradients.keys() == flat(params).keys()
    assert all(np.isfinite(leaf).all() for leaf in gradients.values())
    without = {name for name, leaf in gradients.items() if not np.asarray(leaf).any()}
    indexers = {
        f"{owner}.self_attn.indexer.{part}.weight"
        for owner in ("model.layers.3", "mtp.layers.0")
        for part in ("index_qk_proj", "q_layernorm", "k_layernorm")
    }
    assert without == indexers


def test_gradient_is_the_slope() -> None:
    """Against a difference quotient along the gradient, and along another direction."""
    _, params = support.model("tiny")
    tokens, _, gradient = training()
    evaluate = jax.jit(loss)
    # On the host: for every shape of a weight these would be programs of their own.
    params, gradient = jax.tree.map(np.asarray, (params, gradient))
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), params)
    step = 1e-2
    for direction in (gradient, random):
        size = np.float32(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(direction))))
        unit = jax.tree.map(lambda leaf, size=size: leaf / size, direction)
        products = jax.tree.map(lambda g, u: (g * u).sum(), gradient, unit)
        slope = float(sum(jax.tree.leaves(products)))
        ends = []
        for signed in (np.float32(step), np.float32(-step)):
            moved = jax.tree.map(lambda p, u, s=signed: p + s * u, params, unit)
            ends.append(evaluate(moved, tokens))
        quotient = float(ends[0] - ends[1]) / (2 * step)
        assert abs(quotient - slope) <= 0.02 * abs(slope), (quotient, slope)
        assert abs(quotient - 1.1 * slope) > 0.02 * abs(slope)


def test_remat_changes_nothing() -> None:
    _, params = support.model("tiny")
    tokens, value, gradient = training()
    again = jax.jit(jax.value_and_grad(functools.partial(loss, remat=True)))(params, tokens)
    assert support.worst_difference(again[0], value) <= TOLERANCE
    assert support.worst_difference(again[1], gradient) <= TOLERANCE


@functools.cache
def batch() -> tuple[jax.Array, DecodeState]:
    """Four sequences of different lengths: their next two tokens, and the state."""
    config, params = support.model("tiny")
    whole = np.stack([prompt_ids(support.CONFIGS["tiny"], seed, 24) for seed in range(4)])
    state = support.fresh(config, batch=4, capacity=40, head=True)
    lengths = support.counts(20, 9, 1, 23)
    _, state, _ = support.prompt_chunk(params, jnp.asarray(whole), lengths, state, config=config)
    return jnp.asarray(whole[:, :2]), state


def test_vmap_over_sequences_equals_a_batch() -> None:
    config, params = support.model("tiny")
    tokens, state = batch()
    expected = support.decode_rows(params, tokens, state, config=config)
    kept = support.counts(2, 0, 1, 2)
    wanted = support.canonical(support.commit(expected, kept))

    def alone(tokens: jax.Array, state: DecodeState, kept: jax.Array) -> tuple[Any, DecodeState]:
        single = jax.tree.map(lambda leaf: leaf[None], state)
        tape = trunk_rows(params, tokens[None], single, config=config)
        after = tape.commit(kept[None]).canonical()
        return tape.streams[0], jax.tree.map(lambda leaf: leaf[0], after)

    streams, after = jax.jit(jax.vmap(alone))(tokens, state, kept)
    assert support.worst_difference(streams, expected.streams) <= TOLERANCE
    assert support.worst_difference(after, wanted) <= TOLERANCE
    assert support.worst_difference(streams, expected.streams[::-1]) > 100 * TOLERANCE


def test_vmap_over_prompts_equals_a_batch() -> None:
    config, params = support.model("tiny")
    _, state = batch()
    whole = jnp.stack([jnp.arange(s, s + 24) for s in (3, 50, 100, 400)]).astype(jnp.int32)
    counts = support.counts(12, 0, 7, 1)
    streams, expected, _ = support.prompt_chunk(params, whole, counts, state, config=config)

    def alone(tokens: jax.Array, count: jax.Array, state: DecodeState) -> tuple[Any, DecodeState]:
        single = jax.tree.map(lambda leaf: leaf[None], state)
        out, after, _ = trunk_prompt(params, tokens[None], count[None], single, config=config)
        return out[0], jax.tree.map(lambda leaf: leaf[0], after.canonical())

    found, after = jax.jit(jax.vmap(alone))(whole, counts, state)
    for number, count in enumerate(counts.tolist()):
        ours, theirs = found[number, :count], streams[number, :count]
        assert support.worst_difference(ours, theirs) <= TOLERANCE
    assert support.worst_difference(after, support.canonical(expected)) <= TOLERANCE


def greedy_step(
    params: Any, token: jax.Array, state: DecodeState, rows: int
) -> tuple[jax.Array, DecodeState]:
    """``rows`` copies of one token, of which one is kept: what comes next, and the state."""
    config, _ = support.model("tiny")
    one = jnp.ones_like(token)
    tape = trunk_rows(params, jnp.tile(token[:, None], rows), state, config=config)
    following = ops.argmax(trunk_logits(params, tape.streams[:, 0], config=config))[0]
    follower = jnp.tile(following[:, None], rows)
    state = extend(params, follower, tape.streams, tape.commit(one), one, config=config)
    return following, state


def test_one_trace_per_number_of_rows() -> None:
    """Lengths, tokens and counts are traced; only the number of rows is not."""
    _, params = support.model("tiny")
    tokens, state = batch()
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(greedy_step, n=2), static_argnames="rows")
    token = tokens[:, 0]
    for rows in (1, 2, 1, 2, 1):
        token, state = step(params, token, state, rows)
    with pytest.raises(AssertionError, match="is traced > 2 times"):
        step(params, token, state, 3)


def test_scan_over_steps_equals_a_loop() -> None:
    _, params = support.model("tiny")
    tokens, start = batch()

    def body(carry: tuple[jax.Array, DecodeState], _: None) -> tuple[Any, jax.Array]:
        token, state = greedy_step(params, *carry, rows=1)
        return (token, state), token

    scanned = jax.jit(lambda carry: jax.lax.scan(body, carry, None, length=6))
    (_, state), found = scanned((tokens[:, 0], start))
    step = jax.jit(greedy_step, static_argnames="rows")
    token, expected, wanted = tokens[:, 0], start, []
    for _ in range(6):
        token, expected = step(params, token, expected, rows=1)
        wanted.append(np.asarray(token))
    np.testing.assert_array_equal(found, np.stack(wanted))
    assert len({tuple(row) for row in np.stack(wanted).tolist()}) > 1
    both = (support.canonical(each) for each in (state, expected))
    assert support.worst_difference(*both) <= TOLERANCE


def test_without_an_outer_jit() -> None:
    config, params = support.model("tiny")
    tokens, state = batch()
    expected = support.decode_rows(params, tokens, state, config=config)
    found = trunk_rows(params, tokens, state, config=config)
    assert support.worst_difference(found.streams, expected.streams) <= TOLERANCE


def test_imports_touch_no_device() -> None:
    code = (
        "import hipjax, hipjax.model.params, hipjax.model.mtp, hipjax.ffi.ops\n"
        "from hipjax.model.config import ModelConfig\n"
        "config = ModelConfig.from_file('tests/configs/flash_next.json')\n"
        "from jax._src.xla_bridge import backends_are_initialized\n"
        "assert not backends_are_initialized()\n"
        "import jax.numpy as jnp; jnp.zeros(())\n"
        "assert backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
