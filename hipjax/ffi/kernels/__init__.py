"""The operations by native kernels: the functions of ``reference`` with their arguments."""

from hipjax.ffi.kernels.argmax import argmax
from hipjax.ffi.kernels.attention import attend, attention_inputs, block_keys, select_blocks
from hipjax.ffi.kernels.delta import (
    delta_commit,
    delta_commit_q8,
    delta_inputs,
    delta_rows,
    delta_rows_q8,
)
from hipjax.ffi.kernels.experts import expert_rows, route, swiglu
from hipjax.ffi.kernels.hyper import hyper_combine, hyper_mix
from hipjax.ffi.kernels.norm import rms_norm, stream_norm
from hipjax.ffi.kernels.ple import ple_gate, ple_output
from hipjax.ffi.kernels.product import (
    row_product,
    row_product_add,
    row_product_combine,
    row_products,
)

__all__ = [
    "argmax",
    "attend",
    "attention_inputs",
    "block_keys",
    "delta_commit",
    "delta_commit_q8",
    "delta_inputs",
    "delta_rows",
    "delta_rows_q8",
    "expert_rows",
    "hyper_combine",
    "hyper_mix",
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
