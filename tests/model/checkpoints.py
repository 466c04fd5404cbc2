"""Tiny checkpoints for the tests of loading and saving."""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from hipjax.model import checkpoint
from hipjax.model.load import FlashNext, load
from hipjax.model.params import flat
from hipjax.model.tensorfile import CheckpointError
from tests.tiny import TINY, TINY_TWO_PLE, Config, Tensors, random_tensors

NGRAM = "model.layers.1.ple.ple_embedding.ngram_embedding."
EXPERTS = "model.layers.0.mlp.experts."
NORM = "model.layers.2.linear_attn.norm.weight"
BUFFERS = "model.layers.1.ple.ple_embedding."
BOTH_CONFIGS = pytest.mark.parametrize("config", [TINY, TINY_TWO_PLE], ids=["tiny", "two_ple"])

Edit = Callable[[Tensors], Tensors]


@functools.cache
def drawn(two_ple: bool = False, fused: bool = True, prefix: str = "model.") -> Tensors:
    config = TINY_TWO_PLE if two_ple else TINY
    return random_tensors(config, 0, fused_experts=fused, prefix=prefix)


def changed(config: Config, **fields: Any) -> Config:
    return config | {"text_config": config["text_config"] | fields}


def write(folder: Path, config: Config = TINY, tensors: Tensors | None = None) -> Path:
    """A checkpoint in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(drawn() if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, shards: dict[str, Tensors], **weight_map: str) -> Path:
    """A checkpoint with an index; the keywords' names have ``__`` for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    index = {name: file for file, tensors in shards.items() for name in tensors}
    index |= {name.replace("__", "."): file for name, file in weight_map.items()}
    (folder / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    return folder


def halves() -> tuple[Tensors, Tensors]:
    names = sorted(drawn())
    first, second = names[::2], names[1::2]
    return {n: drawn()[n] for n in first}, {n: drawn()[n] for n in second}


def assert_same(found: Any, expected: Any) -> None:
    """Same names, dtypes, shapes and bits."""
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        ours, theirs = np.asarray(found[name]), np.asarray(value)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert ours.tobytes() == theirs.tobytes(), name


def message(folder: Path, **options: Any) -> str:
    """What `load` complains about."""
    with pytest.raises(CheckpointError) as caught:
        load(folder, **options)
    return str(caught.value)


def float8(tensors: Tensors, scale: np.ndarray | None) -> Tensors:
    """With the n-gram table in float8."""
    narrow = {n: t.astype(jnp.float8_e4m3fn) if "shard_" in n else t for n, t in tensors.items()}
    return narrow | ({} if scale is None else {f"{NGRAM}weight_scale": scale})


@functools.cache
def plain_model() -> FlashNext:
    """What `load` makes of `drawn`."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write(Path(folder)))


def plain_params() -> dict[str, Any]:
    return plain_model().params
