"""The operations of the decode path: native kernels where they run, else plain JAX.

Each operation has one signature and two implementations, ``kernels`` and ``reference``.
Which one a traced function uses is fixed when it is traced.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax

from hipjax import checks
from hipjax.ffi import kernels, reference, reference_attention, reference_delta
from hipjax.ffi.reference import decode, encode, matrix_product
from hipjax.ffi.reference_delta import delta_dequantised, delta_output, delta_quantised
from hipjax.ffi.registration import verdict, warn_of_fallback

Implementation = Literal["auto", "kernel", "reference"]
Operation = TypeVar("Operation", bound=Callable[..., object])

# "auto": kernels, or plain JAX with one warning; "kernel": kernels, or an error. The value
# is part of jit's cache key, so that programs of one setting never serve another.
implementation = jax.make_user_context("auto")

__all__ = [
    "argmax",
    "attend",
    "attention_inputs",
    "block_keys",
    "checked_implementation",
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
    "ple_output",
    "rms_norm",
    "route",
    "row_product",
    "row_product_add",
    "row_product_combine",
    "row_products",
    "select_blocks",
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
        raise _refusal(backend, f"there is none for {name}" if found.kernels else found.reason)
    warn_of_fallback(backend)
    return False


def checked_implementation(value: Any) -> Implementation:
    """The argument ``implementation`` of the public doors.

    Raises:
      TypeError, ValueError: it is not one of the three, or it is "kernel" and no kernel can
        run on this machine's default backend.
    """
    wish: Implementation = checks.one_of("implementation", value, get_args(Implementation))
    if wish == "kernel":
        backend = jax.default_backend()
        found = verdict(backend)
        if not found.kernels:
            raise _refusal(backend, found.reason)
    return wish


def _refusal(backend: str, reason: str) -> ValueError:
    return ValueError(
        f"implementation is 'kernel', but a kernel cannot run on this machine's {backend}: {reason}"
    )


def implementations() -> dict[str, str]:
    """For every operation, the implementation in use on this machine's default backend."""
    found = verdict(jax.default_backend())

    def said(name: str) -> str:
        if found.kernels and hasattr(kernels, name):
            return f"kernel ({found.reason})"
        return f"reference: {'there is no kernel for it' if found.kernels else found.reason}"

    return {name: said(name) for name in _OPERATIONS}


argmax = _operation(reference.argmax)
attend = _operation(reference_attention.attend)
attention_inputs = _operation(reference_attention.attention_inputs)
block_keys = _operation(reference_attention.block_keys)
delta_commit = _operation(reference_delta.delta_commit)
delta_commit_q8 = _operation(reference_delta.delta_commit_q8)
delta_inputs = _operation(reference_delta.delta_inputs)
delta_rows = _operation(reference_delta.delta_rows)
delta_rows_q8 = _operation(reference_delta.delta_rows_q8)
expert_rows = _operation(reference.expert_rows)
hyper_combine = _operation(reference.hyper_combine)
hyper_mix = _operation(reference.hyper_mix)
ple_gate = _operation(reference.ple_gate)
ple_output = _operation(reference.ple_output)
rms_norm = _operation(reference.rms_norm)
route = _operation(reference.route)
row_product = _operation(reference.row_product)
row_product_add = _operation(reference.row_product_add)
row_product_combine = _operation(reference.row_product_combine)
row_products = _operation(reference.row_products)
select_blocks = _operation(reference_attention.select_blocks)
stream_norm = _operation(reference.stream_norm)
swiglu = _operation(reference.swiglu)
