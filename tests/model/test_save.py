"""What is saved loads again, and a save never damages what was there."""

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hipjax.model import checkpoint, tensorfile
from hipjax.model.config import ConfigError
from hipjax.model.load import FlashNext, load
from hipjax.model.params import flat
from hipjax.model.save import save
from hipjax.model.tensorfile import CheckpointError
from tests.model.checkpoints import (
    BOTH_CONFIGS,
    NGRAM,
    NORM,
    assert_same,
    drawn,
    plain_model,
    write,
)
from tests.tiny import TINY_TWO_PLE, Config

save_module = importlib.import_module("hipjax.model.save")


@BOTH_CONFIGS
@pytest.mark.parametrize("per_expert", [False, True], ids=["fused", "per_expert"])
@pytest.mark.parametrize("limit", [200_000, 5 << 30], ids=["shards", "single"])
def test_round_trip(config: Config, per_expert: bool, limit: int, tmp_path: Path) -> None:
    two = config is TINY_TWO_PLE
    model = load(write(tmp_path / "a", config, drawn(two)))
    folder = tmp_path / "new/b"
    save(folder, model.params, config=model.config, per_expert=per_expert, max_shard_bytes=limit)
    again = load(folder)
    assert again.config == model.config
    assert_same(again.params, model.params)

    # The safetensors library reads the same, and the names are transformers' own.
    files = sorted(folder.glob("*.safetensors"))
    written = {name: value for file in files for name, value in load_file(file).items()}
    assert_same(written, drawn(two, not per_expert))
    names = {file.name for file in folder.iterdir()} - {file.name for file in files}
    if limit == 200_000:
        assert [file.name for file in files] == [
            f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))
        ]
        assert len(files) > 2
        assert names == {"config.json", checkpoint.INDEX}
        index = json.loads((folder / checkpoint.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in written.values())
        for file in files:
            tensors = load_file(file)
            assert sum(v.nbytes for v in tensors.values()) <= limit or len(tensors) == 1
    else:
        assert names == {"config.json"}
    for file in files:
        for tensor in tensorfile.read_header(file).values():
            assert tensor.start % tensorfile.DTYPES[tensor.dtype].itemsize == 0


@pytest.fixture(name="model")
def loaded() -> FlashNext:
    return plain_model()


def test_numpy_parameters_can_be_saved(model: FlashNext, tmp_path: Path) -> None:
    save(tmp_path, jax.tree.map(np.asarray, model.params), config=model.config)
    assert_same(load(tmp_path).params, model.params)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", checkpoint.INDEX, "model-00001-of-00002.safetensors"],
)
def test_save_refuses_to_overwrite(name: str, model: FlashNext, tmp_path: Path) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(FileExistsError, match=f"already holds {name}; overwrite=True"):
        save(tmp_path, model.params, config=model.config)
    assert (tmp_path / name).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_overwrite_replaces_the_checkpoint_and_nothing_else(
    model: FlashNext, tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "tokenizer.json").write_text("another model's")
    doubled = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    for params, limit in ((doubled, 300_000), (model.params, 200_000), (doubled, 5 << 30)):
        save(tmp_path, params, config=model.config, max_shard_bytes=limit, overwrite=True)
        assert_same(load(tmp_path).params, params)
    names = ["README.md", "config.json", "model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names


def test_a_failed_save_changes_nothing(
    model: FlashNext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("no space left")

    before = write(tmp_path / "old")
    monkeypatch.setattr(save_module, "write_file", full)
    for folder in (before, tmp_path / "fresh"):
        with pytest.raises(OSError, match="no space left"):
            save(folder, model.params, config=model.config, overwrite=True)
    assert not (tmp_path / "fresh").exists()
    assert len(list(before.iterdir())) == 2
    assert_same(load(before).params, model.params)


def test_an_interrupted_replacement_does_not_load(
    model: FlashNext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never old and new files together."""
    write(tmp_path)
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if self.name.startswith("model-00002"):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, model.params, config=model.config, max_shard_bytes=200_000, overwrite=True)
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path)


def test_save_checks_what_it_is_given(model: FlashNext, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    params = dict(flat(model.params))
    del params["lm_head.weight"]
    params["extra"] = jnp.ones(1)
    params["mtp.fc_hidden.weight"] = jnp.ones((2, 2))
    params[NORM] = jnp.ones(16, jnp.int32)
    params[f"{NGRAM}weight"] = params[f"{NGRAM}weight"].astype(jnp.float8_e4m3fn)
    with pytest.raises(CheckpointError) as caught:
        save(folder, nested(params), config=model.config)
    first, *rest = str(caught.value).splitlines()
    assert first == "params: they do not fit config:"
    assert sorted(rest) == [
        "  1 misshapen: mtp.fc_hidden.weight is [2, 2], expected [64, 64]",
        "  1 surplus: extra",
        f"  1 wrong dtype: {NORM} is int32, allowed: BF16, F16, F32",
        f"  2 missing: lm_head.weight; {NGRAM}weight_scale (the table is F8_E4M3)",
    ]
    with pytest.raises(ValueError, match="max_shard_bytes: got 0; allowed: 1 or more"):
        save(folder, model.params, config=model.config, max_shard_bytes=0)
    assert not folder.exists()
    folder.touch()
    with pytest.raises(FileExistsError, match="is a file; allowed: a folder"):
        save(folder, model.params, config=model.config)


def nested(params: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in params.items():
        *owners, last = name.split(".")
        node = tree
        for owner in owners:
            node = node.setdefault(owner, {})
        node[last] = leaf
    return tree
