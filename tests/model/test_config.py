"""Reading, checking and writing of ``config.json``."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from hipjax.model.config import ConfigError, ModelConfig
from tests.tiny import TINY, TINY_TWO_PLE, Config, text_config

FLASH_NEXT: Config = json.loads(
    (Path(__file__).parent.parent / "configs" / "flash_next.json").read_text()
)
ALL = pytest.mark.parametrize(
    "config", [TINY, TINY_TWO_PLE, FLASH_NEXT], ids=["tiny", "two_ple", "flash_next"]
)


def edited(changes: dict[str, Any], config: Config = TINY) -> Config:
    """A flat config with some fields set, or removed where the value is ``...``."""
    text = copy.deepcopy(text_config(config)) | changes
    return {name: value for name, value in text.items() if value is not ...}


def read(changes: dict[str, Any], config: Config = TINY) -> ModelConfig:
    return ModelConfig.from_dict(edited(changes, config))


@ALL
def test_both_forms_read_the_same(config: Config) -> None:
    nested, plain = ModelConfig.from_dict(config), ModelConfig.from_dict(text_config(config))
    assert "text_config" in config
    assert nested == plain
    assert hash(nested) == hash(plain)


def test_flash_next() -> None:
    """Every number of model-spec section 1, and what follows from them."""
    c = ModelConfig.from_dict(FLASH_NEXT)
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers) == (248320, 2560, 48)
    attention = [i for i, kind in enumerate(c.layer_types) if kind == "indexed_attention"]
    assert attention == list(range(3, 48, 4))
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (24, 2, 256)
    assert (c.rope_theta, c.partial_rotary_factor, c.rotary_dim) == (1e7, 0.25, 64)
    assert (c.linear_num_key_heads, c.linear_num_value_heads) == (16, 48)
    assert (c.linear_key_size, c.linear_value_size, c.linear_conv_size) == (2048, 6144, 10240)
    assert (c.output_gate_type, c.norm_topk_prob, c.seed) == ("sigmoid", True, 1234)
    assert (c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (512, 10, 640)
    assert (c.hc_count, c.hc_lowrank, c.streams_size) == (4, 320, 10240)
    assert (c.ple_layer_ids, c.ple_reach, c.split_ngram_parts) == ((2,), 9, 128)
    assert [c.ple_index(i) for i in range(3)] == [None, 0, None]
    assert (c.indexer_budget, c.indexer_compress_ratio, c.budget_blocks) == (2048, 4, 512)
    assert (c.eos_token_id, c.bos_token_id, c.pad_token_id) == (248044, 248044, None)
    assert (c.has_head, c.mtp_rope_theta, c.max_position_embeddings) == (True, 1e7, 262144)


@ALL
def test_round_trip(config: Config) -> None:
    first = ModelConfig.from_dict(config)
    written = json.loads(json.dumps(first.to_dict()))
    again = ModelConfig.from_dict(written)
    assert again == first
    assert again.to_dict() == first.to_dict()
    # The equality above sees every field.
    for name, step in (
        ("vocab_size", 1),
        ("seed", 1),
        ("eos_token_id", -1),
        ("max_position_embeddings", 1),
    ):
        other = written | {name: written[name] + step}
        assert ModelConfig.from_dict(other) != first, name


def test_round_trip_without_a_head() -> None:
    first = read({"mtp_num_hidden_layers": 0, "mtp": ...})
    assert not first.has_head
    assert ModelConfig.from_dict(first.to_dict()) == first


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    expected = ModelConfig.from_dict(TINY)
    assert ModelConfig.from_file(tmp_path) == expected
    assert ModelConfig.from_file(str(tmp_path / "config.json")) == expected
    with pytest.raises(ConfigError, match=r"no such file: .*missing"):
        ModelConfig.from_file(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list, not an object"):
        ModelConfig.from_file(tmp_path)


def test_usable_as_a_static_argument() -> None:
    first, second = ModelConfig.from_dict(TINY), ModelConfig.from_dict(copy.deepcopy(TINY))
    other = read({"indexer_budget": 12})
    assert {first: 1}[second] == 1
    assert other not in {first: 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.vocab_size = 3  # type: ignore[misc]


def test_what_the_file_may_leave_out() -> None:
    """Defaults of transformers, and fields that stand for others."""
    left_out = {
        name: ...
        for name in (
            *("norm_topk_prob", "seed", "rms_norm_eps", "ple_conv_kernel_size", "ngram_size"),
            *("output_gate_type", "layer_types", "initializer_range", "bos_token_id"),
            *("linear_conv_kernel_dim", "ple_embed_dim", "pad_token_id"),
        )
    }
    c = read(left_out)
    assert (c.norm_topk_prob, c.seed) == (True, 1234)
    assert (c.rms_norm_eps, c.initializer_range) == (1e-6, 0.02)
    assert (c.ple_conv_kernel_size, c.ngram_size, c.linear_conv_kernel_dim) == (4, 3, 4)
    assert c.output_gate_type == "silu"  # hidden_act
    assert c.ple_embed_dim == c.hidden_size
    assert c.layer_types == (*("linear_attention",) * 3, "indexed_attention")
    every_second = {"layer_types": ..., "full_attention_interval": 2, "ple_layer_ids": [3]}
    assert read(every_second).layer_types == ("linear_attention", "indexed_attention") * 2
    assert read({"output_gate_type": None}).output_gate_type == "silu"
    assert read({"ple_layer_ids": ...}).ple_layer_ids == ()
    assert read({"mtp": ...}).mtp_rope_theta == c.rope_theta
    assert read({}, TINY_TWO_PLE).mtp_rope_theta == 10 * read({}, TINY_TWO_PLE).rope_theta


def test_ple_layers_are_sorted_and_deduplicated() -> None:
    c = read({"ple_layer_ids": [3, 1, 3, 2]})
    assert c.ple_layer_ids == (1, 2, 3)
    assert [c.ple_index(i) for i in range(4)] == [0, 1, 2, None]
    assert c.ngram_table(1) != c.ngram_table(0)


def test_first_of_several_end_of_sequence_ids() -> None:
    c = read({"eos_token_id": [7, 9]})
    assert c.eos_token_id == 7
    assert hash(c) == hash(read({"eos_token_id": 7}))


BROKEN: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"layer_types": ["linear_attention"] * 3 + ["mamba"]}, ("layer_types", "mamba", "linear")),
    ({"layer_types": ["full_attention"] * 3}, ("layer_types", "3", "num_hidden_layers", "4")),
    ({"layer_types": [], "num_hidden_layers": 0, "ple_layer_ids": []}, ("layer_types", "empty")),
    ({"output_gate_type": "gelu"}, ("output_gate_type", "'gelu'", "sigmoid", "silu")),
    ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "silu")),
    ({"hc_count": 1}, ("hc_count", "1", "at least 2")),
    ({"hc_count": 0}, ("hc_count", "0", "positive")),
    ({"num_experts": 0}, ("num_experts", "0", "positive")),
    ({"num_experts_per_tok": 0}, ("num_experts_per_tok", "0", "positive")),
    ({"num_experts_per_tok": 9}, ("num_experts_per_tok", "9", "num_experts 8")),
    ({"moe_intermediate_size": 0}, ("moe_intermediate_size", "0", "positive")),
    ({"shared_expert_intermediate_size": -1}, ("shared_expert_intermediate_size", "-1", "posit")),
    ({"indexer_n_heads": 0}, ("indexer_n_heads", "0", "positive")),
    ({"indexer_kv_heads": 2}, ("indexer_kv_heads", "2", "must be 1")),
    ({"indexer_head_dim": 0}, ("indexer_head_dim", "0", "positive")),
    ({"indexer_head_dim": 6}, ("indexer_head_dim", "6", "8")),
    ({"indexer_budget": 0}, ("indexer_budget", "0", "positive")),
    ({"indexer_budget": 10}, ("indexer_budget", "10", "multiple", "4")),
    ({"indexer_compress_ratio": -4}, ("indexer_compress_ratio", "-4", "positive")),
    ({"ple_layer_ids": [0]}, ("ple_layer_ids", "0", "1 to 4")),
    ({"ple_layer_ids": [5]}, ("ple_layer_ids", "5", "1 to 4")),
    ({"ple_layer_ids": [4]}, ("ple_layer_ids", "4", "linear_attention")),
    ({"ple_embed_dim": 66}, ("ple_embed_dim", "66", "4")),
    ({"ngram_size": 1}, ("ngram_size", "1", "at least 2")),
    ({"eos_token_id": None}, ("eos_token_id", "missing")),
    ({"num_attention_heads": 3}, ("num_attention_heads", "3", "num_key_value_heads 2")),
    ({"linear_num_value_heads": 5}, ("linear_num_value_heads", "5", "linear_num_key_heads 2")),
    ({"vocab_size": 512.5}, ("vocab_size", "512.5", "positive integer")),
    ({"mtp_num_hidden_layers": 2}, ("mtp_num_hidden_layers", "2", "0 or 1")),
    ({"attention_bias": True}, ("attention_bias", "True", "False")),
    ({"tie_word_embeddings": True}, ("tie_word_embeddings", "True", "False")),
    ({"mtp_use_dedicated_embeddings": True}, ("mtp_use_dedicated_embeddings", "True", "False")),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ("rope_type", "yarn")),
    ({"model_type": "qwen3_next"}, ("model_type", "qwen3_next", "qwen4_exp")),
    ({"hidden_size": ...}, ("missing", "hidden_size")),
    ({"rope_parameters": ...}, ("missing", "rope_theta")),
    *(
        ({name: ...}, ("missing", name))
        for name in ("indexer_n_heads", "indexer_head_dim", "indexer_budget")
    ),
    ({"indexer_compress_ratio": None}, ("missing", "indexer_compress_ratio")),
]


@pytest.mark.parametrize(
    ("changes", "words"), BROKEN, ids=[next(iter(changes)) for changes, _ in BROKEN]
)
def test_broken_rules(
    changes: dict[str, Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused with a sentence that names the field, what it is and what it may be."""
    # Of what the annotations rule out, the checked annotations would complain first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    read({})  # without the changes it is accepted
    for raw in (edited(changes), {"model_type": "qwen4_exp", "text_config": edited(changes)}):
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_dict(raw)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message


def test_rotating_dimensions_must_be_even() -> None:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.1}
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.1 of head_dim 32 must give"):
        read({"rope_parameters": rope})


def test_all_broken_rules_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"hc_count.*; .*indexer_kv_heads.*; .*ple_layer_ids"):
        read({"hc_count": 1, "indexer_kv_heads": 3, "ple_layer_ids": [9]})


def test_checked_when_made_by_hand() -> None:
    good = ModelConfig.from_dict(TINY)
    with pytest.raises(ConfigError, match="indexer_budget 10 is not a multiple"):
        dataclasses.replace(good, indexer_budget=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 512}, "eos_token_id is 512; allowed: an id below vocab_size"),
        ({"eos_token_id": "a"}, "eos_token_id is 'a'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a positive number"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob is 'no'; it must be true or false"),
        ({"vocab_size": True}, "vocab_size is True; it must be a positive integer"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}"),
        ({"layer_types": ..., "full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"ple_layer_ids": 2}, "a field is of the wrong type"),
        ({"ngram_vocab_size_base": 2**30}, r"a table of 2\*\*31 rows or more"),
    ],
)
def test_values_of_the_wrong_kind(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ConfigError, match=message):
        read(changes)


def test_a_tied_embedding_named_outside_is_refused() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings is True"):
        ModelConfig.from_dict({**TINY, "tie_word_embeddings": True})
