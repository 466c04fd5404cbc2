"""What a program asks of a GPU, seen from a machine that has none."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hipjax.ffi import ops
from hipjax.ffi.registration import operations


def lowered(platform: str, run: Any, *operands: Any) -> str:
    with ops.implementation("kernel"):
        return str(jax.jit(run).trace(*operands).lower(lowering_platforms=(platform,)).as_text())


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_row_products(platform: str) -> None:
    x, w = jnp.ones((3, 8224)), jnp.ones((5, 8224), jnp.bfloat16)
    text = lowered(platform, lambda x, w: ops.row_products(x, (w, w)), x, w)
    assert re.search(r"stablehlo\.custom_call @hipjax_row_products\(", text)
    assert "finishes = dense<0> : tensor<2xi64>" in text
    for attribute in ("quarters = 1 : i64", "divisor = 1.000000e+00 : f32", "group = 1 : i64"):
        assert attribute in text, attribute
    assert "tensor<5x8224xbf16>" in text
    assert "stablehlo.dot" not in text
    short = lowered(platform, ops.row_product, x[:, :40], w[:, :40])
    assert "quarters = 0 : i64" in short


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_operations_around_the_streams(platform: str) -> None:
    streams, branch, strength = jnp.ones((2, 4, 16)), jnp.ones((2, 16)), jnp.ones((2, 4))
    down, up, inject = jnp.ones((8, 64)), jnp.ones((64, 8)), jnp.ones((4, 64))
    text = lowered(platform, ops.hyper_mix, streams, down, up, inject)
    assert "finishes = dense<[1, 2]> : tensor<2xi64>" in text
    assert "divisor = 4.000000e+00 : f32" in text
    assert text.count("custom_call @hipjax_") == 2
    assert "custom_call @hipjax_hyper_mix_up(" in text
    text = lowered(platform, ops.hyper_combine, streams, branch, strength)
    assert "custom_call @hipjax_hyper_combine(" in text
    text = lowered(platform, ops.argmax, jnp.ones((2, 9000)))
    assert "custom_call @hipjax_argmax(" in text
    assert "tensor<2x2xf32>" in text  # room for the pieces' bests
    norm = jnp.ones((64,))
    text = lowered(
        platform, lambda s, v, n: ops.ple_gate(s, s, v, (n, n, n), 1e-6), streams, branch, norm
    )
    assert "custom_call @hipjax_ple_gate(" in text
    assert "eps = 9.99999997E-7 : f32" in text


def test_the_reference_names_no_kernel() -> None:
    with ops.implementation("reference"):
        text = jax.jit(ops.row_product).trace(jnp.ones((2, 40)), jnp.ones((5, 40)))
        assert "hipjax_" not in str(text.lower(lowering_platforms=("cuda",)).as_text())


def test_every_operation_has_a_handler() -> None:
    assert {"row_products", "hyper_mix_up", "ple_gate", "ple_output", "argmax"} <= operations()
