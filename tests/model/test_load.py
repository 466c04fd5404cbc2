"""Every layout of a checkpoint loads to the same parameters, in bounded memory."""

import dataclasses
import functools
import importlib
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hipjax.model import layout, tensorfile
from hipjax.model.config import ModelConfig
from hipjax.model.load import load
from hipjax.model.params import flat
from hipjax.model.ple import NgramTableWeight
from hipjax.model.save import save
from tests.model.checkpoints import (
    BOTH_CONFIGS,
    NGRAM,
    assert_same,
    changed,
    drawn,
    float8,
    message,
    write,
)
from tests.tiny import TINY, TINY_TWO_PLE, Config, Tensors, split_experts, text_config

load_module = importlib.import_module("hipjax.model.load")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of the tiny config that no test changes."""
    return write(tmp_path_factory.mktemp("plain"))


def test_parameters_are_the_tensors_by_name(plain: Path) -> None:
    model = load(plain)
    params = flat(model.params)
    assert type(model.params) is dict
    assert all(isinstance(leaf, jax.Array) for leaf in params.values())
    assert {name: leaf.shape for name, leaf in params.items()} == layout.expected_shapes(
        ModelConfig.from_dict(TINY)
    )
    tensors = drawn()
    for name, leaf in params.items():
        if name in tensors:
            np.testing.assert_array_equal(leaf, tensors[name])
    table = np.concatenate([tensors[f"{NGRAM}shard_{k}.weight"] for k in range(4)])
    np.testing.assert_array_equal(params[f"{NGRAM}weight"], table)
    assert (model.tokenizer, model.skipped) == (None, ())
    assert "array" not in repr(model)


@BOTH_CONFIGS
def test_every_layout_loads_to_the_same(config: Config, tmp_path: Path) -> None:
    two = config is TINY_TWO_PLE
    expected = load(write(tmp_path / "a", config, drawn(two))).params
    for number, prefix in enumerate(("model.", "model.language_model.")):
        for fused in (True, False):
            folder = tmp_path / f"{number}{fused}"
            tensors = drawn(two, fused, prefix)
            assert_same(load(write(folder, text_config(config), tensors)).params, expected)


def test_the_head_may_be_stored_per_expert_too(tmp_path: Path, plain: Path) -> None:
    tensors = dict(drawn())
    for part in ("gate_up_proj", "down_proj"):
        name = f"mtp.layers.0.mlp.experts.{part}"
        tensors |= split_experts(name, tensors.pop(name))
    assert_same(load(write(tmp_path, TINY, tensors)).params, load(plain).params)


def test_ngram_shards_are_joined_in_numeric_order(tmp_path: Path, plain: Path) -> None:
    """By name, shard_10 comes before shard_2. And 408 rows in 15 shards leave a short one."""
    table = np.asarray(flat(load(plain).params)[f"{NGRAM}weight"])
    tensors = {n: t for n, t in drawn().items() if "shard_" not in n}
    shards = np.split(table, range(28, len(table), 28))
    assert len(shards) == 15
    assert len({len(shard) for shard in shards}) == 2
    tensors |= {f"{NGRAM}shard_{k}.weight": shard for k, shard in enumerate(shards)}
    model = load(write(tmp_path / "a", changed(TINY, split_ngram_parts=15), tensors))
    np.testing.assert_array_equal(flat(model.params)[f"{NGRAM}weight"], table)
    save(tmp_path / "b", model.params, config=model.config)
    assert load_file(tmp_path / "b/model.safetensors").keys() == tensors.keys()
    assert_same(load(tmp_path / "b").params, model.params)


def test_the_ngram_table_may_be_whole(tmp_path: Path, plain: Path) -> None:
    expected = load(plain).params
    tensors = {n: t for n, t in drawn().items() if "shard_" not in n}
    tensors[f"{NGRAM}weight"] = np.asarray(flat(expected)[f"{NGRAM}weight"])
    assert_same(load(write(tmp_path, TINY, tensors)).params, expected)


def test_hash_buffers_may_be_absent(tmp_path: Path, plain: Path) -> None:
    tensors = {n: t for n, t in drawn().items() if t.dtype != np.int64}
    assert len(tensors) == len(drawn()) - 3
    assert_same(load(write(tmp_path, TINY, tensors)).params, load(plain).params)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_float8_table_keeps_its_scale(shape: tuple[int, ...], tmp_path: Path) -> None:
    scale = np.full(shape, 0.37, np.float32)
    model = load(write(tmp_path / "a", TINY, float8(drawn(), scale)))
    table = flat(model.params)[f"{NGRAM}weight"]
    kept = flat(model.params)[f"{NGRAM}weight_scale"]
    assert (table.dtype, kept.dtype, kept.shape) == (jnp.float8_e4m3fn, jnp.float32, ())
    embedding = NgramTableWeight(rows=table.shape[0], width=table.shape[1], scale=1.0)
    owner = model.params["model"]["layers"]["1"]["ple"]["ple_embedding"]["ngram_embedding"]
    rows = jnp.array([[[0, 5, 300]]])
    picked = embedding.apply({"params": owner}, rows)
    values = np.concatenate([drawn()[f"{NGRAM}shard_{k}.weight"] for k in range(4)])
    values = values.astype(jnp.float8_e4m3fn).astype(np.float32) * np.float32(0.37)
    # The rows come as they are stored; the scale is applied where they are used.
    np.testing.assert_array_equal(np.asarray(picked) * np.asarray(kept), values[np.asarray(rows)])

    save(tmp_path / "b", model.params, config=model.config)
    assert_same(load(tmp_path / "b").params, model.params)


def test_a_scale_is_not_narrowed(tmp_path: Path) -> None:
    folder = write(tmp_path, TINY, float8(drawn(), np.full(1, 0.37, np.float32)))
    params = flat(load(folder, dtype=jnp.bfloat16).params)
    assert params.pop(f"{NGRAM}weight_scale") == np.float32(0.37)
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", [None, "float32", "bfloat16"])
def test_types(dtype: Any, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored types stay, widening is exact, narrowing rounds to nearest, across slices too."""
    monkeypatch.setattr(tensorfile, "_CHUNK", 1 << 12)
    stored = {
        n: t if t.dtype == np.int64 else t.astype(jnp.dtype(dtype)) for n, t in drawn().items()
    }
    model = load(write(tmp_path / "a", TINY, stored), dtype=wanted)
    for name, leaf in flat(model.params).items():
        assert leaf.dtype == jnp.dtype(wanted or dtype)
        if name in stored:
            expected = jnp.asarray(stored[name]).astype(wanted or dtype)
            assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes(), name
    save(tmp_path / "b", model.params, config=model.config)
    assert_same(load(tmp_path / "b").params, model.params)


def test_special_values_survive_conversion(tmp_path: Path) -> None:
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    tensors = dict(drawn())
    tensors["lm_head.weight"] = np.resize(special, tensors["lm_head.weight"].shape)
    head = load(write(tmp_path, TINY, tensors), dtype=jnp.bfloat16).params["lm_head"]["weight"]
    found = np.asarray(head.astype(jnp.float32)).ravel()[:5]
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf, 0, 0])
    assert np.signbit(found[3])


def test_vision_tensors_are_skipped_and_reported(tmp_path: Path, plain: Path) -> None:
    extra: Tensors = {
        "model.visual.blocks.0.attn.qkv.weight": np.zeros((2, 2), np.float64),
        "visual.patch_embed.proj.bias": np.zeros(3, np.float16),
    }
    model = load(write(tmp_path, TINY, drawn() | extra))
    assert model.skipped == tuple(extra)
    assert_same(model.params, load(plain).params)


def test_without_the_head(tmp_path: Path, plain: Path) -> None:
    whole, trunk = load(plain), load(plain, head=False)
    assert trunk.config == dataclasses.replace(
        whole.config, mtp_num_hidden_layers=0, mtp_rope_theta=None
    )
    assert trunk.skipped == tuple(sorted(n for n in drawn() if n.startswith("mtp.")))
    assert_same(trunk.params, {k: v for k, v in whole.params.items() if k != "mtp"})

    # What transformers' save_pretrained leaves of a checkpoint.
    tensors = {n: t for n, t in drawn().items() if not n.startswith("mtp.")}
    folder = write(tmp_path, TINY, tensors)
    text = message(folder)
    assert "31 missing: mtp.fc_embedding.weight; " in text
    assert "; and 11 more\n" in text
    assert "load(path, head=False) loads the trunk alone" in text
    assert_same(load(folder, head=False).params, trunk.params)


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "ä\n": 1}, unk_token="a"))
    model = load(write(tmp_path / "a"))
    save(tmp_path / "b", model.params, config=model.config, tokenizer=tokenizer)
    again = load(tmp_path / "b").tokenizer
    assert again is not None
    assert again.get_vocab() == tokenizer.get_vocab()
    for contents in ("[]", "{", '{"model": 7}'):
        (tmp_path / "b/tokenizer.json").write_text(contents)
        assert "tokenizer.json: not a tokenizer: " in message(tmp_path / "b")


@pytest.mark.parametrize("dtype", [jnp.float16, "int8", jnp.float8_e4m3fn], ids=str)
def test_dtypes_that_are_refused(dtype: Any, plain: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype: got .*; allowed: None, float32 or bfloat16"):
        load(plain, dtype=dtype)


def clock(step: float) -> types.SimpleNamespace:
    """A time module whose every reading is ``step`` seconds after the one before."""

    def readings() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += step

    return types.SimpleNamespace(monotonic=functools.partial(next, readings()))


@pytest.mark.parametrize(
    ("step", "progress", "terminal", "shown"),
    [
        (0.5, True, False, True),
        (0.5, None, True, True),
        (0.5, None, False, False),
        (0.5, False, True, False),
        (1e-4, True, False, False),
        (1e-4, None, True, False),
    ],
)
def test_only_a_slow_load_shows_a_progress_bar(
    step: float,
    progress: bool | None,
    terminal: bool,
    shown: bool,
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(load_module, "time", clock(step))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    load(plain, progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert (f"Loading {plain.name}" in err) == shown
    assert ("100%" in err or "KiB" in err or "MiB" in err) == shown
    assert shown or err == ""


MEASURE = r"""
    import re, sys
    import jax, jax.numpy as jnp
    from hipjax.model.config import ModelConfig
    from hipjax.model.layout import expected_shapes
    from hipjax.model.load import load
    from hipjax.model.save import save

    def peak():
        # Not ru_maxrss: a child begins with its parent's.
        status = open("/proc/self/status").read()
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])

    small, large, out, dtype = sys.argv[1:]
    warm = load(small, dtype=jnp.float32)
    save(out + "-warm", warm.params, config=warm.config)
    expected_shapes(ModelConfig.from_file(large))
    before = peak()
    model = load(large, dtype=None if dtype == "None" else dtype)
    after = peak()
    save(out, model.params, config=model.config)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    print(nbytes, after - before, peak() - after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [None, "float32"], ids=["as stored", "converted"])
def test_peak_memory(dtype: str | None, plain: Path, tmp_path: Path) -> None:
    """The parameters exist once, also while shards are joined and types converted."""
    stored = np.float32 if dtype is None else jnp.bfloat16
    fields = changed(TINY, ngram_vocab_size_base=1_200_000)
    config = ModelConfig.from_dict(fields)
    rows = config.ngram_table(0).rows // 4
    tensors = {n: t for n, t in drawn().items() if t.dtype != np.int64}
    shard = np.ones((rows, 16), stored)
    tensors |= {f"{NGRAM}shard_{k}.weight": shard for k in range(4)}
    large = write(tmp_path / "large", fields, tensors)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    arguments = [str(plain), str(large), str(tmp_path / "out"), str(dtype)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nbytes, loading, saving = map(int, done.stdout.split())
    assert nbytes > 300e6
    # The first is the negative control: the measurement sees the parameters.
    assert 0.95 * nbytes < loading < 1.1 * nbytes + 64e6
    assert saving < 0.1 * nbytes + 64e6
