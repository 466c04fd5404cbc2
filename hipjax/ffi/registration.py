"""The built library: finding it, loading it, and telling XLA of its handlers.

``libhipjax.so`` has one handler per operation and platform, as plain C symbols. Which
platforms its kernels can serve on this machine is found out once.
"""

import ctypes
import functools
import os
import warnings
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jax

_NAME = "libhipjax.so"
# XLA's name of a platform, the library's, and JAX's backend names for it.
_PLATFORMS = {"cpu": ("cpu", ("cpu",)), "CUDA": ("cuda", ("cuda", "gpu")), "ROCM": ("rocm", ("rocm", "gpu"))}


class Verdict(NamedTuple):
    """Whether kernels run on a backend, and why not, or by which code."""

    kernels: bool
    reason: str


def target(operation: str) -> str:
    """The custom-call target of an operation, the same for every platform."""
    return f"hipjax_{operation}"


@functools.cache
def operations() -> frozenset[str]:
    """Operations for which the library has handlers; empty if there is no library."""
    library, _ = _library()
    return frozenset() if library is None else frozenset(library.hipjax_operations().decode().split())


@functools.cache
def verdict(backend: str) -> Verdict:
    """Whether kernels run on a JAX backend: "cpu", "gpu", "cuda" or "rocm"."""
    library, reason = _library()
    if library is None:
        return Verdict(False, reason)
    if backend == "cpu":
        return Verdict(True, library.hipjax_cpu_instruction_set().decode())
    if backend not in ("gpu", "cuda", "rocm"):
        return Verdict(False, f"there are no kernels for the backend {backend!r}")
    if backend == "gpu":
        backend = "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
    report = ctypes.create_string_buffer(4096)
    good = library.hipjax_open_gpu(backend.encode(), report, len(report))
    return Verdict(bool(good), report.value.decode().strip().replace("\n", "; ").lstrip(": "))


def warn_of_fallback(backend: str) -> None:
    """Says once why plain JAX is used in place of the kernels."""
    found = verdict(backend)
    if not found.kernels:
        _warn_once(f"hipjax uses plain JAX on this machine's {backend}, which is slower: {found.reason}")


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def _candidates() -> list[Path]:
    named = os.environ.get("HIPJAX_LIBRARY")
    if named is not None:
        return [Path(named)]
    return [Path(str(resources.files("hipjax.ffi").joinpath(_NAME)))]


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    """The loaded library with its handlers registered, or None and the reason."""
    tried = _candidates()
    for path in tried:
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            return None, f"{path} could not be loaded: {error}"
        library.hipjax_operations.restype = ctypes.c_char_p
        library.hipjax_cpu_instruction_set.restype = ctypes.c_char_p
        library.hipjax_open_gpu.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        for name in library.hipjax_operations().decode().split():
            for platform, (prefix, _) in _PLATFORMS.items():
                handler = getattr(library, f"hipjax_{prefix}_{name}")
                jax.ffi.register_ffi_target(target(name), jax.ffi.pycapsule(handler), platform=platform)
        return library, str(path)
    return None, f"{_NAME} was not built; looked for {', '.join(map(str, tried))}"
