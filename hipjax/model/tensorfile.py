"""Safetensors files: their headers, checked before a tensor is used, and their tensors.

The format is a length, a JSON header and the bytes of the tensors; see
https://huggingface.co/docs/safetensors. It is read here directly, because a tensor goes
straight into its place in a larger parameter, and bfloat16 and float8 are to arrive as
they are. Nothing in a checkpoint is ever executed: other formats are refused.
"""

import collections
import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": jnp.dtype(jnp.float32),
    "F16": jnp.dtype(jnp.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
}
"""The element types that a Flash-Next checkpoint may hold, by their safetensors names."""

# The others are known too: a vision tensor of such a type is skipped like any other.
_BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {
    **dict.fromkeys(("C64", "F64", "U64"), 64),
    **dict.fromkeys(("I32", "U32"), 32),
    **dict.fromkeys(("I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

_MAX_HEADER = 100_000_000  # what the safetensors library allows
_MAX_AXES = 32
_MAX_NAME = 200  # characters of a name that a message shows
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
    """A name as it may appear in a message: not too long, control characters escaped."""
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
      CheckpointError: the header is malformed, tensors overlap or leave a hole, a size
        does not follow from dtype and shape, or the file is too short or too long.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise CheckpointError(f"{file}: truncated: {size} bytes, not even a header")
            if length > _MAX_HEADER:
                raise CheckpointError(
                    f"{file}: not a safetensors file: the header would be {length} bytes long"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{file}: truncated: {size} bytes, of which the header should be {length}"
                )
            header = parse_json(handle.read(length), f"{file}: bad header")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise CheckpointError(f"{file}: bad header: __metadata__ is not an object")
    begin = 8 + length
    tensors = {name: _tensor(name, entry, file, begin) for name, entry in header.items()}
    end = begin
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != end:
            kind = "overlaps the tensor before it" if tensor.start < end else "follows a hole"
            raise CheckpointError(f"{file}: bad header: {printable(tensor.name)} {kind}")
        end += tensor.nbytes
    if end != size:
        kind = "truncated" if size < end else "too long"
        raise CheckpointError(f"{file}: {kind}: {size} bytes, but its tensors end at {end}")
    return tensors


def _tensor(name: str, entry: Any, file: Path, begin: int) -> StoredTensor:
    fault = _fault(entry)
    if fault is not None:
        raise CheckpointError(f"{file}: bad header: {printable(name)}: {fault}")
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    return StoredTensor(name, entry["dtype"], shape, file, begin + first, last - first)


def _fault(entry: Any) -> str | None:
    """What is wrong with a header's entry for one tensor."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "an entry has dtype, shape and data_offsets, and nothing else"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        return f"unknown dtype {reprlib.repr(dtype)}; known: {', '.join(sorted(_BITS))}"
    if not _sizes(shape):
        return f"shape is {reprlib.repr(shape)}; allowed: a list of sizes"
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        shown = reprlib.repr(offsets)
        return f"data_offsets is {shown}; allowed: a first byte, and the one after the last"
    nbytes = offsets[1] - offsets[0]
    if 8 * nbytes != math.prod(shape) * _BITS[dtype]:
        return f"{dtype} {shape} does not take {nbytes} bytes"
    return None


def _sizes(value: Any) -> bool:
    # type() rather than isinstance(): JSON's true is no size.
    if not isinstance(value, list) or len(value) > _MAX_AXES:
        return False
    return all(type(n) is int and 0 <= n < 1 << 62 for n in value)


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
