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

from hipjax.model import checkpoint, layout
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


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "array": (lambda header: [header], "holds a list, not an object"),
    "entry": (lambda header: {"a": 1}, "a: an entry has dtype, shape and data_offsets"),
    "metadata": (lambda header: header | {"__metadata__": []}, "__metadata__ is not an object"),
    "dtype": (entry(dtype="F33"), "lm_head.weight: unknown dtype 'F33'; known: BF16, BOOL"),
    "shape": (entry(shape=[512, -64]), "lm_head.weight: shape is [512, -64]; allowed"),
    "shape of many axes": (entry(shape=[2**61] * 100_000), "2305843009213693952, ...]; allowed"),
    "shape of truths": (entry(shape=[True]), "shape is [True]; allowed: a list of sizes"),
    "shape of floats": (entry(shape=[512.0, 64]), "shape is [512.0, 64]; allowed"),
    "offsets": (entry(data_offsets=[8, 4]), "data_offsets is [8, 4]; allowed: a first byte"),
    "size": (entry(shape=[512, 65]), "lm_head.weight: F32 [512, 65] does not take 131072 bytes"),
    "overlap": (overlapping, "overlaps the tensor before it"),
    "hole": (hole, "follows a hole"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(case: str, tmp_path: Path) -> None:
    edit, expected = HEADERS[case]
    file = write(tmp_path) / "model.safetensors"
    edited_header(file, edit)
    text = message(tmp_path)
    assert text.startswith(f"{file}: bad header: ")
    assert expected in text


def test_a_header_that_names_a_tensor_twice(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    raw = file.read_bytes()
    name = b"model.layers.0.linear_attn.in_proj_a.weight"
    file.write_bytes(raw.replace(name, name.replace(b"in_proj_a", b"in_proj_b")))
    text = message(tmp_path)
    assert "duplicate name model.layers.0.linear_attn.in_proj_b.weight" in text


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda raw: b"", "truncated: 0 bytes, not even a header"),
        (lambda raw: raw[:7], "truncated: 7 bytes, not even a header"),
        (lambda raw: raw[:100], "truncated: 100 bytes, of which the header should be "),
        (lambda raw: raw[:-1], "truncated: "),
        (lambda raw: raw + b"\0", "too long: "),
        (lambda raw: b"\x80\x04" + raw, "not a safetensors file: the header would be "),
        (lambda raw: b"PK\x03\x04" + raw, "not a safetensors file: the header would be "),
        (lambda raw: raw[:8] + b"}" + raw[9:], "bad header: not valid JSON: "),
        (lambda raw: raw[:8] + b"\xff" + raw[9:], "bad header: not valid JSON: "),
        (
            lambda raw: (1 << 16).to_bytes(8, "little") + b"[" * (1 << 16),
            "bad header: not valid JSON: ",
        ),
        (
            lambda raw: (5006).to_bytes(8, "little") + b'{"a":' + b"9" * 5000 + b"}",
            "bad header: not valid JSON: ",
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
