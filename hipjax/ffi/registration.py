"""The built library: finding it, loading it, and telling XLA of its handlers.

``libhipjax.so`` lies beside this module, in a wheel as in an editable install, unless the
environment variable ``HIPJAX_LIBRARY`` names another file. It has one handler per operation
and platform, as plain C symbols. Which platforms its kernels can serve on this machine is
found out once.
"""

import ctypes
import functools
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import jax

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
_BESIDE = Path(__file__).with_name("libhipjax.so")
_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}  # the library's names: XLA's names


class Verdict(NamedTuple):
    """Whether kernels run on a backend, and by which code, or why not."""

    kernels: bool
    reason: str


class Report(NamedTuple):
    """What the library is and what it holds, for people.

    Attributes:
      library: its path, or why there is none.
      instruction_set: that of the CPU's kernels; empty without a library.
      code_objects: architectures of GPUs for which it has code.
      missing: what its build lacked to have all of them; empty if nothing.
    """

    library: str
    instruction_set: str
    code_objects: tuple[str, ...]
    missing: str


def target(operation: str) -> str:
    """The custom-call target of an operation, the same for every platform."""
    return f"hipjax_{operation}"


@functools.cache
def operations() -> frozenset[str]:
    """Operations for which the library has handlers; empty if there is no library."""
    library, _ = _library()
    return frozenset() if library is None else frozenset(_said(library, "operations").split())


@functools.cache
def verdict(backend: str) -> Verdict:
    """Whether kernels run on a JAX backend: "cpu", "gpu", "cuda" or "rocm".

    Raises:
      ValueError: the environment variable ``HIPJAX_CPU`` is not an instruction set.
    """
    library, found = _library()
    if library is None:
        return Verdict(False, found)
    if backend == "cpu":
        return Verdict(True, _said(library, "cpu_instruction_set"))
    if backend not in ("gpu", "cuda", "rocm"):
        return Verdict(False, f"there are no kernels for the backend {backend!r}")
    if backend == "gpu":
        version = jax.devices("gpu")[0].client.platform_version
        backend = "rocm" if "rocm" in version.lower() else "cuda"
    text = ctypes.create_string_buffer(4096)
    good = library.hipjax_open_gpu(backend.encode(), text, len(text))
    return Verdict(bool(good), "; ".join(text.value.decode().splitlines()))


def report() -> Report:
    """What the library is and what it holds."""
    library, found = _library()
    if library is None:
        return Report(found, "", (), "")
    return Report(
        found,
        _said(library, "cpu_instruction_set"),
        tuple(_said(library, "code_objects").split()),
        _said(library, "missing_code"),
    )


def warn_of_fallback(backend: str) -> None:
    """Says once why plain JAX is used in place of the kernels."""
    found = verdict(backend)
    if not found.kernels:
        _warn_once(
            f"hipjax uses plain JAX on this machine's {backend}, which is slower and does not "
            f"promise that a row of several has the bits of a single one: {found.reason}"
        )


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    """The loaded library with its handlers registered and its path, or None and the reason."""
    _check_environment()
    named = os.environ.get("HIPJAX_LIBRARY")
    path = Path(named or _BESIDE)
    if not path.is_file():
        if named:
            return None, f"HIPJAX_LIBRARY is {named}, which is not a file"
        return None, f"the library of kernels was not built: there is no {path}"
    try:
        library = ctypes.CDLL(str(path.resolve()))
        for name in ("operations", "cpu_instruction_set", "code_objects", "missing_code"):
            getattr(library, f"hipjax_{name}").restype = ctypes.c_char_p
        library.hipjax_open_gpu.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        handlers = [
            (name, platform, getattr(library, f"hipjax_{prefix}_{name}"))
            for name in _said(library, "operations").split()
            for prefix, platform in _PLATFORMS.items()
        ]
    except (OSError, AttributeError) as error:
        return None, f"{path} could not be loaded: {error}"
    for name, platform, handler in handlers:
        jax.ffi.register_ffi_target(target(name), jax.ffi.pycapsule(handler), platform=platform)
    return library, str(path)


def _said(library: ctypes.CDLL, function: str) -> str:
    text: bytes = getattr(library, f"hipjax_{function}")()
    return text.decode()


def _check_environment() -> None:
    limit = os.environ.get("HIPJAX_CPU")
    if limit and limit not in INSTRUCTION_SETS:
        raise ValueError(f"HIPJAX_CPU is {limit!r}; allowed: {', '.join(INSTRUCTION_SETS)}")
