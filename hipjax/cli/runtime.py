"""What jax gives a command: devices, and programs compiled by an earlier start."""

import os
from pathlib import Path
from typing import Any

import jax

from hipjax.cli.errors import CommandError


def use_cache() -> Path | None:
    """Lets jax keep compiled programs on disk.

    A folder that the user has configured for jax is taken with the user's other settings.
    The one chosen here is private, since whoever can write to it can run code as its reader.

    Returns:
      The folder, or None where there is none: none can be made, or the user disabled it.
    """
    config: Any = jax.config  # it has no types
    if not config.jax_enable_compilation_cache:
        return None
    if given := config.jax_compilation_cache_dir:
        return Path(given)
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (root if root.is_absolute() else Path.home() / ".cache") / "hipjax" / "xla"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    config.update("jax_compilation_cache_dir", str(folder))
    # Even the least program takes longer to compile than to look up.
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def devices() -> list[jax.Device]:
    """Jax's devices, of which there is at least one.

    Raises:
      CommandError: it finds none, because the user asked for a platform that is not there.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # it asserts where a plugin is missing
        wanted = os.environ.get("JAX_PLATFORMS")
        raise CommandError(f"jax finds no device (JAX_PLATFORMS is {wanted!r}) {error}") from error
