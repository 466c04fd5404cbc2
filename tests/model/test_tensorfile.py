"""Damaged safetensors files give a clear error, and nothing else."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hipjax.model import checkpoint, layout, tensorfile
from hipjax.model.load import load
from hipjax.model.params import flat
from hipjax.model.tensorfile import CheckpointError
from tests.model.checkpoints import drawn, message, write, write_shards

load_module = importlib.import_module("hipjax.model.load")


def edited_header(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites the JSON header and leaves the tensors' bytes alone."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = edit(header)
    text = json.dumps(header if text is None else text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["lm_head.weight"].update(fields)


def overlapping(header: dict[str, Any]) -> None:
    last = max(header, key=lambda n: header[n]["data_offsets"][0])
    header[last]["data_offsets"] = [n - 64 for n in header[last]["data_offsets"]]


def hole(header: dict[str, Any]) -> None:
    last = max(header, key=lambda n: header[n]["data_offsets"][0])
    header[last]["data_offsets"] = [n + 64 for n in header[last]["data_offsets"]]


def odd_name(header: dict[str, Any]) -> None:
    header["a\x1b[2J"] = {"dtype": "F32", "shape": [1], "data_offsets": [1 << 40, (1 << 40) + 4]}


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "array": (lambda header: [header], "invalid type: sequence"),
    "entry": (lambda header: {"a": 1}, "invalid type: integer `1`"),
    "metadata": (lambda header: header | {"__metadata__": []}, "expected a map"),
    "dtype": (entry(dtype="F33"), "unknown variant `F33`"),
    "long dtype": (entry(dtype="F" * 100_000), "unknown variant `FFF"),
    "shape": (entry(shape=[512, -64]), "invalid value: integer `-64`"),
    "shape of many axes": (entry(shape=[2**61] * 100_000), "overflow computing buffer size"),
    "shape of truths": (entry(shape=[True]), "invalid type: boolean `true`"),
    "shape of floats": (entry(shape=[512.0, 64]), "invalid type: floating point `512.0`"),
    "offsets": (entry(data_offsets=[8, 4]), "invalid offset for tensor `"),
    "size": (entry(shape=[512, 65]), "invalid shape, data type, or offset for tensor"),
    "overlap": (overlapping, "invalid offset for tensor `"),
    "hole": (hole, "invalid offset for tensor `"),
    "odd name": (odd_name, "invalid offset for tensor `a\\x1b[2J`"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(case: str, tmp_path: Path) -> None:
    edit, expected = HEADERS[case]
    file = write(tmp_path) / "model.safetensors"
    edited_header(file, edit)
    text = message(tmp_path)
    assert text.startswith(f"{file}: bad header: ")
    assert expected in text
    assert len(text) < len(str(file)) + 300


def test_a_header_that_names_a_tensor_twice(tmp_path: Path) -> None:
    """Also where the last one, which the safetensors library takes, fits the file."""
    file = write(tmp_path) / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head = raw[8 : 8 + length].replace(
        b"{", b'{"lm_head.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},', 1
    )
    file.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
    with safe_open(file, "np") as opened:
        assert opened.get_slice("lm_head.weight").get_shape() == [512, 64]
    text = message(tmp_path)
    assert text.startswith(f"{file}: bad header: ")
    assert "duplicate name lm_head.weight" in text


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda raw: b"", "truncated: "),
        (lambda raw: raw[:7], "truncated: "),
        (lambda raw: raw[:100], "truncated, or not a safetensors file: "),
        (lambda raw: raw[:-1], "truncated, or too long: "),
        (lambda raw: raw + b"\0", "truncated, or too long: "),
        (lambda raw: b"\x80\x04" + raw, "not a safetensors file: "),
        (lambda raw: b"PK\x03\x04" + raw, "not a safetensors file: "),
        (lambda raw: raw[:8] + b"}" + raw[9:], "bad header: "),
        (lambda raw: raw[:8] + b"\xff" + raw[9:], "bad header: "),
        (
            lambda raw: (1 << 16).to_bytes(8, "little") + b"[" * (1 << 16),
            "bad header: ",
        ),
        (
            lambda raw: (5006).to_bytes(8, "little") + b'{"a":' + b"9" * 5000 + b"}",
            "bad header: ",
        ),
    ],
    ids=[
        "empty",
        "prefix",
        "in header",
        "in data",
        "appended",
        "pickle",
        "zip",
        "syntax",
        "utf-8",
        "nested",
        "digits",
    ],
)
def test_damaged_files(damage: Callable[[bytes], bytes], expected: str, tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert message(tmp_path).startswith(f"{file}: {expected}")


def test_a_file_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path) / "model.safetensors"
    read = load_module.read_into

    def shrink(*arguments: Any) -> None:
        os.truncate(file, 20_000)
        read(*arguments)

    monkeypatch.setattr(load_module, "read_into", shrink)
    assert "it has changed since its header was read" in message(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("BOOL", [3], 3),
        ("F4", [2, 3], 3),
        ("F6_E2M3", [4], 3),
        ("F8_E8M0", [3], 3),
        ("I16", [3], 6),
        ("U32", [0], 0),
        ("C64", [1], 8),
    ],
)
def test_a_type_that_is_not_ours(dtype: str, shape: list[int], nbytes: int, tmp_path: Path) -> None:
    """Such as a vision tensor may have: its place is known, and it is skipped."""
    name = "model.visual.a"
    file = write(tmp_path) / "model.safetensors"

    def added(header: dict[str, Any]) -> None:
        last = max(e["data_offsets"][1] for n, e in header.items() if n != "__metadata__")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [last, last + nbytes]}

    edited_header(file, added)
    with file.open("ab") as handle:
        handle.write(bytes(nbytes))
    end = file.stat().st_size
    found = tensorfile.read_header(file)[name]
    assert found == tensorfile.StoredTensor(name, dtype, tuple(shape), file, end - nbytes, nbytes)
    assert load(tmp_path).skipped == (name,)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes]:
    """A folder for corrupted copies, and the bytes of an intact checkpoint."""
    folder = write_shards(tmp_path_factory.mktemp("scratch"), {"a.safetensors": drawn()})
    return folder, (folder / "a.safetensors").read_bytes(), (folder / checkpoint.INDEX).read_bytes()


@settings(max_examples=100)
@given(data=st.data())
def test_corruption_gives_a_model_or_the_error(
    data: st.DataObject, scratch: tuple[Path, bytes, bytes]
) -> None:
    folder, weights, index = scratch
    in_index = data.draw(st.booleans())
    target = folder / (checkpoint.INDEX if in_index else "a.safetensors")
    original = index if in_index else weights
    head = len(index) if in_index else 8 + int.from_bytes(weights[:8], "little")
    corrupt = bytearray(original)
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, head - 1))
        corrupt[place] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del corrupt[data.draw(st.integers(0, len(corrupt))) :]
    target.write_bytes(bytes(corrupt))
    try:
        model = load(folder)
    except CheckpointError as error:
        assert bytes(corrupt) != original
        assert str(folder) in str(error)
    else:
        assert flat(model.params).keys() == layout.expected_shapes(model.config).keys()
    finally:
        target.write_bytes(original)
