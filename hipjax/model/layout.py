"""Which tensors of a checkpoint make up which parameter.

Source: model-spec section 2. A parameter has the name of the tensor that holds it whole;
some may be stored in pieces instead: experts one by one, the n-gram table in shards.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from hipjax.model.checkpoint import Problems
from hipjax.model.config import ModelConfig
from hipjax.model.params import param_shapes
from hipjax.model.tensorfile import DTYPES, StoredTensor, printable, read_into

_VISION = ("model.visual.", "visual.", "model.vision_tower.", "vision_tower.")
_MULTIMODAL, _TEXT = "model.language_model.", "model."
_TABLE = ".ngram_embedding.weight"
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")

WIDE = ("BF16", "F16", "F32")
NARROW = ("F8_E4M3", "F8_E5M2")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A tensor that fills one run of a parameter.

    Attributes:
      name: the tensor's name.
      shape: its shape.
      start: its first element's place in the flattened parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: int


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter comes from.

    Attributes:
      name: the parameter's dotted name.
      shape: its shape.
      dtype: the safetensors name of the type it is stored in.
      parts: the tensors that fill it, each with its place in the flattened parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[StoredTensor, int], ...]


@functools.lru_cache(maxsize=8)
def expected_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """``param_shapes``, kept: at full depth it takes seconds."""
    return param_shapes(config)


def is_table(name: str) -> bool:
    """Whether a parameter is an n-gram table, the only one that may be float8."""
    return name.endswith(_TABLE)


def allowed_types(name: str) -> tuple[str, ...]:
    """The safetensors names of the types that a parameter may have."""
    return WIDE + NARROW if is_table(name) else WIDE


def scale_name(table: str) -> str:
    """The name of the scale that comes with a float8 table."""
    return table.removesuffix("weight") + "weight_scale"


def whole(name: str, shape: tuple[int, ...]) -> list[Piece]:
    """A parameter as one tensor."""
    return [Piece(name, shape, 0)]


def pieces(name: str, shape: tuple[int, ...], config: ModelConfig) -> list[Piece] | None:
    """A parameter in pieces, in their order, or None if it is only ever stored whole."""
    if name.endswith(_EXPERTS):
        return list(_experts(name, shape))
    if is_table(name):
        return list(_shards(name, shape, config.split_ngram_parts))
    return None


def _experts(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    owner, _, kind = name.rpartition(".")
    _, rows, width = shape
    # The rows of a fused gate_up_proj are the gate's, then the other's.
    labels = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
    part = (rows // len(labels), width)
    starts = range(0, math.prod(shape), math.prod(part))
    for number, start in enumerate(starts):
        expert, label = divmod(number, len(labels))
        yield Piece(f"{owner}.{expert}.{labels[label]}.weight", part, start)


def _shards(name: str, shape: tuple[int, ...], parts: int) -> Iterator[Piece]:
    rows, width = shape
    # As torch.chunk splits, which transformers calls: the last shard may be shorter.
    step = -(-rows // parts)
    owner = name.removesuffix("weight")
    for number, first in enumerate(range(0, rows, step)):
        part = (min(step, rows - first), width)
        yield Piece(f"{owner}shard_{number}.weight", part, first * width)


def ngram_buffers(config: ModelConfig) -> dict[str, np.ndarray]:
    """The int64 hash constants that a checkpoint stores, by name."""
    buffers = {}
    for index, one_based in enumerate(config.ple_layer_ids):
        owner = f"model.layers.{one_based - 1}.ple.ple_embedding."
        table = config.ngram_table(index)
        buffers[owner + "layer_multipliers"] = np.array(table.multipliers, np.int64)
        buffers[owner + "ngram_heads_vocab_sizes"] = np.array(table.sizes, np.int64)
        buffers[owner + "ngram_heads_offsets"] = np.array(table.offsets, np.int64)
    return buffers


def match(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, *, head: bool, where: object
) -> tuple[list[Source], tuple[str, ...]]:
    """Finds every parameter of ``config`` among the tensors of a checkpoint.

    Args:
      tensors: what the files hold, by name.
      config: the model; without a head if ``head`` is false.
      head: whether tensors called ``mtp.*`` are wanted; otherwise they are skipped.
      where: the checkpoint, for the message.

    Returns:
      Where each parameter comes from, and the names of the tensors skipped by name.

    Raises:
      CheckpointError: the two do not fit; all reasons in one message.
    """
    problems = Problems()
    unwanted = _VISION if head else (*_VISION, "mtp.")
    skipped = tuple(sorted(name for name in tensors if name.startswith(unwanted)))
    left: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(unwanted):
            continue
        plain = _TEXT + name[len(_MULTIMODAL) :] if name.startswith(_MULTIMODAL) else name
        if plain in left:
            both = sorted((printable(name), printable(left[plain].name)))
            problems.add("stored twice", " and ".join(both))
        left[plain] = tensor

    sources = []
    for name, shape in expected_shapes(config).items():
        source = _find(name, shape, config, left, problems)
        scale = left.pop(scale_name(name), None) if is_table(name) else None
        if source is None:
            continue
        sources.append(source)
        if check_scale(name, source.dtype, scale.name if scale else None, problems) and scale:
            # The one value may be stored as a vector of one element.
            shape = () if scale.shape == (1,) else scale.shape
            check(scale.name, shape, scale.dtype, (), WIDE, problems)
            sources.append(Source(scale_name(name), (), scale.dtype, ((scale, 0),)))
    for name, expected in ngram_buffers(config).items():
        if name in left:
            _compare(left.pop(name), expected, problems)
    for tensor in left.values():
        problems.add("surplus", printable(tensor.name))
    hint = ""
    if config.has_head and not any(name.startswith("mtp.") for name in tensors):
        hint = (
            "The config announces an MTP head, and the checkpoint has no mtp.* tensors "
            "(transformers' save_pretrained drops them). load(path, head=False) loads the "
            "trunk alone."
        )
    problems.raise_if_any(f"{where}: the tensors do not fit config.json", hint=hint)
    return sources, skipped


def _find(
    name: str,
    shape: tuple[int, ...],
    config: ModelConfig,
    left: dict[str, StoredTensor],
    problems: Problems,
) -> Source | None:
    """Takes one parameter's tensors out of ``left`` and says what is wrong with them."""
    wanted, split = whole(name, shape), pieces(name, shape, config)
    if split is not None and any(piece.name in left for piece in split):
        if name in left:
            here = next(piece.name for piece in split if piece.name in left)
            both = f"{printable(left[name].name)} and, in pieces, {printable(left[here].name)}"
            problems.add("stored twice", both)
            del left[name]
        wanted = split
    allowed = allowed_types(name)
    found: list[tuple[StoredTensor, int]] = []
    fits = True
    for piece in wanted:
        tensor = left.pop(piece.name, None)
        if tensor is None:
            problems.add("missing", piece.name)
            fits = False
            continue
        fits &= check(tensor.name, tensor.shape, tensor.dtype, piece.shape, allowed, problems)
        found.append((tensor, piece.start))
    if not fits:
        return None
    first = found[0][0]
    for tensor, _ in found:
        if tensor.dtype != first.dtype:
            mixed = f"{tensor.name} is {tensor.dtype}, but {first.name} is {first.dtype}"
            problems.add("wrong dtype", mixed)
            return None
    return Source(name, shape, first.dtype, tuple(found))


def check_scale(table: str, dtype: str, scale: str | None, problems: Problems) -> bool:
    """Whether a table has a scale; it must, exactly if it is float8.

    Args:
      table: the n-gram table's name.
      dtype: the safetensors name of its type.
      scale: the name of the scale given with it.
      problems: where an offence is noted.
    """
    if dtype in NARROW and scale is None:
        problems.add("missing", f"{scale_name(table)} (the table is {dtype})")
    if dtype not in NARROW and scale is not None:
        problems.add("surplus", f"{scale} (the table is {dtype})")
    return dtype in NARROW and scale is not None


def check(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    expected: tuple[int, ...],
    allowed: tuple[str, ...],
    problems: Problems,
) -> bool:
    """Whether a tensor has the expected shape and one of the allowed types."""
    if shape != expected:
        problems.add("misshapen", f"{name} is {list(shape)}, expected {list(expected)}")
    elif dtype not in allowed:
        problems.add("wrong dtype", f"{name} is {dtype}, allowed: {', '.join(allowed)}")
    return shape == expected and dtype in allowed


def _compare(tensor: StoredTensor, expected: np.ndarray, problems: Problems) -> None:
    """Weights hashed by other constants than the config's would be read in the wrong rows."""
    if not check(tensor.name, tensor.shape, tensor.dtype, expected.shape, ("I64",), problems):
        return
    stored = np.empty(expected.shape, DTYPES["I64"])
    read_into(tensor, stored)
    if not np.array_equal(stored, expected):
        values = f"{stored.tolist()}, the config gives {expected.tolist()}"
        problems.add("hash constants unlike the config's", f"{tensor.name} is {values}")
