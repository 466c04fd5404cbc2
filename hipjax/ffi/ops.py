"""The operations of the decode path: native kernels where they run, else plain JAX.

Each operation has one signature and two implementations, ``kernels`` and ``reference``.
Which one a traced function uses is fixed when it is traced.
"""

import functools
from collections.abc import Callable
from typing import Literal, TypeVar

import jax

from hipjax.ffi import kernels, reference
from hipjax.ffi.reference import (
    decode,
    delta_dequantised,
    delta_output,
    delta_quantised,
    encode,
    matrix_product,
)
from hipjax.ffi.registration import verdict, warn_of_fallback

Implementation = Literal["auto", "kernel", "reference"]
Operation = TypeVar("Operation", bound=Callable[..., object])

# "auto": kernels, or plain JAX with one warning; "kernel": kernels, or an error. The value
# is part of jit's cache key, so that programs of one setting never serve another.
implementation = jax.make_user_context("auto")

__all__ = [
    "argmax",
    "attend_rows",
    "block_scores",
    "causal_conv",
    "decode",
    "delta_commit",
    "delta_commit_q8",
    "delta_dequantised",
    "delta_inputs",
    "delta_output",
    "delta_quantised",
    "delta_rows",
    "delta_rows_q8",
    "encode",
    "expert_rows",
    "hyper_combine",
    "hyper_mix",
    "implementation",
    "implementations",
    "matrix_product",
    "ple_gate",
    "rms_norm",
    "rotate",
    "route",
    "row_product",
    "row_products",
    "stream_norm",
    "swiglu",
]
_OPERATIONS: list[str] = []


def _operation(plain: Operation) -> Operation:
    """The operation whose plain-JAX implementation is given."""
    name = plain.__name__
    _OPERATIONS.append(name)

    @functools.wraps(plain)
    def run(*args: object, **kwargs: object) -> object:
        return (getattr(kernels, name) if _by_kernel(name) else plain)(*args, **kwargs)

    return run  # type: ignore[return-value]


def _by_kernel(name: str) -> bool:
    wish = implementation.value
    if wish == "reference":
        return False
    backend = jax.default_backend()
    found = verdict(backend)
    if found.kernels and hasattr(kernels, name):
        return True
    if wish == "kernel":
        reason = found.reason if not found.kernels else f"there is none for {name}"
        raise RuntimeError(
            f'implementation is "kernel", but no kernel can run on this {backend}: {reason}'
        )
    warn_of_fallback(backend)
    return False


def implementations() -> dict[str, str]:
    """For every operation, the implementation in use on this machine's default backend."""
    found = verdict(jax.default_backend())
    return {
        name: f"kernel ({found.reason})"
        if found.kernels and hasattr(kernels, name)
        else f"reference (plain JAX): {found.reason}"
        for name in _OPERATIONS
    }


argmax = _operation(reference.argmax)
attend_rows = _operation(reference.attend_rows)
block_scores = _operation(reference.block_scores)
causal_conv = _operation(reference.causal_conv)
delta_commit = _operation(reference.delta_commit)
delta_commit_q8 = _operation(reference.delta_commit_q8)
delta_inputs = _operation(reference.delta_inputs)
delta_rows = _operation(reference.delta_rows)
delta_rows_q8 = _operation(reference.delta_rows_q8)
expert_rows = _operation(reference.expert_rows)
hyper_combine = _operation(reference.hyper_combine)
hyper_mix = _operation(reference.hyper_mix)
ple_gate = _operation(reference.ple_gate)
rms_norm = _operation(reference.rms_norm)
rotate = _operation(reference.rotate)
route = _operation(reference.route)
row_product = _operation(reference.row_product)
row_products = _operation(reference.row_products)
stream_norm = _operation(reference.stream_norm)
swiglu = _operation(reference.swiglu)
