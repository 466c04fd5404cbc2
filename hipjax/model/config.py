"""The model's configuration: both forms of ``config.json``, every validation rule.

Source: model-spec section 1. Field names are the checkpoint's own.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hipjax.model.ngram import NgramTable, ngram_table

LayerType = Literal["linear_attention", "indexed_attention"]

_MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
_GATES = ("sigmoid", "silu")
_LAYER_TYPES = ("linear_attention", "indexed_attention")


class ConfigError(ValueError):
    """A ``config.json`` that does not describe a model this package can run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one Flash-Next text model; hashable, checked on creation.

    Attributes carry the names and the meaning of ``text_config`` in ``config.json``
    (model-spec section 1). ``layer_types`` uses transformers' ``"indexed_attention"``
    for what the file calls ``"full_attention"``.

    Raises:
      ConfigError: a rule of model-spec section 1 is broken; every broken rule is named.
    """

    vocab_size: int
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    rms_norm_eps: float = 1e-6
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    partial_rotary_factor: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    output_gate_type: Literal["sigmoid", "silu"] = "silu"
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int
    hc_lowrank: int
    ple_layer_ids: tuple[int, ...] = ()
    ple_embed_dim: int
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 512
    seed: int = 1234
    indexer_n_heads: int
    indexer_kv_heads: int = 1
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    mtp_num_hidden_layers: int = 0
    mtp_rope_theta: float | None = None

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError("config: " + "; ".join(problems))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a decoded ``config.json``: with a nested ``text_config``, or flat.

        Keys that do not concern the text model are passed over; a key that would change
        the network in a way this package does not compute is an error.
        """
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ConfigError(f"config: text_config is {text!r}; it must be an object")
        model_type = text.get("model_type", raw.get("model_type"))
        if model_type not in _MODEL_TYPES:
            raise ConfigError(f"config: model_type is {model_type!r}; allowed: {_MODEL_TYPES}")
        try:
            values = _translated(text)
            _refuse_unsupported(text)
            _refuse_unsupported(raw)
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"config: a field is of the wrong type: {error}") from error
        known = {field.name: field for field in dataclasses.fields(cls)}
        given = {k: v for k, v in values.items() if k in known and v is not None}
        lacking = [
            name
            for name, field in known.items()
            if field.default is dataclasses.MISSING and name not in given
        ]
        if lacking:
            raise ConfigError(f"config: missing field(s): {', '.join(sorted(lacking))}")
        for name, field in known.items():
            if name in given and isinstance(given[name], int) and "float" in str(field.type):
                given[name] = float(given[name])
        return cls(**given)

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Reads ``config.json`` at ``path`` (the file, or the folder that holds it)."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"config: no such file: {path}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config: {path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"config: {path} holds a {type(raw).__name__}, not an object")
        return cls.from_dict(raw)

    def to_dict(self) -> dict[str, Any]:
        """The flat (text-only) form of ``config.json``, which transformers reads too."""
        rope = {
            "rope_type": "default",
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        skipped = {"rope_theta", "mtp_rope_theta", "partial_rotary_factor", "layer_types"}
        plain = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in skipped
        }
        plain["ple_layer_ids"] = list(self.ple_layer_ids)
        head = {
            "hybrid": True,
            "num_hidden_layers": self.mtp_num_hidden_layers,
            "layer_types": ["full_attention"] * self.mtp_num_hidden_layers,
            "rope_theta": self.mtp_rope_theta,
        }
        return {
            "architectures": ["Qwen4ExpForCausalLM"],
            "model_type": "qwen4_exp_text",
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "rope_parameters": rope,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            **plain,
            **({"mtp": head} if self.mtp_num_hidden_layers else {}),
        }

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the trunk."""
        return len(self.layer_types)

    @property
    def streams_size(self) -> int:
        """D: the residual streams side by side."""
        return self.hc_count * self.hidden_size

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def budget_blocks(self) -> int:
        """How many complete blocks one query may select."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def linear_key_size(self) -> int:
        """Width of the query part, and of the key part, of ``in_proj_qkv``."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Width of the value part of ``in_proj_qkv``, and of ``in_proj_z``."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_size(self) -> int:
        """Channels of the DeltaNet's convolution: query, key and value."""
        return 2 * self.linear_key_size + self.linear_value_size

    @property
    def ple_reach(self) -> int:
        """How many earlier tokens the PLE convolution reads."""
        return (self.ple_conv_kernel_size - 1) * self.ngram_size

    @property
    def has_head(self) -> bool:
        """Whether the model has an MTP head."""
        return self.mtp_num_hidden_layers > 0

    def ple_index(self, layer: int) -> int | None:
        """Position of 0-based ``layer`` among the PLE layers, or None without PLE."""
        return self.ple_layer_ids.index(layer + 1) if layer + 1 in self.ple_layer_ids else None

    @cached_property
    def _ngram_tables(self) -> tuple[NgramTable, ...]:
        return tuple(ngram_table(self, index) for index in range(len(self.ple_layer_ids)))

    def ngram_table(self, index: int) -> NgramTable:
        """Hash constants of the ``index``-th PLE layer."""
        return self._ngram_tables[index]


def _translated(text: Mapping[str, Any]) -> dict[str, Any]:
    """Brings one ``text_config`` to this class's field names."""
    values = dict(text)
    depth = text.get("num_hidden_layers")
    types = text.get("layer_types")
    if types is None and depth is not None:
        every = text.get("full_attention_interval", 4)
        if every < 1:
            raise ConfigError(f"config: full_attention_interval is {every}; allowed: 1 or more")
        types = [
            "indexed_attention" if (i + 1) % every == 0 else "linear_attention"
            for i in range(depth)
        ]
    if types is not None:
        if depth is not None and len(types) != depth:
            raise ConfigError(
                f"config: layer_types has {len(types)} entries, num_hidden_layers is {depth}"
            )
        renamed = {"full_attention": "indexed_attention"}
        values["layer_types"] = tuple(renamed.get(kind, kind) for kind in types)
    rope = text.get("rope_parameters") or {}
    values["rope_theta"] = rope.get("rope_theta", text.get("rope_theta"))
    values["partial_rotary_factor"] = rope.get(
        "partial_rotary_factor", text.get("partial_rotary_factor", 1.0)
    )
    values["output_gate_type"] = text.get("output_gate_type") or text.get("hidden_act", "silu")
    values["ple_layer_ids"] = tuple(sorted(set(text.get("ple_layer_ids") or ())))
    if values.get("ple_embed_dim") is None:
        values["ple_embed_dim"] = text.get("hidden_size")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        given = text.get(name)
        values[name] = next(iter(given), None) if isinstance(given, list) else given
    head = text.get("mtp") or {}
    layers = text.get("mtp_num_hidden_layers", head.get("num_hidden_layers", 0))
    values["mtp_num_hidden_layers"] = layers or 0
    if layers:
        values["mtp_rope_theta"] = head.get("rope_theta", values["rope_theta"])
    return values


def _refuse_unsupported(text: Mapping[str, Any]) -> None:
    """Refuses settings that ask for a network this package does not compute."""
    rope = text.get("rope_parameters") or {}
    wanted: dict[str, tuple[Any, Any]] = {
        "hidden_act": (text.get("hidden_act", "silu"), "silu"),
        "attention_bias": (text.get("attention_bias", False), False),
        "rope_scaling": (text.get("rope_scaling"), None),
        "tie_word_embeddings": (text.get("tie_word_embeddings", False), False),
        "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
        "mtp_use_dedicated_embeddings": (text.get("mtp_use_dedicated_embeddings", False), False),
    }
    wrong = [
        f"{name} is {given!r}; allowed: {allowed!r}"
        for name, (given, allowed) in wanted.items()
        if given != allowed
    ]
    if wrong:
        raise ConfigError("config: " + "; ".join(wrong))


def _problems(c: ModelConfig) -> list[str]:
    """Every broken validation rule of model-spec section 1, as sentences."""
    found: list[str] = []

    def need(holds: bool, sentence: str) -> None:
        if not holds:
            found.append(sentence)

    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        kind = type(value)
        if field.name in ("seed", "mtp_num_hidden_layers"):
            need(kind is int and value >= 0, f"{field.name} is {value!r}; allowed: 0 or more")
        elif field.name.endswith("_token_id"):
            need(
                value is None or (kind is int and 0 <= value < c.vocab_size),
                f"{field.name} is {value!r}; allowed: an id below vocab_size, or none",
            )
        elif field.type is int:
            need(
                kind is int and value > 0,
                f"{field.name} is {value!r}; it must be a positive integer",
            )
        elif "float" in str(field.type):
            need(
                (value is None and "None" in str(field.type)) or (kind is float and value > 0),
                f"{field.name} is {value!r}; it must be a positive number",
            )
        elif field.type is bool:
            need(kind is bool, f"{field.name} is {value!r}; it must be true or false")
    ids = c.ple_layer_ids
    need(
        all(type(i) is int for i in ids) and list(ids) == sorted(set(ids)),
        f"ple_layer_ids is {ids}; it must hold integers, ascending and distinct",
    )
    if found:
        return found
    need(bool(c.layer_types), "layer_types is empty")
    odd = sorted({str(kind) for kind in c.layer_types} - set(_LAYER_TYPES))
    need(not odd, f"layer_types holds {odd}; allowed: {_LAYER_TYPES} or 'full_attention'")
    need(
        c.output_gate_type in _GATES,
        f"output_gate_type is {c.output_gate_type!r}; allowed: {_GATES}",
    )
    need(c.hc_count > 1, f"hc_count is {c.hc_count}; it must be at least 2")
    need(
        c.num_experts_per_tok <= c.num_experts,
        f"num_experts_per_tok is {c.num_experts_per_tok}, above num_experts {c.num_experts}",
    )
    need(
        c.num_attention_heads % c.num_key_value_heads == 0,
        f"num_attention_heads {c.num_attention_heads} is not a multiple of "
        f"num_key_value_heads {c.num_key_value_heads}",
    )
    need(
        c.linear_num_value_heads % c.linear_num_key_heads == 0,
        f"linear_num_value_heads {c.linear_num_value_heads} is not a multiple of "
        f"linear_num_key_heads {c.linear_num_key_heads}",
    )
    need(c.indexer_kv_heads == 1, f"indexer_kv_heads is {c.indexer_kv_heads}; it must be 1")
    need(
        c.indexer_budget % c.indexer_compress_ratio == 0,
        f"indexer_budget {c.indexer_budget} is not a multiple of "
        f"indexer_compress_ratio {c.indexer_compress_ratio}",
    )
    need(
        0 < c.partial_rotary_factor <= 1 and c.rotary_dim % 2 == 0 and c.rotary_dim > 0,
        f"partial_rotary_factor {c.partial_rotary_factor} of head_dim {c.head_dim} must give "
        "an even number of rotating dimensions",
    )
    need(
        c.rotary_dim <= c.indexer_head_dim,
        f"rotating dimensions {c.rotary_dim} exceed indexer_head_dim {c.indexer_head_dim}",
    )
    need(
        c.mtp_num_hidden_layers in (0, 1),
        f"mtp_num_hidden_layers is {c.mtp_num_hidden_layers}; allowed: 0 or 1",
    )
    need(
        c.has_head or c.mtp_rope_theta is None,
        f"mtp_rope_theta is {c.mtp_rope_theta}, but the model has no MTP head",
    )
    if c.ple_layer_ids:
        found.extend(_ple_problems(c))
    return found


def _ple_problems(c: ModelConfig) -> list[str]:
    found: list[str] = []
    for one_based in c.ple_layer_ids:
        if not 1 <= one_based <= c.num_hidden_layers:
            found.append(f"ple_layer_ids holds {one_based}; allowed: 1 to {c.num_hidden_layers}")
        elif c.layer_types[one_based - 1] != "linear_attention":
            found.append(f"ple_layer_ids holds {one_based}, which is not a linear_attention layer")
    if c.ngram_size < 2:
        found.append(f"ngram_size is {c.ngram_size}; it must be at least 2")
    elif c.ple_embed_dim % ((c.ngram_size - 1) * c.heads_per_ngram):
        found.append(
            f"ple_embed_dim {c.ple_embed_dim} is not a multiple of "
            f"(ngram_size - 1) * heads_per_ngram = {(c.ngram_size - 1) * c.heads_per_ngram}"
        )
    if c.eos_token_id is None:
        found.append("eos_token_id is missing; PLE segments need it")
    if not found and c.ngram_table(len(c.ple_layer_ids) - 1).rows >= 2**31:
        found.append(
            f"ngram_vocab_size_base {c.ngram_vocab_size_base} gives a table of 2**31 rows or more"
        )
    return found
