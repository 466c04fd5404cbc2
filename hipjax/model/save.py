"""From a model in memory to a checkpoint folder that transformers reads as well."""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from hipjax.model import layout
from hipjax.model.checkpoint import INDEX, SINGLE, Problems
from hipjax.model.config import ModelConfig
from hipjax.model.params import flat
from hipjax.model.tensorfile import DTYPES, write_file
from hipjax.typing import Params

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_SHARDS = "model-*-of-*.safetensors"
_LABELS = {dtype: label for label, dtype in DTYPES.items()}


class _Entry(NamedTuple):
    """A tensor to be written: a run of the elements of ``owner``."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    owner: str
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    path: str | os.PathLike[str],
    params: Params,
    *,
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    per_expert: bool = False,
    max_shard_bytes: int = 5 * 2**30,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint in the Hugging Face layout, text-only names.

    Files are written under temporary names in the folder and then renamed, the
    ``config.json`` last: an interrupted save leaves no folder that loads.

    Args:
      path: the folder; it is made if need be.
      params: the weights, as `load` returns them. They are written in the types they
        have.
      config: the model's configuration.
      tokenizer: written as ``tokenizer.json`` if given.
      per_expert: whether the trunk's experts are stored one by one, as transformers
        writes them, rather than fused, as in the release. The head's are always fused.
      max_shard_bytes: above this many bytes of weights there are several files and an
        index. A tensor that is larger by itself gets a file of its own.
      overwrite: whether to replace a checkpoint that is already there: its
        ``config.json``, weights, index and ``tokenizer.json``. Other files stay.

    Raises:
      FileExistsError: there is a checkpoint, and ``overwrite`` is false.
      CheckpointError: ``params`` and ``config`` do not fit; the message lists every
        missing, surplus and misshapen parameter and wrong dtype.
      ValueError: ``max_shard_bytes`` is not positive.

    Source: model-spec section 2.

    Example:
      >>> import importlib.resources, tempfile
      >>> from hipjax.model.load import load
      >>> model = load(importlib.resources.files("hipjax") / "assets" / "nano")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(folder, model.params, config=model.config, tokenizer=model.tokenizer)
      ...     load(folder).config == model.config
      True
    """
    folder = Path(path)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: got {max_shard_bytes}; allowed: 1 or more")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"path: {folder} is a file; allowed: a folder, or a new name")
    leaves = flat(params)
    _check(leaves, config)
    old = _checkpoint_files(folder)
    if old and not overwrite:
        raise FileExistsError(
            f"path: {folder} already holds {', '.join(sorted(file.name for file in old))}; "
            "overwrite=True replaces the checkpoint"
        )
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        _write(staging, leaves, config, tokenizer, per_expert, max_shard_bytes)
        # From here to the last rename the folder has no config, so it does not load.
        for file in sorted(old, key=lambda file: file.name != _CONFIG):
            file.unlink()
        written = sorted(staging.iterdir(), key=lambda file: file.name == _CONFIG)
        for file in written:
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty, unless something failed
                folder.rmdir()


def _check(leaves: Mapping[str, Any], config: ModelConfig) -> None:
    problems = Problems()
    left = {
        name: (tuple(leaf.shape), _LABELS.get(np.dtype(leaf.dtype), str(leaf.dtype)))
        for name, leaf in leaves.items()
    }
    for name, expected in layout.expected_shapes(config).items():
        given = left.pop(name, None)
        if given is None:
            problems.add("missing", name)
            continue
        layout.check(name, *given, expected, layout.allowed_types(name), problems)
        if layout.is_table(name):
            scale_name = layout.scale_name(name)
            scale = left.pop(scale_name, None)
            layout.check_scale(name, given[1], scale and scale_name, problems)
            if scale:
                layout.check(scale_name, *scale, (), layout.WIDE, problems)
    for name in left:
        problems.add("surplus", name)
    problems.raise_if_any("params: they do not fit config")


def _checkpoint_files(folder: Path) -> list[Path]:
    names = (_CONFIG, _TOKENIZER, SINGLE, INDEX)
    there = [folder / name for name in names if (folder / name).exists()]
    return there + sorted(folder.glob(_SHARDS))


def _write(
    folder: Path,
    leaves: Mapping[str, Any],
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    per_expert: bool,
    max_shard_bytes: int,
) -> None:
    buffers = layout.ngram_buffers(config)
    values = {**leaves, **buffers}
    # int64 and float32 first: every tensor of a file is then aligned to its own type.
    entries = sorted(_entries(values, config, per_expert), key=lambda e: -e.dtype.itemsize)
    groups = _grouped(entries, max_shard_bytes)
    names = [SINGLE]
    if len(groups) > 1:
        names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
            "weight_map": {
                entry.name: name
                for name, group in zip(names, groups, strict=True)
                for entry in group
            },
        }
        _write_json(folder / INDEX, index)
    for name, group in zip(names, groups, strict=True):
        write_file(
            folder / name,
            [(entry.name, entry.dtype, entry.shape) for entry in group],
            _arrays(group, values),
        )
    if tokenizer is not None:
        (folder / _TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(folder / _CONFIG, config.to_dict())


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _entries(values: Mapping[str, Any], config: ModelConfig, per_expert: bool) -> Iterator[_Entry]:
    for name, leaf in values.items():
        shape = tuple(leaf.shape)
        split = None
        if layout.is_table(name) or (per_expert and not name.startswith("mtp.")):
            split = layout.pieces(name, shape, config)
        for piece in split or layout.whole(name, shape):
            yield _Entry(piece.name, np.dtype(leaf.dtype), piece.shape, name, piece.start)


def _grouped(entries: list[_Entry], max_shard_bytes: int) -> list[list[_Entry]]:
    groups: list[list[_Entry]] = [[]]
    used = 0
    for entry in entries:
        if groups[-1] and used + entry.nbytes > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(entry)
        used += entry.nbytes
    return groups


def _arrays(group: list[_Entry], values: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """The values of each entry; the pieces of a parameter share one copy on the host."""
    owner, whole = "", np.empty(0)
    for entry in group:
        if entry.owner != owner:
            owner, whole = entry.owner, _on_host(values[entry.owner]).reshape(-1)
        yield whole[entry.start : entry.start + math.prod(entry.shape)]


def _on_host(leaf: Any) -> np.ndarray:
    # An array keeps the host's copy that it once made. Its shard is an object of its own,
    # so what is copied here is let go after it is written.
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)
