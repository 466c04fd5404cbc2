"""The operations by native kernels: the functions of ``reference`` with their arguments."""

from hipjax.ffi.kernels.delta import (
    delta_commit,
    delta_commit_q8,
    delta_inputs,
    delta_rows,
    delta_rows_q8,
)
from hipjax.ffi.kernels.norm import rms_norm, stream_norm
from hipjax.ffi.kernels.product import row_product, row_products

__all__ = [
    "delta_commit",
    "delta_commit_q8",
    "delta_inputs",
    "delta_rows",
    "delta_rows_q8",
    "rms_norm",
    "row_product",
    "row_products",
    "stream_norm",
]
