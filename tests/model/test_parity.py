"""The trunk against stored logits and layer outputs of transformers (tools/make_goldens.py).

The goldens are float32, and so is everything here. Two correct float32 implementations differ
by up to 9e-6 on these weights, at a standard deviation of the logits of about 1.9.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.model.config import ModelConfig
from hipjax.model.ngram import row_ids
from hipjax.model.residual import HyperConnection
from tests.model import support

GOLDENS = Path(__file__).parent.parent / "goldens"
TOLERANCE = 2e-5
LAYER_TOLERANCE = 1e-5  # of an array's largest value, see support.worst_difference
LENGTHS = (1, 2, 13, 40, 97)
CHUNKS = (1, 7, 64)
CASES = (("tiny", 0), ("tiny", 1), ("tiny", 2), ("two_ple", 0), ("two_ple", 1))

Golden = dict[str, np.ndarray]


def golden(name: str) -> Golden:
    with np.load(GOLDENS / f"{name}.npz") as file:
        return dict(file)


def deviation(streams: np.ndarray, expected: np.ndarray, setup: support.Setup) -> float:
    """Largest absolute difference of the logits that the trunk's streams give."""
    config, params = setup
    # One shape for every length: the rest of the rows is thrown away.
    padded = np.zeros((97, *streams.shape[1:]), np.float32)
    padded[: len(streams)] = streams
    logits = np.asarray(support.logits_of(params, padded, config=config))
    assert np.isfinite(logits).all()
    return float(np.abs(logits[: len(streams)] - expected).max())


def chunk_deviation(setup: support.Setup, stored: Golden, length: int, chunk: int) -> float:
    config, params = setup
    tokens = stored["ids"][:length]
    streams, state, _ = support.prefill(params, tokens, support.fresh(config), config, chunk)
    assert np.asarray(state.length).tolist() == [length]
    return deviation(streams, stored["logits"][:length], setup)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_prompt_in_chunks(name: str, seed: int, chunk: int) -> None:
    stored, setup = golden(f"{name}-{seed}"), support.model(name, seed)
    assert stored["logits"].std() > 1.0
    for length in LENGTHS:
        assert chunk_deviation(setup, stored, length, chunk) <= TOLERANCE, length


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_rows_after_a_prompt(name: str, seed: int, rows: int) -> None:
    stored, setup = golden(f"{name}-{seed}"), support.model(name, seed)
    config, params = setup
    for prompt in (1, 13):
        tokens = stored["ids"]
        _, state, _ = support.prefill(params, tokens[:prompt], support.fresh(config), config, 7)
        streams, state = support.step_rows(params, tokens[prompt:], state, config, rows)
        assert np.asarray(state.length).tolist() == [97]
        assert deviation(streams, stored["logits"][prompt:], setup) <= TOLERANCE


@pytest.mark.parametrize(
    "weight",
    [
        "model.hyper_connection_mixer.hc_norm.weight",
        "model.layers.0.attn_hyper_connection.hc_norm.weight",
        "model.layers.1.linear_attn.norm.weight",
        "model.layers.1.ple.norm_conv.weight",
        "model.layers.3.self_attn.q_norm.weight",
    ],
)
def test_a_slightly_wrong_weight_is_noticed(weight: str) -> None:
    """Negative control: one entry of one norm, off by 0.01."""
    stored = golden("tiny-0")
    config, params = support.model("tiny")
    wrong = support.changed(params, weight, support.leaf(params, weight).at[3].add(1e-2))
    assert chunk_deviation((config, params), stored, 40, 64) <= TOLERANCE
    assert chunk_deviation((config, wrong), stored, 40, 64) > 5 * TOLERANCE


@pytest.mark.parametrize(
    "wrong",
    [{"output_gate_type": "silu"}, {"indexer_budget": 400}, {"indexer_budget": 12}],
    ids=["gate", "dense attention", "one block more"],
)
def test_a_wrong_rule_is_noticed(wrong: dict[str, Any]) -> None:
    """Negative control: another gate; attention that selects nothing, or a block too many."""
    stored = golden("tiny-0")
    config, params = support.model("tiny")
    other = dataclasses.replace(config, **wrong)
    assert chunk_deviation((other, params), stored, 40, 64) > 5 * TOLERANCE


def test_narrow_weights_are_only_widened() -> None:
    """bfloat16 parameters compute what the same numbers do in float32."""
    config, params = support.model("tiny")
    host = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), params)
    narrow = jax.tree.map(jnp.asarray, host)
    widened = jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(np.float32)), host)
    tokens = golden("tiny-0")["ids"][:44]
    found = []
    for weights in (narrow, widened, params):
        first, state, _ = support.prefill(weights, tokens[:40], support.fresh(config), config, 64)
        rest, _ = support.step_rows(weights, tokens[40:], state, config, 4)
        found.append(np.concatenate([first, rest]))
    assert found[0].dtype == np.float32
    assert support.worst_difference(found[0], found[1]) <= 1e-6
    assert support.worst_difference(found[0], found[2]) > 1e-3


def selected_tokens(blocks: np.ndarray, ratio: int) -> np.ndarray:
    """Mask [T, T] over tokens from one [T, blocks] over blocks: selected ones and the tail."""
    length = len(blocks)
    key, query = np.arange(length), np.arange(length)[:, None]
    tail = (key >= (query + 1) // ratio * ratio) & (key <= query)
    return blocks[:, key // ratio] | tail


@pytest.fixture(scope="module")
def traced() -> tuple[ModelConfig, dict[str, Any], Golden, Golden]:
    """Config, params, the golden with intermediates, and ours under the golden's names."""
    stored = golden("tiny-0-layers")
    config, params = support.model("tiny")
    streams, _, chunks = support.prefill(params, stored["ids"], support.fresh(config), config, 64)
    (layers,) = chunks
    found: Golden = {}
    for number, trace in enumerate(layers):
        name = f"layers.{number}"
        linear = config.layer_types[number] == "linear_attention"
        found[f"{name}.attn_mixed"] = trace.mixer_input
        found[f"{name}.{'deltanet' if linear else 'attention'}"] = trace.mixer_output
        found[f"{name}.mlp_mixed"] = trace.moe_input
        found[f"{name}.moe"] = trace.moe_output
        found[f"{name}.streams"] = trace.streams.reshape(1, 64, -1)
        order = np.argsort(np.asarray(trace.routing.experts), axis=-1)
        for kind in ("experts", "weights"):
            unordered = np.asarray(getattr(trace.routing, kind))
            found[f"{name}.router.{kind}"] = np.take_along_axis(unordered, order, axis=-1)
        if trace.ple is not None:
            found[f"{name}.ple"] = trace.ple.reshape(1, 64, -1)
    found = {name: np.asarray(value)[0, :40] for name, value in found.items()}
    found["layers.3.selected"] = selected_tokens(
        np.asarray(layers[3].selected)[0, :40], config.indexer_compress_ratio
    )
    mixer = HyperConnection(config, inject=False)
    weights = {"params": params["model"]["hyper_connection_mixer"]}
    found["mixed"] = np.asarray(mixer.apply(weights, jnp.asarray(streams), method="mix"))
    return config, params, stored, found


def test_every_layer_agrees(
    traced: tuple[ModelConfig, dict[str, Any], Golden, Golden],
) -> None:
    _, _, stored, found = traced
    elsewhere = {"ids", "logits", "seed", "index_gap", "router_gap", "versions"}
    apart = {name for name in stored if name.endswith(("_injection", ".ple_rows"))}
    assert found.keys() == stored.keys() - elsewhere - apart
    for name, value in found.items():
        worst = support.worst_difference(value, stored[name])
        assert worst <= LAYER_TOLERANCE, f"{name}: {worst:.2e}"


def test_something_was_pruned(
    traced: tuple[ModelConfig, dict[str, Any], Golden, Golden],
) -> None:
    """The comparison is past the budget, and the selection is not just the newest blocks."""
    config, _, _, found = traced
    visible = np.tril(np.ones((40, 40), bool))
    selected = found["layers.3.selected"]
    assert not (selected & ~visible).any()
    first = config.indexer_budget + config.indexer_compress_ratio - 1
    assert (selected[:first] == visible[:first]).all()
    pruned = (visible & ~selected).any(axis=-1)
    assert pruned[first:].all()
    index, tail = np.arange(40), (np.arange(40) + 1) // 4 * 4
    newest = visible & (index >= (tail - config.indexer_budget)[:, None])
    assert (selected != newest)[first:].any(axis=-1).sum() > 10


def test_injections_agree(traced: tuple[ModelConfig, dict[str, Any], Golden, Golden]) -> None:
    """From the golden's own streams, since a trace does not keep them."""
    config, params, stored, _ = traced
    for number in range(1, 4):
        before = stored[f"layers.{number - 1}.streams"] + stored.get(f"layers.{number}.ple", 0)
        weights = params["model"]["layers"][str(number)]["attn_hyper_connection"]
        streams = jnp.asarray(before).reshape(40, config.hc_count, -1)
        _, strength = HyperConnection(config).apply({"params": weights}, streams)
        expected = stored[f"layers.{number}.attn_injection"]
        assert support.worst_difference(strength, jnp.asarray(expected)) <= LAYER_TOLERANCE


def test_ngram_rows_agree(traced: tuple[ModelConfig, dict[str, Any], Golden, Golden]) -> None:
    config, _, stored, _ = traced
    assert config.eos_token_id in stored["ids"]
    rows = row_ids(
        support.ids(stored["ids"]),
        jnp.full((1, 2), config.eos_token_id, jnp.int32),
        config.ngram_table(0),
        eos=config.eos_token_id,
        heads_per_ngram=config.heads_per_ngram,
    )
    np.testing.assert_array_equal(rows[0], stored["layers.1.ple_rows"])


def test_a_wrong_intermediate_is_noticed(
    traced: tuple[ModelConfig, dict[str, Any], Golden, Golden],
) -> None:
    """Negative control of the comparison itself: a value, an expert, a token."""
    _, _, stored, found = traced
    name = "layers.2.streams"
    wrong = found[name].copy()
    wrong[7, 5] += 1e-3
    assert support.worst_difference(wrong, stored[name]) > LAYER_TOLERANCE
    for name in ("layers.1.router.experts", "layers.3.selected"):
        wrong = found[name].copy()
        wrong[7, 0] = 1 - wrong[7, 0] if wrong.dtype != bool else ~wrong[7, 0]
        with pytest.raises(AssertionError):
            support.worst_difference(wrong, stored[name])
