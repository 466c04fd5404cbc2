"""How every operation calls its kernel: result types, batching, sharding.

A kernel takes operands with one leading axis of independent items (rows, or sequences) and
operands that all items share, such as weights. Under ``vmap`` the mapped axis becomes part
of the leading axis, so that weights are still read once; if a shared operand is mapped
itself, the calls follow one another. Under ``shard_map`` a call works on the device's own
items.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from hipjax.ffi.registration import operations, report, target
from hipjax.typing import Array


def call(
    operation: str,
    items: Sequence[Array],
    shared: Sequence[Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> tuple[Array, ...]:
    """Calls an operation's kernel.

    Args:
      operation: its name.
      items: operands with the same leading axis, passed first.
      shared: operands of all items, passed after them.
      results: shape without the leading axis, and dtype, of every result.
      aliases: operands whose memory a result may take over, by their numbers.
      attributes: the kernel's attributes, plain Python values or NumPy arrays.

    Returns:
      The results, each with the leading axis.

    Raises:
      RuntimeError: the library is of another version and does not know the operation.
    """
    if operation not in operations():
        raise RuntimeError(f"{report().library} has no kernel for {operation}: build it again")
    split = len(items)

    @custom_vmap
    def run(*operands: Array) -> tuple[Array, ...]:
        count = operands[0].shape[0]
        varying = frozenset[str]().union(*map(_varying_axes, operands))
        operands = tuple(_made_varying(x, varying) for x in operands)
        most = jax.typeof(max(operands, key=lambda x: len(_varying_axes(x))))
        # Only a type with a mesh can say that it varies over some of its axes.
        mesh = NamedSharding(most.sharding.mesh, PartitionSpec()) if varying else None
        types = [
            jax.ShapeDtypeStruct(
                (count, *shape), dtype, sharding=mesh, manual_axis_type=most.manual_axis_type
            )
            for shape, dtype in results
        ]
        kernel = jax.ffi.ffi_call(
            target(operation), types, input_output_aliases=dict(aliases or {})
        )
        return tuple(kernel(*operands, **attributes))

    @run.def_vmap
    def mapped(size: int, batched: list[bool], *operands: Any) -> tuple[Any, tuple[bool, ...]]:
        done = (True,) * len(results)
        if any(batched[split:]):
            chosen = [x for x, b in zip(operands, batched, strict=True) if b]

            def one(picked: list[Array]) -> tuple[Array, ...]:
                rest = iter(picked)
                return run(
                    *(next(rest) if b else x for x, b in zip(operands, batched, strict=True))
                )

            return lax.map(one, chosen), done
        merged = []
        for x, b in zip(operands[:split], batched, strict=False):
            whole = x if b else jnp.broadcast_to(x, (size, *x.shape))
            merged.append(whole.reshape(-1, *whole.shape[2:]))
        out = run(*merged, *operands[split:])
        return tuple(y.reshape(size, -1, *y.shape[1:]) for y in out), done

    return run(*items, *shared)


def stored(weight: Array) -> Array:
    """A weight in a storage that kernels read: float32 or bfloat16; others are widened."""
    if weight.dtype in (jnp.float32, jnp.bfloat16, jnp.uint16):
        return weight
    return weight.astype(jnp.float32)


def _varying_axes(x: Array) -> frozenset[str]:
    """Mesh axes over which an operand differs between devices, inside ``shard_map``."""
    return jax.typeof(x).manual_axis_type.varying


def _made_varying(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(axes - _varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
