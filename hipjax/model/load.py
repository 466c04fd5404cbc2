"""From a checkpoint folder to a model in memory.

What a folder holds is checked against its ``config.json`` as a whole before any weight is
read. Every parameter is then allocated once and read into place.
"""

import dataclasses
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from hipjax.model.checkpoint import find_tensors
from hipjax.model.config import ModelConfig
from hipjax.model.layout import Source, match
from hipjax.model.tensorfile import DTYPES, CheckpointError, read_into

_PATIENCE_S = 2.0
_ALIGNMENT = 64  # jax adopts an array so aligned instead of copying it
_CONVERSIONS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True, eq=False)
class FlashNext:
    """A loaded model.

    Attributes:
      config: its configuration.
      params: its weights, a plain nested dict of jax arrays by the checkpoint's names.
      tokenizer: its tokenizer, or None if the checkpoint has none.
      skipped: names of the tensors that were passed over because they do not belong to
        the text model: the vision tower's, and the head's if it was not asked for.
    """

    config: ModelConfig
    params: dict[str, Any] = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(default=None, repr=False)
    skipped: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    head: bool = True,
    progress: bool | None = None,
) -> FlashNext:
    """Loads a checkpoint in the Hugging Face layout.

    The folder holds ``config.json``, the weights as ``model.safetensors`` or as
    ``model.safetensors.index.json`` with the shards it names, and optionally
    ``tokenizer.json``. Names may begin with ``model.language_model.`` or ``model.``,
    experts may be fused or stored one by one, the n-gram table whole or in shards; the
    resulting parameters are the same. Vision tensors are skipped. Nothing is unpickled
    or executed.

    At most the size of the parameters, and a little for the largest conversion, is
    allocated on the host; with an accelerator, at most the largest parameter.

    Args:
      path: the folder.
      dtype: None keeps every tensor in the type it is stored in. ``float32`` or
        ``bfloat16`` converts all weights. Widening to float32 is exact; on a CPU without
        this package's kernels it makes decoding faster, for twice the memory of
        bfloat16. The scale of a float8 table is never narrowed.
      head: whether to load the multi-token-prediction head that ``config.json``
        announces. Without it ``config.mtp_num_hidden_layers`` becomes 0 and the model
        cannot draft for itself.
      progress: whether a load of more than two seconds shows a progress bar on standard
        error; None shows it on a terminal only.

    Returns:
      The model, its arrays on jax's default device.

    Raises:
      ConfigError: ``config.json`` is missing or invalid.
      CheckpointError: the files are damaged, or do not fit ``config.json``. The message
        lists every missing, surplus, misshapen or duplicate tensor and wrong dtype.
      ValueError: ``dtype`` is not one of those above.

    Source: model-spec section 2.

    Example:
      >>> import importlib.resources
      >>> folder = importlib.resources.files("hipjax") / "assets" / "nano"
      >>> model = load(folder)
      >>> model.params["lm_head"]["weight"].shape == (
      ...     model.config.vocab_size, model.config.hidden_size)
      True
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"path: {folder} is not a folder; allowed: a checkpoint's folder")
    wanted = None if dtype is None else jnp.dtype(dtype)
    if wanted is not None and wanted not in _CONVERSIONS:
        raise ValueError(f"dtype: got {wanted}; allowed: None, float32 or bfloat16")
    visible = sys.stderr.isatty() if progress is None else progress
    with _ProgressBar(f"Loading {folder.resolve().name}", visible=visible) as bar:
        config = ModelConfig.from_file(folder)
        if not head:
            config = dataclasses.replace(config, mtp_num_hidden_layers=0, mtp_rope_theta=None)
        tokenizer = _tokenizer(folder / "tokenizer.json")
        sources, skipped = match(find_tensors(folder), config, head=head, where=folder)
        bar.total = sum(tensor.nbytes for source in sources for tensor, _ in source.parts)
        flat = {source.name: _read(source, wanted, bar) for source in sources}
    return FlashNext(config, unflatten_dict(flat, sep="."), tokenizer, skipped)


def _tokenizer(file: Path) -> Tokenizer | None:
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error


def _read(source: Source, wanted: np.dtype[Any] | None, bar: "_ProgressBar") -> jax.Array:
    """One parameter, read into memory that jax takes over where it can."""
    dtype = wanted or DTYPES[source.dtype]
    if source.name.endswith(".weight_scale"):
        dtype = DTYPES["F32"] if wanted else dtype
    flat = _empty(math.prod(source.shape), dtype)
    for tensor, start in source.parts:
        read_into(tensor, flat[start : start + math.prod(tensor.shape)], bar.advance)
    # Waiting keeps the next parameter from being read before this one's copy is let go.
    return jax.device_put(flat.reshape(source.shape)).block_until_ready()


def _empty(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    nbytes = count * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype)


class _ProgressBar:
    """A bar on standard error that appears once the work has taken long enough."""

    def __init__(self, title: str, *, visible: bool) -> None:
        self.total = 0
        self._title, self._visible = title, visible
        self._done = 0
        self._start = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, nbytes: int) -> None:
        """Counts bytes that have been read."""
        self._done += nbytes
        if not self._visible:
            return
        if self._bar is None:
            if time.monotonic() - self._start < _PATIENCE_S:
                return
            self._open()
        self._bar.update(self._task, completed=self._done)

    def _open(self) -> None:
        # Imported when needed: most loads are over before this.
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(self._title, total=self.total)
        self._bar.start()
