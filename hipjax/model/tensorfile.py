"""Safetensors files: their headers, checked before a tensor is used, and their tensors.

The format is a length, a JSON header and the bytes of the tensors; see
https://huggingface.co/docs/safetensors. The safetensors library checks the header against
the file. The bytes are read here, because the library hands out new arrays only, and for
numpy none of float8: a tensor is to go straight into its place in a larger parameter,
whatever its type. Nothing in a checkpoint is ever executed: other formats are refused.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": jnp.dtype(jnp.float32),
    "F16": jnp.dtype(jnp.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
}
"""The element types that a Flash-Next checkpoint may hold, by their safetensors names."""

# What the library's complaints mean to somebody with a checkpoint; any other is a bad header.
_MEANINGS = {
    "header too small": "truncated",
    "header too large": "not a safetensors file",
    "invalid header length": "truncated, or not a safetensors file",
    "incomplete metadata": "truncated, or too long",
}

_MAX_NAME = 200  # characters of a name or of a complaint that a message shows
_CHUNK = 16 << 20  # between two reports of progress, and the size of a conversion's buffer


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit its ``config.json``."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
      name: its name in the file.
      dtype: the safetensors name of its element type.
      shape: its shape.
      file: the file that holds it.
      start: offset of its first byte from the beginning of the file.
      nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


def printable(name: str) -> str:
    """Text of a file as it may appear in a message: not too long, control characters escaped."""
    short = name if len(name) <= _MAX_NAME else name[:_MAX_NAME] + "…"
    return short if short.isprintable() else repr(short)


def parse_json(raw: bytes, where: object) -> dict[str, Any]:
    """Decodes a JSON object that names nothing twice."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds a {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (twice, _), *_ = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate name {printable(twice)}")
    return value


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after checking that its bytes are all there.

    Raises:
      CheckpointError: the header is malformed or names a tensor twice, tensors overlap or
        leave a hole, a size does not follow from dtype and shape, or the file is too short
        or too long.
    """
    try:
        with safetensors.safe_open(file, "np") as opened, file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            # The library tells no offsets, and takes the last of two tensors of one name.
            header = parse_json(handle.read(length), f"{file}: bad header")
            return {
                name: _tensor(name, opened.get_slice(name), header[name], file, 8 + length)
                for name in opened.offset_keys()
            }
    except safetensors.SafetensorError as error:
        complaint = str(error)
        meanings = (text for part, text in _MEANINGS.items() if part in complaint)
        meaning = next(meanings, "bad header")
        raise CheckpointError(f"{file}: {meaning}: {printable(complaint)}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _tensor(name: str, view: Any, entry: Any, file: Path, begin: int) -> StoredTensor:
    first, last = entry["data_offsets"]
    shape = tuple(view.get_shape())
    return StoredTensor(name, view.get_dtype(), shape, file, begin + first, last - first)


def read_into(
    tensor: StoredTensor, out: np.ndarray, report: Callable[[int], None] = lambda count: None
) -> None:
    """Reads a tensor's elements into ``out``, converting to its dtype a slice at a time.

    Args:
      tensor: what to read; one of the types of `DTYPES`.
      out: a contiguous one-dimensional array of as many elements.
      report: is told of every slice how many bytes were read.
    """
    stored = DTYPES[tensor.dtype]
    convert = out.dtype != stored
    buffer = np.empty(min(_CHUNK, tensor.nbytes), np.uint8) if convert else out.view(np.uint8)
    try:
        with tensor.file.open("rb", buffering=0) as handle:
            handle.seek(tensor.start)
            for begin in range(0, tensor.nbytes, _CHUNK):
                count = min(_CHUNK, tensor.nbytes - begin)
                part = buffer[:count] if convert else buffer[begin : begin + count]
                _fill(handle, part, tensor)
                if convert:
                    first, last = begin // stored.itemsize, (begin + count) // stored.itemsize
                    with np.errstate(all="ignore"):  # NaN and infinity are converted as well
                        out[first:last] = part.view(stored)
                report(count)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error}") from error


def _fill(handle: Any, part: np.ndarray, tensor: StoredTensor) -> None:
    left = part.data
    while left:
        got = handle.readinto(left)
        if not got:
            raise CheckpointError(
                f"{tensor.file}: ended inside of {printable(tensor.name)}; it has changed "
                "since its header was read"
            )
        left = left[got:]


def write_file(
    file: Path,
    entries: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Writes one safetensors file.

    Args:
      file: a file that does not exist yet.
      entries: name, dtype and shape of every tensor. Wider types should come first, so
        that every tensor is aligned.
      arrays: their values, taken one at a time.
    """
    labels = {dtype: label for label, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": labels[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("xb") as handle:
        handle.write(len(raw).to_bytes(8, "little"))
        handle.write(raw)
        for array in arrays:
            handle.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
