"""The released model's own size, without allocating it: parameters and state.

Numbers are those of model-spec sections 2 and 4, written out.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hipjax.model.params import flat, param_shapes
from tests.model import support
from tests.tiny import random_tensors

CONTEXT = support.CONTEXT

MIXER = {
    "hc_norm.weight": (10240,),
    "input_mix_weight_down.weight": (320, 10240),
    "input_mix_weight_up.weight": (10240, 320),
}
HYPER = MIXER | {"block_inject_weight.weight": (4, 10240)}
MOE = {
    "gate.weight": (512, 2560),
    "experts.gate_up_proj": (512, 1280, 2560),
    "experts.down_proj": (512, 2560, 640),
    "shared_expert.gate_proj.weight": (640, 2560),
    "shared_expert.up_proj.weight": (640, 2560),
    "shared_expert.down_proj.weight": (2560, 640),
    "shared_expert_gate.weight": (1, 2560),
}
LINEAR = {
    "in_proj_qkv.weight": (10240, 2560),
    "in_proj_z.weight": (6144, 2560),
    "in_proj_b.weight": (48, 2560),
    "in_proj_a.weight": (48, 2560),
    "conv1d.weight": (10240, 1, 4),
    "A_log": (48,),
    "dt_bias": (48,),
    "norm.weight": (128,),
    "out_proj.weight": (2560, 6144),
}
ATTENTION = {
    "q_proj.weight": (12288, 2560),
    "k_proj.weight": (512, 2560),
    "v_proj.weight": (512, 2560),
    "o_proj.weight": (2560, 6144),
    "q_norm.weight": (256,),
    "k_norm.weight": (256,),
    "indexer.index_qk_proj.weight": (640, 2560),
    "indexer.q_layernorm.weight": (128,),
    "indexer.k_layernorm.weight": (128,),
}
PLE = {
    "ple_embedding.ngram_embedding.weight": (320_001_536, 160),
    "key_proj.weight": (10240, 2560),
    "value_proj.weight": (2560, 2560),
    "norm_key.weight": (10240,),
    "norm_query.weight": (10240,),
    "norm_conv.weight": (10240,),
    "conv1d.weight": (10240, 1, 4),
}
HEAD = {
    "pre_fc_norm_embedding.weight": (2560,),
    "pre_fc_norm_hidden.weight": (10240,),
    "fc_embedding.weight": (2560, 2560),
    "fc_hidden.weight": (2560, 2560),
}

Shapes = dict[str, tuple[int, ...]]


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def layer(prefix: str, mixer: Shapes) -> Shapes:
    return (
        under(f"{prefix}attn_hyper_connection.", HYPER)
        | under(f"{prefix}mlp_hyper_connection.", HYPER)
        | under(f"{prefix}mlp.", MOE)
        | under(prefix, mixer)
    )


def inventory() -> Shapes:
    """Model-spec section 2, the shards of the n-gram table joined."""
    names = under("model.hyper_connection_mixer.", MIXER)
    names |= {"model.embed_tokens.weight": (248320, 2560), "lm_head.weight": (248320, 2560)}
    for number in range(48):
        attention = number % 4 == 3
        mixer = under("self_attn.", ATTENTION) if attention else under("linear_attn.", LINEAR)
        names |= layer(f"model.layers.{number}.", mixer)
    names |= under("model.layers.1.ple.", PLE) | under("mtp.", HEAD)
    names |= under("mtp.hyper_connection_mixer.", MIXER)
    return names | layer("mtp.layers.0.", under("self_attn.", ATTENTION))


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return param_shapes(support.flash_next())


def count(shapes: Shapes, pattern: str) -> int:
    """Parameters whose whole name matches; some must."""
    sizes = [math.prod(shape) for name, shape in shapes.items() if re.fullmatch(pattern, name)]
    assert sizes, pattern
    return sum(sizes)


def test_names_and_shapes(shapes: Shapes) -> None:
    expected = inventory()
    assert shapes == expected
    assert len([name for name in shapes if name.startswith("mtp.")]) == 31
    # 333 tensors of the vision tower, 3 hashing buffers, and 127 shards more than one table.
    assert len(shapes) + 333 + 3 + 127 == 1658


@pytest.mark.parametrize("name", ["tiny", "two_ple"])
def test_names_and_shapes_of_the_tiny_ones(name: str) -> None:
    stored = support.params_from(random_tensors(support.CONFIGS[name], 0))
    found = param_shapes(support.model(name)[0])
    assert found == {key: value.shape for key, value in flat(stored).items()}


@pytest.mark.parametrize(
    ("part", "pattern", "expected"),
    [
        ("with inject", r"model\.layers\.0\.attn_hyper_connection\..*", 6_604_800),
        ("mixer only", r"model\.hyper_connection_mixer\..*", 6_563_840),
        ("MoE", r"model\.layers\.0\.mlp\..*", 2_522_810_880),
        ("routed", r"model\.layers\.0\.mlp\.experts\..*", 2_516_582_400),
        ("GDN mixer", r"model\.layers\.0\.linear_attn\..*", 57_958_624),
        ("QSA mixer", r"model\.layers\.3\.self_attn\..*", 51_446_528),
        ("linear layer", r"model\.layers\.46\..*", 2_593_979_104),
        ("attention layer", r"model\.layers\.47\..*", 2_587_467_008),
        ("PLE dense", r"model\.layers\.1\.ple\.(?!ple_embedding).*", 32_839_680),
        ("table", r".*\.ngram_embedding\.weight", 51_200_245_760),
        ("embedding", r"model\.embed_tokens\.weight", 635_699_200),
        ("lm_head", r"lm_head\.weight", 635_699_200),
        ("trunk", r"(?!mtp|.*ngram_embedding).*", 125_743_653_760),
        ("trunk with table", r"(?!mtp).*", 176_943_899_520),
        ("MTP", r"mtp\..*", 2_607_150_848),
        ("MTP and shared", r"mtp\..*|lm_head\.weight|.*embed_tokens\.weight", 3_878_549_248),
        ("checkpoint", r".*", 179_999_981_459 - 35 - 448_931_056),
    ],
)
def test_counts(shapes: Shapes, part: str, pattern: str, expected: int) -> None:
    assert count(shapes, pattern) == expected, part
    # A count that is one vector off does not pass.
    some = next(name for name in shapes if re.fullmatch(pattern, name))
    wider = shapes | {some: (*shapes[some][:-1], shapes[some][-1] + 1)}
    assert count(wider, pattern) != expected


def size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def size_in_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_state_per_token() -> None:
    """Block keys in place of raw index keys, bfloat16: 25,344 bytes, and 2,112 for the head."""
    for dtype, width in ((jnp.bfloat16, 2), (jnp.float32, 4)):
        for head, expected in ((False, 12 * (2 * 2 * 256 + 32)), (True, 13 * (2 * 2 * 256 + 32))):
            small, large = (support.state_shapes(n, dtype, head=head) for n in (1024, 2048))
            assert size(large) - size(small) == 1024 * expected
            grown = size_in_bytes(large) - size_in_bytes(small)
            assert grown == 1024 * expected * width
            if dtype == jnp.bfloat16:
                assert grown == 1024 * (25_344 + head * 2_112)


def test_state_of_a_sequence() -> None:
    """What does not grow, by element as in the table of model-spec 4.

    Its bytes differ from the table's where hipjax keeps float32 for bfloat16 (both convolutions
    and the carries) and int32 for int64 (the ids).
    """
    state = support.state_shapes(CONTEXT)
    linear = [each.mixer for each in state.layers if hasattr(each.mixer, "recurrent")]
    attention = [each.mixer for each in state.layers if hasattr(each.mixer, "keys")]
    (ple,) = [each.ple for each in state.layers if each.ple is not None]
    assert (len(linear), len(attention)) == (36, 12)
    assert state.layers[1].ple is ple
    expected = {
        "recurrent": ([each.recurrent for each in linear], 113_246_208, 4, 4),
        "conv": ([each.conv for each in linear], 2_211_840, 2, 4),
        "PLE conv": (ple.conv, 184_320, 2, 4),
        "PLE tokens": (ple.tokens, 16, 8, 4),
        "carry": (state.carry, 20_480, 2, 4),
        "pending": (attention[0].pending, 768, 2, 2),
        "keys and values": ([attention[0].keys, attention[0].values], CONTEXT * 2_048, 2, 2),
        "block keys": (attention[0].blocks, CONTEXT * 64, 2, 2),
        "head keys and values": (
            [state.head.layer.mixer.keys, state.head.layer.mixer.values],
            *(CONTEXT * 2_048, 2, 2),
        ),
    }
    for name, (arrays, in_table, table_width, width) in expected.items():
        assert size(arrays) == in_table // table_width, name
        assert size_in_bytes(arrays) == in_table // table_width * width, name
    fixed = 113_246_208 + 2 * (2_211_840 + 184_320) + 8 + 12 * 768 + 2 * 20_480 + 4
    growing = CONTEXT * 25_344
    assert size_in_bytes(support.state_shapes(CONTEXT, head=False)) == fixed + growing
    with_head = 2 * 20_480 + 768 + CONTEXT * 2_112
    assert size_in_bytes(state) == fixed + growing + with_head
