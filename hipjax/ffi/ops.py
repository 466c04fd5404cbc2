"""The operations of the decode path, and which implementation each one uses."""

from hipjax.ffi.reference import (
    argmax,
    attend_rows,
    block_scores,
    causal_conv,
    decode,
    delta_commit,
    delta_gates,
    delta_output,
    delta_rows,
    encode,
    expert_rows,
    hyper_combine,
    hyper_mix,
    matrix_product,
    ple_gate,
    rms_norm,
    rotate,
    route,
    row_product,
    row_products,
    stream_norm,
    swiglu,
    unit,
)

_NOT_OPERATIONS = ("decode", "encode", "matrix_product")

__all__ = [
    "argmax",
    "attend_rows",
    "block_scores",
    "causal_conv",
    "decode",
    "delta_commit",
    "delta_gates",
    "delta_output",
    "delta_rows",
    "encode",
    "expert_rows",
    "hyper_combine",
    "hyper_mix",
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
    "unit",
]


def implementations() -> dict[str, str]:
    """For every operation, the implementation in use on this machine."""
    skipped = ("implementations", *_NOT_OPERATIONS)
    return {name: "reference (plain JAX)" for name in __all__ if name not in skipped}
