"""Attention of decoded rows: inputs, block keys, selection, the mixed values."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from hipjax.ffi.call import call, stored
from hipjax.typing import Array, Float, Int, Num

PIECE = 64  # tokens of a list that have a softmax of their own; csrc/kernels/attention.h
MAX_INDEX_WIDTH = 240  # csrc/kernels/select.h


def attention_inputs(
    projected: Float[Array, "B R N 2 width"],
    key: Float[Array, "B R groups width"],
    index: Float[Array, "B R queries_and_key index"],
    positions: Int[Array, "B R"],
    query_norm: Float[Array, " width"],
    key_norm: Float[Array, " width"],
    index_norm: Float[Array, " index"],
    frequencies: Float[Array, " half"],
    eps: float,
) -> tuple[
    Float[Array, "B R N width"],
    Float[Array, "B R groups width"],
    Float[Array, "B R queries index"],
]:
    """Queries, keys and index queries of rows, normed per head and rotated."""
    _ranked("projected", projected, 5)
    _ranked("key", key, 4)
    _ranked("index", index, 4)
    _ranked("frequencies", frequencies, 1)
    batch, rows, heads, _, width = projected.shape
    groups, queries, index_width = key.shape[2], index.shape[2] - 1, index.shape[3]
    _shaped("projected", projected, (batch, rows, heads, 2, width))
    _shaped("key", key, (batch, rows, groups, width))
    _shaped("index", index, (batch, rows, queries + 1, index_width))
    _shaped("positions", positions, (batch, rows))
    _shaped("query_norm", query_norm, (width,))
    _shaped("key_norm", key_norm, (width,))
    _shaped("index_norm", index_norm, (index_width,))
    _rotating(frequencies, min(width, index_width))
    for name, value in {"projected": projected, "key": key, "index": index}.items():
        _typed(name, value, jnp.float32)
    _typed("positions", positions, jnp.int32)
    query, key, index_query = call(
        "attention_inputs",
        [projected, key, index, positions],
        [stored(query_norm), stored(key_norm), stored(index_norm), jnp.asarray(frequencies)],
        [
            ((rows, heads, width), jnp.float32),
            ((rows, groups, width), jnp.float32),
            ((rows, queries, index_width), jnp.float32),
        ],
        eps=np.float32(eps),
    )
    return query, key, index_query


def block_keys(
    raw: Num[Array, "B tokens width"],
    first: Int[Array, " B"],
    norm: Float[Array, " width"],
    frequencies: Float[Array, " half"],
    eps: float,
    ratio: int,
) -> Float[Array, "B blocks width"]:
    """Keys of whole blocks: the mean of ``ratio`` raw index keys, normed and rotated."""
    _ranked("raw", raw, 3)
    _ranked("frequencies", frequencies, 1)
    batch, tokens, width = raw.shape
    if ratio < 1 or tokens % ratio:
        raise ValueError(f"raw has {tokens} tokens; they must be whole blocks of {ratio}")
    _cached("raw", raw)
    _shaped("first", first, (batch,))
    _typed("first", first, jnp.int32)
    _shaped("norm", norm, (width,))
    _rotating(frequencies, width)
    (keys,) = call(
        "block_keys",
        [raw, first],
        [stored(norm), jnp.asarray(frequencies)],
        [((tokens // ratio, width), jnp.float32)],
        eps=np.float32(eps),
        ratio=ratio,
    )
    return keys


def select_blocks(
    query: Float[Array, "B R N width"],
    blocks: Num[Array, "B blocks width"],
    visible: Int[Array, "B R"],
    budget: int,
) -> tuple[Int[Array, "B R slots"], Int[Array, "B R"]]:
    """The best ``budget`` of each row's ``visible`` blocks, the lower one of equal scores."""
    _ranked("query", query, 4)
    _ranked("blocks", blocks, 3)
    batch, rows, _, width = query.shape
    capacity = blocks.shape[1]
    _typed("query", query, jnp.float32)
    _cached("blocks", blocks)
    _shaped("blocks", blocks, (batch, capacity, width))
    _shaped("visible", visible, (batch, rows))
    _typed("visible", visible, jnp.int32)
    if budget < 1:
        raise ValueError(f"budget is {budget}; allowed: at least 1")
    if width > MAX_INDEX_WIDTH:
        raise ValueError(f"query has width {width}; allowed: at most {MAX_INDEX_WIDTH}")
    slots = min(budget, capacity)
    selected, count, _ = call(
        "select_blocks",
        [query, blocks, visible],
        [],
        [
            ((rows, slots), jnp.int32),
            ((rows,), jnp.int32),
            ((rows, capacity if capacity > slots else 0), jnp.int32),
        ],
    )
    return selected, count


def attend(
    query: Float[Array, "B R N width"],
    keys: Num[Array, "B groups S width"],
    values: Num[Array, "B groups S width"],
    selected: Int[Array, "B R slots"],
    count: Int[Array, "B R"],
    positions: Int[Array, "B R"],
    projected: Float[Array, "B R N 2 width"],
    ratio: int,
) -> Float[Array, "B R N width"]:
    """Gated attention of each row over its selected blocks and the tail after the last one."""
    _ranked("query", query, 4)
    _ranked("keys", keys, 4)
    _ranked("selected", selected, 3)
    batch, rows, heads, width = query.shape
    groups, capacity = keys.shape[1:3]
    slots = selected.shape[2]
    _typed("query", query, jnp.float32)
    _typed("projected", projected, jnp.float32)
    _cached("keys", keys)
    _typed("values", values, keys.dtype)
    _shaped("keys", keys, (batch, groups, capacity, width))
    _shaped("values", values, keys.shape)
    _shaped("selected", selected, (batch, rows, slots))
    _shaped("count", count, (batch, rows))
    _shaped("positions", positions, (batch, rows))
    _shaped("projected", projected, (batch, rows, heads, 2, width))
    for name, value in {"selected": selected, "count": count, "positions": positions}.items():
        _typed(name, value, jnp.int32)
    if heads % groups:
        raise ValueError(f"query has {heads} heads; allowed: multiples of the {groups} of keys")
    if ratio < 1:
        raise ValueError(f"ratio is {ratio}; allowed: at least 1")
    pieces = max(1, -(-(slots * ratio + ratio - 1) // PIECE))
    mixed, _, _ = call(
        "attend",
        [query, keys, values, selected, count, positions, projected],
        [],
        [
            ((rows, heads, width), jnp.float32),
            ((rows, heads, pieces, width), jnp.float32),
            ((rows, heads, 2, pieces), jnp.float32),
        ],
        ratio=ratio,
    )
    return mixed


def _ranked(name: str, value: Array, axes: int) -> None:
    if value.ndim != axes:
        raise ValueError(f"{name} has shape {value.shape}; allowed: {axes} axes")


def _shaped(name: str, value: Array, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"{name} has shape {value.shape}; allowed: {shape}")


def _typed(name: str, value: Array, dtype: Any) -> None:
    if value.dtype != dtype:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed: {jnp.dtype(dtype)}")


def _cached(name: str, value: Array) -> None:
    if value.dtype not in (jnp.float32, jnp.uint16):
        raise TypeError(
            f"{name} has dtype {value.dtype}; allowed: float32, or uint16 for bfloat16 bits"
        )


def _rotating(frequencies: Array, width: int) -> None:
    _typed("frequencies", frequencies, jnp.float32)
    if 2 * frequencies.shape[0] > width:
        raise ValueError(
            f"frequencies has {frequencies.shape[0]} elements; allowed: at most {width // 2}, "
            f"half of a head's width {width}"
        )
