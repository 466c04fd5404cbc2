"""Which files of a folder are read, and which folders are refused."""

import json
from pathlib import Path

import pytest

from hipjax.model import checkpoint
from hipjax.model.config import ConfigError
from hipjax.model.load import load
from tests.model.checkpoints import (
    assert_same,
    drawn,
    halves,
    message,
    plain_params,
    write,
    write_shards,
)
from tests.tiny import TINY


def test_index_with_shards(tmp_path: Path) -> None:
    first, second = halves()
    folder = write_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    (folder / "other.safetensors").write_bytes(b"not named by the index, so not read")
    assert_same(load(folder).params, plain_params())


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, {"model.safetensors": drawn()})
    assert_same(load(folder).params, plain_params())


def test_the_download_cache_of_hugging_face_loads(tmp_path: Path) -> None:
    """There, a snapshot's files are links into the folder ``blobs``."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1f", tmp_path / "models--a--b/blobs"
    first, second = halves()
    write_shards(snapshot, {"a.safetensors": first, "b.safetensors": second})
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("../../blobs", str(number)))
    assert_same(load(snapshot).params, plain_params())


def test_not_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path / "nothing", file):
        assert message(path).startswith(f"path: {path} is not a folder")
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    text = message(tmp_path)
    assert "there is no model.safetensors and no model.safetensors.index.json" in text
    assert "pickled .bin or .pt among them) are not read" in text


def test_a_single_file_beside_an_index_of_others(tmp_path: Path) -> None:
    first, second = halves()
    write_shards(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    assert "names other files; remove one of the two" in message(write(tmp_path))


def test_the_index_and_its_files_disagree(tmp_path: Path) -> None:
    first, second = halves()
    name = next(iter(first))
    shards = {"a.safetensors": first, "b.safetensors": second | {name: first[name]}}
    write_shards(tmp_path, shards, absent__weight="a.safetensors")
    text = message(tmp_path)
    assert text.startswith(f"{tmp_path / checkpoint.INDEX} and the files it names disagree:\n")
    assert (
        "1 tensor(s) that the index names but the file does not hold: "
        "absent.weight in a.safetensors"
    ) in text
    assert f"1 duplicate tensor(s): {name} in b.safetensors and in a.safetensors" in text

    index = json.loads((tmp_path / checkpoint.INDEX).read_text())
    del index["weight_map"]["lm_head.weight"]
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    assert "1 tensor(s) that are not in the index: lm_head.weight in " in message(tmp_path)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ("[]", "holds a list, not an object"),
        ("{", "not valid JSON"),
        ("{}", "weight_map is missing or empty"),
        ('{"weight_map": {}}', "weight_map is missing or empty"),
        ('{"weight_map": {"a": 7}}', "weight_map sends a to 7; allowed: the name of"),
        ('{"weight_map": {"a": "a.bin"}}', "weight_map sends a to 'a.bin'; allowed: the name of"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "duplicate name a"),
        ('{"weight_map": {"a": "none.safetensors"}}', "cannot open 'none.safetensors'"),
        ('{"weight_map": {"a": "\\u0000.safetensors"}}', "cannot open '\\x00.safetensors'"),
        ('{"weight_map": {"a": "dir.safetensors"}}', "'dir.safetensors' is not a regular file"),
        ('{"weight_map": {"a": "loop.safetensors"}}', "cannot open 'loop.safetensors'"),
    ],
)
def test_bad_indexes(contents: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / checkpoint.INDEX).write_text(contents)
    assert expected in message(tmp_path)


@pytest.mark.parametrize("way", ["relative", "absolute", "link", "linked folder", "single"])
def test_weights_outside_of_the_folder_are_not_read(way: str, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside") / "model.safetensors"
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    name = {
        "relative": "../outside/model.safetensors",
        "absolute": str(outside),
        "link": "a.safetensors",
        "linked folder": "sub/model.safetensors",
        "single": "model.safetensors",
    }[way]
    if way in ("link", "single"):
        (folder / name).symlink_to(outside)
    if way == "linked folder":
        (folder / "sub").symlink_to(outside.parent)
    if way != "single":
        index = {"weight_map": dict.fromkeys(drawn(), name)}
        (folder / checkpoint.INDEX).write_text(json.dumps(index))
    assert message(folder) == (
        f"{folder}: {name!r} leads to {outside}, outside of the folder; weights are read from "
        "the folder itself only"
    )
