"""Tiny Flash-Next configurations, with seeded random checkpoints and prompts for them.

Two shapes: ``TINY`` has the proportions of the released model, ``TINY_TWO_PLE`` changes every
ratio that code could wrongly take for granted (two n-gram tables, a silu output gate, other
conv taps, head groups, widths and epsilon, block size 2, padding rows in the tables, optional
fields left out). Both need nothing but NumPy, so that every environment draws the same weights.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

_CONFIGS = Path(__file__).parent / "configs"
_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, np.ndarray]

TINY: Config = json.loads((_CONFIGS / "tiny.json").read_text())
TINY_TWO_PLE: Config = json.loads((_CONFIGS / "two_ple.json").read_text())

_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")

# Standard deviation of a weight times sqrt(fan in), by the last part of its name: large enough that
# gates, routing and index scores spread out and every block matters, small enough that the float32
# rounding of two correct implementations stays near 5e-6 at logits of order 2.
_GAINS = {
    "lm_head": 4.0,
    "gate": 2.5,
    "input_mix_weight_down": 2.0,
    "input_mix_weight_up": 2.0,
    "block_inject_weight": 2.0,
    "in_proj_a": 1.5,
    "gate_up_proj": 1.5,
    "q_proj": 2.0,
    "o_proj": 2.0,
}
_DEFAULT_GAIN = 1.0
_INDEX_ALIGNMENT = 3.0


def text_config(config: Config) -> Config:
    """The text part of a config file, which may be nested in a multimodal one or stand alone."""
    return config.get("text_config", config)


def _mixer_shapes(text: Config, *, inject: bool = False) -> Shapes:
    width, rank = text["hc_count"] * text["hidden_size"], text["hc_lowrank"]
    shapes: Shapes = {
        "hc_norm.weight": (width,),
        "input_mix_weight_down.weight": (rank, width),
        "input_mix_weight_up.weight": (width, rank),
    }
    return shapes | ({"block_inject_weight.weight": (text["hc_count"], width)} if inject else {})


def _layer_shapes(text: Config, *, attention: bool, ple: bool = False) -> Shapes:
    """All tensors of one layer but the n-gram table and its buffers; model-spec 2.2 to 2.5."""
    hidden, width = text["hidden_size"], text["hc_count"] * text["hidden_size"]
    routed, shared = text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    head, index = text["head_dim"], text["indexer_head_dim"]
    queries, keys = text["num_attention_heads"], text["num_key_value_heads"]
    value_head, value_heads = text["linear_value_head_dim"], text["linear_num_value_heads"]
    values = value_heads * value_head
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    experts, embed = text["num_experts"], text["ple_embed_dim"]
    mixer = _mixer_shapes(text, inject=True)
    mlp: Shapes = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * routed, hidden),
        "mlp.experts.down_proj": (experts, hidden, routed),
        "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "mlp.shared_expert.up_proj.weight": (shared, hidden),
        "mlp.shared_expert.down_proj.weight": (hidden, shared),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }
    self_attn: Shapes = {
        "self_attn.q_proj.weight": (queries * 2 * head, hidden),
        "self_attn.k_proj.weight": (keys * head, hidden),
        "self_attn.v_proj.weight": (keys * head, hidden),
        "self_attn.o_proj.weight": (hidden, queries * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.indexer.index_qk_proj.weight": ((text["indexer_n_heads"] + 1) * index, hidden),
        "self_attn.indexer.q_layernorm.weight": (index,),
        "self_attn.indexer.k_layernorm.weight": (index,),
    }
    linear_attn: Shapes = {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (value_heads, hidden),
        "linear_attn.in_proj_a.weight": (value_heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (value_heads,),
        "linear_attn.dt_bias": (value_heads,),
        "linear_attn.norm.weight": (value_head,),
        "linear_attn.out_proj.weight": (hidden, values),
    }
    ngram: Shapes = {
        "ple.key_proj.weight": (width, embed),
        "ple.value_proj.weight": (hidden, embed),
        "ple.norm_key.weight": (width,),
        "ple.norm_query.weight": (width,),
        "ple.norm_conv.weight": (width,),
        "ple.conv1d.weight": (width, 1, text["ple_conv_kernel_size"]),
    }
    return (
        _under("attn_hyper_connection.", mixer)
        | _under("mlp_hyper_connection.", mixer)
        | mlp
        | (self_attn if attention else linear_attn)
        | (ngram if ple else {})
    )


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _primes_from(start: int, count: int) -> list[int]:
    primes: list[int] = []
    while len(primes) < count:
        if start > 1 and all(start % d for d in range(2, math.isqrt(start) + 1)):
            primes.append(start)
        start += 1
    return primes


def ngram_buffers(config: Config, index: int) -> Tensors:
    """The int64 hashing buffers of the ``index``-th PLE layer (model-spec 3.3), by short name."""
    text = text_config(config)
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    half = max(1, ((1 << 63) - 1) // text["vocab_size"] // 2)
    base = text.get("seed", 1234) + 10007 * index
    multipliers = [
        2 * (_splitmix64((base + (i + 1) * _GAMMA) & _MASK64) % half) + 1
        for i in range(text["ngram_size"])
    ]
    sizes = _primes_from(text["ngram_vocab_size_base"], (index + 1) * heads)[index * heads :]
    return {
        "layer_multipliers": np.array(multipliers, np.int64),
        "ngram_heads_vocab_sizes": np.array(sizes, np.int64),
        "ngram_heads_offsets": np.cumsum([0, *sizes[:-1]]).astype(np.int64),
    }


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values of one tensor; they depend on the seed, the name and the shape alone."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape)
    owner, _, last = name.removesuffix(".weight").rpartition(".")
    if last == "A_log":
        values = rng.uniform(math.log(0.5), math.log(8.0), shape)
    elif last == "dt_bias":
        values = values - 3.5
    elif last == "norm" and owner.endswith("linear_attn"):
        values = 1.0 + 0.2 * values
    elif "norm" in last:
        values = 0.2 * values
    elif last == "conv1d":
        values = values / math.sqrt(shape[-1])
    elif last == "embed_tokens":
        values = values + 0.7 * _shared_direction(shape[-1], seed)
    elif last == "ngram_embedding":
        pass
    else:
        values = values * (_GAINS.get(last, _DEFAULT_GAIN) / math.sqrt(shape[-1]))
    return values.astype(np.float32)


def _shared_direction(hidden: int, seed: int) -> np.ndarray:
    """A direction of the hidden space that all token embeddings share, as trained ones do."""
    return np.random.default_rng([seed, zlib.crc32(b"shared")]).standard_normal(hidden)


def _align_index_heads(weight: np.ndarray, head_dim: int, seed: int) -> np.ndarray:
    """Let every index head answer to the shared direction with the same vector.

    Independent projections make half of all products negative; the relu turns those scores into
    exact zeros, and which of several zeros is kept is undefined in transformers.
    """
    direction = _shared_direction(weight.shape[-1], seed) * (_INDEX_ALIGNMENT / weight.shape[-1])
    heads = weight.reshape(-1, head_dim, weight.shape[-1])
    answer = np.sign(heads[-1, :, 0])
    return (heads + np.outer(answer, direction)).reshape(weight.shape).astype(np.float32)


def random_tensors(
    config: Config, seed: int, *, fused_experts: bool = True, prefix: str = "model."
) -> Tensors:
    """Every tensor of a checkpoint of ``config``, under its Hugging Face name.

    Args:
        config: contents of a ``config.json``, nested or text only.
        seed: selects the weights.
        fused_experts: store the trunk's experts as two stacked tensors per layer, as the released
            file does, or one by one, as ``save_pretrained`` does. The values are the same. The
            experts of the MTP head are fused in every release, hence here too.
        prefix: the trunk's name prefix, ``"model."`` or ``"model.language_model."``.

    Returns:
        float32 arrays, and int64 for the hashing buffers of the PLE layers.
    """
    text = text_config(config)
    hidden, width = text["hidden_size"], text["hc_count"] * text["hidden_size"]
    vocabulary = (text["vocab_size"], hidden)
    trunk: Shapes = {"embed_tokens.weight": vocabulary}
    trunk |= _under("hyper_connection_mixer.", _mixer_shapes(text))
    for number, kind in enumerate(text["layer_types"]):
        attention, ple = kind != "linear_attention", number + 1 in text["ple_layer_ids"]
        trunk |= _under(f"layers.{number}.", _layer_shapes(text, attention=attention, ple=ple))
    rest: Shapes = {
        "lm_head.weight": vocabulary,
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        "mtp.fc_embedding.weight": (hidden, hidden),
        "mtp.fc_hidden.weight": (hidden, hidden),
    }
    rest |= _under("mtp.hyper_connection_mixer.", _mixer_shapes(text))
    rest |= _under("mtp.layers.0.", _layer_shapes(text, attention=True))

    tensors = {prefix + name: _draw(name, shape, seed) for name, shape in trunk.items()}
    tensors |= {name: _draw(name, shape, seed) for name, shape in rest.items()}
    for name in [name for name in tensors if name.endswith("index_qk_proj.weight")]:
        tensors[name] = _align_index_heads(tensors[name], text["indexer_head_dim"], seed)
    for index, layer_id in enumerate(sorted(text["ple_layer_ids"])):
        tensors |= _ngram_tensors(config, f"layers.{layer_id - 1}", index, seed, prefix)
    if not fused_experts:
        for name in [name for name in tensors if name.startswith(f"{prefix}layers.")]:
            if ".mlp.experts." in name:
                tensors |= split_experts(name, tensors.pop(name))
    return tensors


def _ngram_tensors(config: Config, layer: str, index: int, seed: int, prefix: str) -> Tensors:
    text = text_config(config)
    buffers = ngram_buffers(config, index)
    multiple = text["make_ngram_vocab_size_divisible_by"]
    rows = -(-int(buffers["ngram_heads_vocab_sizes"].sum()) // multiple) * multiple
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    owner = f"{layer}.ple.ple_embedding"
    name = f"{owner}.ngram_embedding"
    table = _draw(f"{name}.weight", (rows, text["ple_embed_dim"] // heads), seed)
    shards = np.split(table, text["split_ngram_parts"])
    tensors = {f"{prefix}{owner}.{key}": value for key, value in buffers.items()}
    for number, shard in enumerate(shards):
        tensors[f"{prefix}{name}.shard_{number}.weight"] = shard
    return tensors


def split_experts(name: str, fused: np.ndarray) -> Tensors:
    """The per-expert tensors of one fused ``….experts.{gate_up_proj,down_proj}``."""
    owner, _, kind = name.rpartition(".")
    parts = [fused] if kind == "down_proj" else np.split(fused, 2, axis=1)
    labels = _EXPERT_PARTS[2:] if kind == "down_proj" else _EXPERT_PARTS[:2]
    return {
        f"{owner}.{expert}.{label}.weight": np.ascontiguousarray(part[expert])
        for label, part in zip(labels, parts, strict=True)
        for expert in range(fused.shape[0])
    }


def prompt_ids(config: Config, seed: int, length: int) -> np.ndarray:
    """Random token ids, int32 [length], of which positions 5 and 9 (mod 29) are EOS.

    Prompts of one seed are prefixes of each other. Some tokens repeat an earlier bigram, so that
    n-gram rows are read more than once.
    """
    text = text_config(config)
    rng = np.random.default_rng([seed, zlib.crc32(b"prompt")])
    ids = rng.integers(0, min(text["vocab_size"], text["eos_token_id"]), 4096).astype(np.int32)
    ids[16:19] = ids[1:4]
    ids[60:72] = ids[20:32]
    ids[5::29] = text["eos_token_id"]
    ids[9::29] = text["eos_token_id"]
    if length > ids.size:
        raise ValueError(f"length: got {length}, allowed is at most {ids.size}")
    return ids[:length]
