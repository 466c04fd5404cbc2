"""Row products: values, a row's independence, tiles, storages, finishes, transformations."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hipjax.ffi import kernels, ops
from hipjax.ffi.kernels.product import ADD, COMBINE, NONE, SILU, STRENGTH, products
from tests.ffi.rows import TILED, check_close, check_rows, drawn
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

DEPTHS = (1, 7, 16, 31, 40, 64, 100, 250, 256, 264, 320, 520, 2560)
LONG = (8192, 8224, 10240)  # quarters, the second with parts that end in the middle of a group


def weight(outputs: int, depth: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(drawn(depth, outputs, depth), dtype)


def exact(x: Any, w: Any) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of its terms' sizes."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return x @ w.T, np.abs(x) @ np.abs(w).T


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Any:
    with ops.implementation("kernel"):
        ops.row_product(jnp.ones((1, 8)), jnp.ones((1, 8)))  # an error here: there are none
        yield


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("depth", DEPTHS + LONG)
def test_against_float64(depth: int, dtype: Any) -> None:
    x, w = jnp.asarray(drawn(1, 3, depth)), weight(37, depth, dtype)
    value, size = exact(x, w)
    check_close(ops.row_product(x, w), value, size, 8)
    with pytest.raises(AssertionError):
        check_close(ops.row_product(x, w * jnp.asarray(1.01, dtype)), value, size, 8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("depth", [1, 31, 40, 264, 520, 8192, 8196])
def test_a_row_is_a_row(depth: int, dtype: Any) -> None:
    w = weight(37, depth, dtype)
    check_rows(lambda x: ops.row_product(x, w), [drawn(2, depth)], [*range(1, 9), *TILED])


def test_row_dependence_is_caught() -> None:
    """Controls: an order that depends on the number of rows, and a leak between rows."""
    w, row = weight(37, 512), drawn(2, 512)

    def pieces(x: jax.Array) -> jax.Array:
        edges = np.linspace(0, 512, x.shape[0] + 1).astype(int) // 8 * 8
        cuts = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
        return functools.reduce(jnp.add, [ops.row_product(x[:, a:b], w[:, a:b]) for a, b in cuts])

    with pytest.raises(AssertionError):
        check_rows(pieces, [row])
    with pytest.raises(AssertionError):
        check_rows(lambda x: ops.row_product(x, w) + 0 * jnp.sum(x, axis=0)[:37], [row])


def test_plain_dots_are_caught() -> None:
    """Control: XLA's own dot, where it rounds a row differently for some number of rows."""
    w = weight(320, 2560)
    x = jnp.asarray(drawn(3, 8, 2560))
    dot = jax.jit(lambda x: jnp.matmul(x, w.T, precision=lax.Precision.HIGHEST))
    whole = dot(x)
    if all(bool(jnp.all(dot(x[:n]) == whole[:n])) for n in range(1, 8)):
        pytest.skip("XLA's dot gives the same bits for 1 to 8 rows on this machine")
    for n in range(1, 8):
        assert_same_bits(ops.row_product(x[:n], w), ops.row_product(x, w)[:n])


@pytest.mark.parametrize("count", range(9, 34, 4))
def test_tiles(count: int) -> None:
    x, w = jnp.asarray(drawn(4, count, 264)), weight(37, 264, jnp.bfloat16)
    whole = ops.row_product(x, w)
    for i in range(count):
        assert_same_bits(whole[i], ops.row_product(x[i : i + 1], w)[0])


@pytest.mark.parametrize("depth", [264, 8224])
def test_several_matrices(depth: int) -> None:
    x = jnp.asarray(drawn(5, 5, depth))
    weights = tuple(weight(m, depth) + m for m in (1, 37, 64, 130))
    for got, w in zip(ops.row_products(x, weights), weights, strict=True):
        assert_same_bits(got, ops.row_product(x, w))
    mixed = (weights[0], weights[1].astype(jnp.bfloat16))  # two storages, hence two launches
    for got, w in zip(ops.row_products(x, mixed), mixed, strict=True):
        assert_same_bits(got, ops.row_product(x, w.astype(jnp.float32)))


@pytest.mark.parametrize("depth", [31, 40, 8224])
def test_finishes_of_one_launch(depth: int) -> None:
    x, first, second = jnp.asarray(drawn(6, 11, depth)), weight(20, depth), weight(4, depth)
    plain = [np.asarray(ops.row_product(x, w), np.float64) / 4 for w in (first, second)]
    silu, strength = products(x, [first, second], [SILU, STRENGTH], divisor=4.0)
    check_close(silu, plain[0] * _sigmoid(plain[0]), 1 + np.abs(plain[0]), 4)
    check_close(strength, 2 * _sigmoid(plain[1]), 2, 4)
    for finish in (SILU, STRENGTH):
        check_rows(
            lambda x, f=finish: products(x, [first], [f], divisor=4.0)[0], [drawn(6, depth)], (8, 9)
        )


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5, 11])
def test_add(streams: int) -> None:
    """Every group of rows has its own row to add, also where a tile cuts a group."""
    x, w, other = drawn(7, 13, streams, 40), weight(37, 40), drawn(8, 13, 37)
    got = ops.row_product_add(jnp.asarray(x), w, jnp.asarray(other))
    plain = ops.row_product(jnp.asarray(x), w)
    np.testing.assert_array_equal(got, np.asarray(plain) + other[:, None])
    check_rows(lambda x, o: ops.row_product_add(x, w, o), [x[0], other[0]], (1, 2, 3, 8, 13))
    assert not np.array_equal(got, np.asarray(plain) + np.roll(other, 1, 0)[:, None])


@pytest.mark.parametrize("depth", [31, 40, 8224])
def test_combine(depth: int) -> None:
    x, w = drawn(9, 11, depth), weight(37, depth, jnp.bfloat16)
    streams, strength = drawn(10, 11, 3, 37), drawn(11, 11, 3)
    operands = [jnp.asarray(a) for a in (x, streams, strength)]
    fused = ops.row_product_combine(operands[0], w, *operands[1:])
    apart = ops.hyper_combine(operands[1], ops.row_product(operands[0], w), operands[2])
    assert_same_bits(fused, apart)
    check_rows(
        lambda x, s, g: ops.row_product_combine(x, w, s, g),
        [x[0], streams[0], strength[0]],
        (1, 3, 8, 9),
    )


def test_transformations() -> None:
    x, w = jnp.asarray(drawn(12, 3, 5, 40)), weight(37, 40)
    one = ops.row_product(x, w)
    assert one.shape == (3, 5, 37)
    assert_same_bits(jax.vmap(lambda x: ops.row_product(x, w))(x), one)
    assert_same_bits(jax.vmap(lambda x: ops.row_product(x, w), 1, 1)(x), one)
    assert_same_bits(jax.vmap(jax.vmap(lambda x: ops.row_product(x[None], w)[0]))(x), one)
    assert_same_bits(jax.jit(ops.row_product)(x, w), one)
    assert_same_bits(lax.map(lambda x: ops.row_product(x, w), x), one)
    weights = jnp.stack([w, 2 * w, w + 1])
    each = jnp.stack([ops.row_product(x[i], weights[i]) for i in range(3)])
    assert_same_bits(jax.vmap(ops.row_product)(x, weights), each)
    shared = jax.vmap(ops.row_product, (None, 0))(x[0], weights)
    assert_same_bits(shared, jnp.stack([ops.row_product(x[0], v) for v in weights]))
    s, g = jnp.asarray(drawn(13, 3, 5, 2, 37)), jnp.asarray(drawn(14, 3, 5, 2))
    combined = jax.vmap(lambda x, s, g: ops.row_product_combine(x, w, s, g))(x, s, g)
    assert_same_bits(combined, ops.row_product_combine(x, w, s, g))
    assert ops.row_product(x[:0], w).shape == (0, 5, 37)


SNIPPET = """
import os
import jax.numpy as jnp
from hipjax.ffi import ops
for name in ("small", "long"):
    x, w = jnp.asarray(given[name]), jnp.asarray(given[name + "_weight"])
    for n in (1, 5, 8, 9):
        results[f"{name}-{n}"] = ops.row_product(x[:n], w)
        results[f"{name}-{n}-bf16"] = ops.row_product(x[:n], w.astype(jnp.bfloat16))
results["threads"] = len(os.listdir("/proc/self/task"))
"""


@functools.cache
def operands() -> dict[str, np.ndarray]:
    return {
        "small": drawn(15, 9, 520),
        "small_weight": drawn(16, 700, 520),
        "long": drawn(17, 9, 8224),
        "long_weight": drawn(18, 133, 8224),
    }


def differing(runs: list[dict[str, np.ndarray]]) -> None:
    for name in runs[0].keys() - {"threads"}:
        for run in runs[1:]:
            assert_same_bits(run[name], runs[0][name])


def test_instruction_sets_agree() -> None:
    runs = [bits_under(name, SNIPPET, None, **operands()) for name in instruction_sets()]
    assert len(runs) > 1 or instruction_sets() == ("portable",)
    here = ops.row_product(
        jnp.asarray(operands()["small"]), jnp.asarray(operands()["small_weight"])
    )
    assert_same_bits(np.asarray(here), runs[0]["small-9"])
    differing(runs)


def test_thread_counts_agree() -> None:
    best = instruction_sets()[-1]
    runs = [bits_under(best, SNIPPET, {"NPROC": str(n)}, **operands()) for n in (1, 2, 7)]
    assert runs[0]["threads"] < runs[1]["threads"] < runs[2]["threads"]
    differing(runs)


SHARDED = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from hipjax.ffi import ops
mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = jnp.asarray(given["x"]), jnp.asarray(given["w"])
specs = {"in_specs": (P("rows"), P()), "out_specs": P("rows")}
run = jax.jit(jax.shard_map(ops.row_product, mesh=mesh, **specs))
results["devices"] = len(jax.devices())
results["sharded"] = run(x, w)
"""


def test_sharded_rows() -> None:
    x, w = drawn(19, 8, 40), drawn(20, 37, 40)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    found = bits_under(instruction_sets()[-1], SHARDED, flags, x=x, w=w)
    assert found["devices"] == 4
    assert_same_bits(found["sharded"], np.asarray(ops.row_product(jnp.asarray(x), jnp.asarray(w))))


def test_refusals() -> None:
    x, w = jnp.ones((2, 40)), jnp.ones((37, 40))
    with pytest.raises(ValueError, match=r"weights has 5 matrices; allowed: 1 to 4"):
        products(x, [w] * 5, [NONE] * 5)
    with pytest.raises(ValueError, match=r"weights\[1\] has shape \(37, 39\); it must be .*, 40\)"):
        products(x, [w, w[:, 1:]], [NONE] * 2)
    with pytest.raises(TypeError, match=r"x has dtype int32; it must be float32"):
        products(x.astype(jnp.int32), [w], [NONE])
    with pytest.raises(ValueError, match=r"x has shape \(2, 0\); its last axis must hold"):
        products(x[:, :0], [w[:, :0]], [NONE])
    assert kernels.row_product is not ops.row_product


def test_the_handler_checks_again() -> None:
    x, w = jnp.ones((3, 40)), jnp.ones((37, 40))
    with pytest.raises(Exception, match="group does not divide the rows"):
        jax.block_until_ready(products(x, [w], [ADD], taken=[jnp.ones((3, 37))], group=2))
    with pytest.raises(Exception, match="operand 1 has 74 elements; 222 were expected"):
        taken = [jnp.ones((1, 2, 37)), jnp.ones((1, 2))]
        jax.block_until_ready(products(x[:, None], [w], [COMBINE], taken=taken))
