"""Mixture of experts: the router's verdict, and the products of the chosen experts."""

import jax.numpy as jnp

from hipjax.ffi.call import call, stored
from hipjax.typing import Array, Float, Int

MAX_EXPERTS = 512  # the kernel's Route::kMaxExperts and kMaxChosen
MAX_CHOSEN = 16
_PLANNED = 9  # ExpertInner::kPlanned


def route(
    logits: Float[Array, "*rows E"], chosen: int, renormalise: bool
) -> tuple[Int[Array, "*rows K"], Float[Array, "*rows K"]]:
    """The experts of each row and their weights; equal logits favour the lower expert."""
    count = logits.shape[-1]
    if not 1 <= count <= MAX_EXPERTS:
        raise ValueError(f"logits has {count} experts; allowed: 1 to {MAX_EXPERTS}")
    _check_chosen("chosen is", chosen, min(count, MAX_CHOSEN))
    _check_dtype("logits", logits, "float32")
    types = [((chosen,), jnp.int32), ((chosen,), jnp.float32)]
    flat = logits.reshape(-1, count)
    experts, weights = call("route", [flat], [], types, chosen=chosen, renormalise=int(renormalise))
    shape = (*logits.shape[:-1], chosen)
    return experts.reshape(shape), weights.reshape(shape)


def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up`` for two products [*rows, I]."""
    _check_shape("up", up, gate.shape)
    for name, value in (("gate", gate), ("up", up)):
        _check_dtype(name, value, "float32")
    flat = [value.reshape(-1, value.shape[-1]) for value in (gate, up)]
    (out,) = call("swiglu", flat, [], [(flat[0].shape[1:], jnp.float32)])
    return out.reshape(gate.shape)


def expert_rows(
    x: Array,
    gate_up: Array,
    down: Array,
    experts: Array,
    weights: Array,
    shared: Array,
    share: Array,
) -> Array:
    """Weighted sum of each row's experts, and the shared expert's part.

    Rows that chose the same expert share the reads of its weights.

    Args:
      x: rows [B, R, H].
      gate_up: [E, 2 I, H], the gate's outputs first.
      down: [E, H, I].
      experts: numbers of each row's experts [B, R, K].
      weights: their weights [B, R, K].
      shared: the shared expert's output [B, R, H].
      share: the logit of its weight [B, R, 1].
    """
    if x.ndim != 3:
        raise ValueError(f"x has {x.ndim} axes; it must have 3: [B, R, H]")
    rows, hidden = x.shape[:-1], x.shape[-1]
    if gate_up.ndim != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != hidden:
        raise ValueError(f"gate_up has shape {gate_up.shape}; it must be [E, 2 I, {hidden}]")
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    _check_shape("down", down, (count, hidden, width))
    if experts.ndim != 3:
        raise ValueError(f"experts has {experts.ndim} axes; it must have 3: [B, R, K]")
    chosen = experts.shape[-1]
    _check_chosen("experts has rows of", chosen, MAX_CHOSEN)
    _check_shape("experts", experts, (*rows, chosen))
    _check_shape("weights", weights, (*rows, chosen))
    _check_shape("shared", shared, x.shape)
    _check_shape("share", share, (*rows, 1))
    for name, value in (("x", x), ("weights", weights), ("shared", shared), ("share", share)):
        _check_dtype(name, value, "float32")
    _check_dtype("experts", experts, "int32")
    gate_up, down = stored(gate_up), stored(down)
    if gate_up.dtype != down.dtype:
        gate_up, down = gate_up.astype(jnp.float32), down.astype(jnp.float32)
    items = [value.reshape(-1, value.shape[-1]) for value in (x, experts, weights, shared, share)]
    out, *_ = call(
        "expert_rows",
        items,
        [gate_up, down],
        [
            ((hidden,), jnp.float32),
            ((chosen, width), jnp.float32),  # what lies between the two products
            ((chosen, _PLANNED), jnp.int32),  # which choices share an expert
        ],
    )
    return out.reshape(x.shape)


def _check_shape(name: str, value: Array, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"{name} has shape {value.shape}; it must be {shape}")


def _check_dtype(name: str, value: Array, dtype: str) -> None:
    if value.dtype != dtype:
        raise TypeError(f"{name} has dtype {value.dtype}; it must be {dtype}")


def _check_chosen(what: str, chosen: int, most: int) -> None:
    if not 1 <= chosen <= most:
        raise ValueError(f"{what} {chosen}; allowed: 1 to {most}")
