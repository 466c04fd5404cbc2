"""Tensors that do not fit the config are named, all in one message."""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.model import layout, tensorfile
from hipjax.model.config import ModelConfig
from tests.model.checkpoints import (
    BUFFERS,
    EXPERTS,
    NGRAM,
    NORM,
    Edit,
    changed,
    drawn,
    float8,
    message,
    write,
)
from tests.tiny import TINY, Config


def test_the_released_model_has_its_tensors() -> None:
    """Names and elements of the public header audit (model-spec 2.7), vision left out."""
    raw = changed(TINY, **FLASH_NEXT)
    config = ModelConfig.from_dict(raw)
    tensors = {}
    for name, shape in layout.expected_shapes(config).items():
        split = layout.pieces(name, shape, config) if layout.is_table(name) else None
        for piece in split or layout.whole(name, shape):
            tensors[piece.name] = stored(piece.name, piece.shape)
    buffers = layout.ngram_buffers(config)
    assert len(tensors) + len(buffers) == 1658 - 333
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    assert elements + 35 == 179_999_981_459 - 448_931_056
    sources, skipped = layout.match(tensors, config, head=True, where="memory")
    assert (len(sources), skipped) == (len(layout.expected_shapes(config)), ())


def stored(name: str, shape: tuple[int, ...]) -> tensorfile.StoredTensor:
    return tensorfile.StoredTensor(name, "BF16", shape, Path("memory"), 0, 2 * math.prod(shape))


FLASH_NEXT: Config = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "layer_types": None,
    "num_attention_heads": 24,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_lowrank": 320,
    "ple_embed_dim": 2560,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
    "indexer_n_heads": 4,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
}


def without(*names: str) -> Edit:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def also(name: str, value: np.ndarray) -> Edit:
    return lambda tensors: tensors | {name: value}


MISFITS: dict[str, tuple[Edit, str]] = {
    "missing": (without("lm_head.weight"), "1 missing: lm_head.weight"),
    "missing shard": (
        without(f"{NGRAM}shard_2.weight"),
        f"1 missing: {NGRAM}shard_2.weight",
    ),
    "missing table": (
        without(*(f"{NGRAM}shard_{k}.weight" for k in range(4))),
        f"1 missing: {NGRAM}weight",
    ),
    "surplus": (also("model.norm.weight", np.ones(64)), "1 surplus: model.norm.weight"),
    "surplus, odd name": (also("a\x1b[2J", np.ones(1)), "1 surplus: 'a\\x1b[2J'"),
    "surplus shard": (
        also(f"{NGRAM}shard_4.weight", np.ones((102, 16), np.float32)),
        f"1 surplus: {NGRAM}shard_4.weight",
    ),
    "misshapen": (
        also(NORM, np.ones((4, 4), np.float32)),
        f"1 misshapen: {NORM} is [4, 4], expected [16]",
    ),
    "transposed": (
        lambda t: t | {"lm_head.weight": t["lm_head.weight"].T.copy()},
        "1 misshapen: lm_head.weight is [64, 512], expected [512, 64]",
    ),
    "wrong dtype": (
        also(NORM, np.ones(16, np.int32)),
        f"1 wrong dtype: {NORM} is I32, allowed: BF16, F16, F32",
    ),
    "float8 without a scale of its own": (
        also(NORM, np.ones(16, jnp.float8_e4m3fn)),
        f"1 wrong dtype: {NORM} is F8_E4M3, allowed: BF16, F16, F32",
    ),
    "pieces of two dtypes": (
        lambda t: t | {f"{NGRAM}shard_1.weight": t[f"{NGRAM}shard_1.weight"].astype(np.float16)},
        f"1 wrong dtype: {NGRAM}shard_1.weight is F16, but {NGRAM}shard_0.weight is F32",
    ),
    "whole and in shards": (
        also(f"{NGRAM}weight", np.ones((408, 16), np.float32)),
        f"1 stored twice: {NGRAM}weight and, in pieces, {NGRAM}shard_0.weight",
    ),
    "fused and per expert": (
        also(f"{EXPERTS}3.down_proj.weight", np.ones((64, 24), np.float32)),
        f"1 stored twice: {EXPERTS}down_proj and, in pieces, {EXPERTS}3.down_proj.weight",
    ),
    "both prefixes": (
        also(NORM.replace("model.", "model.language_model.", 1), np.ones(16, np.float32)),
        f"1 stored twice: model.language_model.{NORM[6:]} and {NORM}",
    ),
    "float8 table without its scale": (
        lambda t: float8(t, None),
        f"1 missing: {NGRAM}weight_scale (the table is F8_E4M3)",
    ),
    "scale of another shape": (
        lambda t: float8(t, np.ones(2, np.float32)),
        f"1 misshapen: {NGRAM}weight_scale is [2], expected []",
    ),
    "scale of a float32 table": (
        also(f"{NGRAM}weight_scale", np.ones(1, np.float32)),
        f"1 surplus: {NGRAM}weight_scale (the table is F32)",
    ),
    "other multipliers": (
        also(f"{BUFFERS}layer_multipliers", np.array([1, 3, 5])),
        f"1 hash constants unlike the config's: {BUFFERS}layer_multipliers is [1, 3, 5], "
        "the config gives [",
    ),
    "hash constants as floats": (
        also(f"{BUFFERS}layer_multipliers", np.ones(3, np.float32)),
        f"1 wrong dtype: {BUFFERS}layer_multipliers is F32, allowed: I64",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_are_named(case: str, tmp_path: Path) -> None:
    edit, expected = MISFITS[case]
    text = message(write(tmp_path, TINY, edit(drawn())))
    assert text.startswith(f"{tmp_path}: the tensors do not fit config.json:\n  ")
    assert expected in text
    # The fault and nothing but the fault.
    if "stored twice" not in expected:
        assert len(text.splitlines()) == 2


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = without(f"{EXPERTS}5.up_proj.weight")(drawn(fused=False))
    text = message(write(tmp_path, TINY, tensors))
    assert text.endswith(f"  1 missing: {EXPERTS}5.up_proj.weight")


def test_all_misfits_come_in_one_message(tmp_path: Path) -> None:
    tensors = drawn()
    for case in ("missing", "surplus", "misshapen", "other multipliers"):
        tensors = MISFITS[case][0](tensors)
    tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"] > 0
    lines = message(write(tmp_path, TINY, tensors)).splitlines()
    kinds = [line.split(":")[0].strip() for line in lines[1:]]
    assert sorted(kinds) == [
        "1 hash constants unlike the config's",
        "1 misshapen",
        "1 missing",
        "1 surplus",
        "1 wrong dtype",
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seed": 7}, "1 hash constants unlike the config's: " + BUFFERS),
        ({"num_experts": 6}, "expected [6, 48, 64]"),
        ({"vocab_size": 513}, "lm_head.weight is [512, 64], expected [513, 64]"),
        ({"split_ngram_parts": 8}, f"{NGRAM}shard_0.weight is [102, 16], expected [51, 16]"),
        ({"layer_types": ["linear_attention"] * 4}, "9 missing: model.layers.3.linear_attn.A_log"),
        ({"mtp": None, "mtp_num_hidden_layers": 0}, "31 surplus: mtp."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_of_another_model_is_noticed(
    fields: Config, expected: str, tmp_path: Path
) -> None:
    assert expected in message(write(tmp_path, changed(TINY, **fields)))
