"""The small trained Flash-Next that ships in the package."""

import importlib.resources

from jax.typing import DTypeLike

from hipjax.model.load import FlashNext, load


def load_nano(*, dtype: DTypeLike | None = None) -> FlashNext:
    """Loads the bundled model: 8 layers, byte-level BPE of 2,048 tokens, an MTP head.

    It writes Python, English prose and structured text about as well as five million
    weights can, and has every mechanism of the large model. ``MODEL_CARD.md`` beside the
    weights says what it was trained on and how well it does.

    Args:
      dtype: as in :func:`hipjax.load`.

    Example:
      >>> import hipjax
      >>> model = hipjax.load_nano()
      >>> model.config.num_hidden_layers, model.config.has_head
      (8, True)
    """
    with importlib.resources.as_file(importlib.resources.files("hipjax") / "assets/nano") as path:
        return load(path, dtype=dtype)
