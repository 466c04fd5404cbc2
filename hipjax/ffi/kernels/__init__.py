"""The operations by native kernels: the functions of ``reference`` with their arguments."""

from hipjax.ffi.kernels.experts import expert_rows, route, swiglu
from hipjax.ffi.kernels.norm import rms_norm, stream_norm
from hipjax.ffi.kernels.product import row_product, row_products

__all__ = [
    "expert_rows",
    "rms_norm",
    "route",
    "row_product",
    "row_products",
    "stream_norm",
    "swiglu",
]
