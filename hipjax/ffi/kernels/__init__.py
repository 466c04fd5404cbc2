"""The operations by native kernels: the functions of ``reference`` with their arguments."""

from hipjax.ffi.kernels.attention import attend, attention_inputs, block_keys, select_blocks
from hipjax.ffi.kernels.norm import rms_norm, stream_norm
from hipjax.ffi.kernels.product import row_product, row_products

__all__ = [
    "attend",
    "attention_inputs",
    "block_keys",
    "rms_norm",
    "row_product",
    "row_products",
    "select_blocks",
    "stream_norm",
]
