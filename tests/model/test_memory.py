"""The largest arrays that one step makes at the released model's size, without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from hipjax.ffi.ops import implementation
from hipjax.model.params import init_params
from hipjax.model.trunk import trunk_logits, trunk_prompt, trunk_rows
from tests.model import support

CONFIG, CONTEXT = support.flash_next(), support.CONTEXT
CACHES = {(1, 2, CONTEXT, 256), (1, CONTEXT // 4, 128)}
# What row products read, as far as it is larger than anything else may be.
WIDENED = {(248320, 2560), (12288, 2560), (10240, 2560), (6144, 2560), (2560, 6144)}
WIDENED |= {shape[::-1] for shape in WIDENED}
# The first matrices of the experts that one token chooses.
CHOSEN = 10 * 1280 * 2560


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def made(function: Callable[..., Any], *arguments: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Primitive and shape of every array that a program makes, those of inner programs too."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    for equation in equations(jaxpr.jaxpr):
        for variable in equation.outvars:
            yield equation.primitive.name, getattr(variable.aval, "shape", ())


@pytest.fixture(scope="module")
def stored() -> Any:
    """Parameters in the released dtype."""
    tree = jax.eval_shape(lambda key: init_params(CONFIG, key), jax.random.key(0))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), tree)


def surprises(
    arrays: Iterator[tuple[str, tuple[int, ...]]], bound: int
) -> set[tuple[str, tuple[int, ...]]]:
    """Arrays above the bound that are neither caches with rows put in nor widened weights."""
    updates = ("scatter", "dynamic_update_slice", "jit", "pjit")
    return {
        (primitive, shape)
        for primitive, shape in arrays
        if math.prod(shape) > bound
        and not (shape in CACHES and primitive in updates)
        and not (shape in WIDENED and primitive in ("convert_element_type", "transpose"))
    }


def row_logits(params: Any, tokens: Any, state: Any) -> Any:
    tape = trunk_rows(params, tokens, state, config=CONFIG)
    return trunk_logits(params, tape.streams, config=CONFIG), tape.commit(jnp.ones(1, jnp.int32))


def test_one_row_makes_nothing_large(stored: Any) -> None:
    """Kernels, at the full context: nothing is larger than the first matrices of chosen experts.

    Not even those are copied: the kernels read every weight and every cached row in place.
    """
    state = support.state_shapes(CONTEXT)
    with implementation("kernel"):
        arrays = list(made(row_logits, stored, struct(1, 1), state))
    assert surprises(iter(arrays), CHOSEN) == set()
    assert ("gather", (1, 1, 10, 1280, 2560)) not in arrays
    assert not [shape for primitive, shape in arrays if primitive == "gather" and 2051 in shape]


def test_one_row_of_the_references(stored: Any) -> None:
    """Plain JAX copies the chosen experts and the selected rows, and widens what it multiplies.

    The matrices of the dense layers appear as float32; lm_head does so in 20 pieces, of which the
    reshape is a view. Tables that are only looked into are not copied.
    """
    state = support.state_shapes(CONTEXT)
    with implementation("reference"):
        arrays = list(made(row_logits, stored, struct(1, 1), state))
    assert surprises(iter(arrays), CHOSEN) == {("reshape", (20, 12416, 2560))}
    assert ("gather", (1, 1, 10, 1280, 2560)) in arrays
    # Attention reads its selection and the tail, of at most 2051 tokens.
    gathered = {shape for primitive, shape in arrays if primitive == "gather" and 2051 in shape}
    assert gathered == {(1, 2, 2051, 256)}


def test_a_prompt_chunk_makes_no_square_table(stored: Any) -> None:
    """64 queries at the full context: scores of blocks for the index heads, and nothing larger.

    That is 16,777,216 numbers; queries times keys times attention heads would be 24 times more.
    """
    state, tokens = support.state_shapes(CONTEXT), struct(1, 64)

    def chunk(params: Any, tokens: Any, count: Any, state: Any) -> Any:
        return trunk_prompt(params, tokens, count, state, config=CONFIG)[:2]

    bound = 64 * 4 * CONTEXT // 4
    assert surprises(made(chunk, stored, tokens, struct(1), state), bound) == set()


def test_a_large_array_is_noticed(stored: Any) -> None:
    """Negative control: a widened table, a read of a whole cache, a square of scores."""
    experts = stored["model"]["layers"]["0"]["mlp"]["experts"]["gate_up_proj"]
    keys = support.state_shapes(CONTEXT).layers[3].mixer.keys
    for function, argument in (
        (lambda weight: weight.astype(jnp.float32)[0], experts),
        (lambda cache: cache.astype(jnp.float32)[0, 0, 0], keys),
        (jax.jit(lambda cache: (cache + cache)[0, 0, 0]), keys),
    ):
        assert len(surprises(made(function, argument), CHOSEN)) == 1
