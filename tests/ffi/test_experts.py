"""The expert kernels: rows that share an expert share its weights and nothing else."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import ops
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets


class Weights(NamedTuple):
    gate_up: jax.Array
    down: jax.Array


class Rows(NamedTuple):
    """All of [1, R, …]; `experts` are drawn by `choices`."""

    x: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    shared: np.ndarray
    share: np.ndarray

    def pick(self, rows: object) -> "Rows":
        return Rows(*(part[:, rows] for part in self))


# E, I, H, K: the tiny and the bundled model's kind, then depths that are not multiples of 8 or 256.
SIZES = [(8, 16, 32, 2), (16, 40, 72, 2), (12, 13, 37, 3), (6, 264, 520, 4)]


@pytest.fixture(autouse=True)
def _kernels():
    with ops.implementation("kernel"):
        yield


@jax.jit
def run(rows: Rows, weights: Weights) -> jax.Array:
    return ops.expert_rows(rows.x, *weights, *rows[1:])


@functools.lru_cache(maxsize=2)
def weights_of(size: tuple[int, ...], dtype: object, seed: int = 0) -> Weights:
    experts, width, hidden, _ = size
    first, second = jax.random.split(jax.random.key(seed))
    gate_up = jax.random.normal(first, (experts, 2 * width, hidden), jnp.float32) / hidden**0.5
    down = jax.random.normal(second, (experts, hidden, width), jnp.float32) / width**0.5
    return Weights(gate_up.astype(dtype), down.astype(dtype))


def rows_of(count: int, size: tuple[int, ...], choices: str = "random", seed: int = 0) -> Rows:
    experts, _, hidden, chosen = size
    rng = np.random.default_rng(seed)
    lists = {
        "random": lambda row: rng.permutation(experts)[:chosen],
        "same": lambda row: np.arange(chosen),
        "distinct": lambda row: (row * chosen + np.arange(chosen)) % experts,
        "reversed": lambda row: np.arange(chosen)[:: 1 if row % 2 else -1],
    }[choices]
    normal = lambda *shape: rng.normal(size=(1, count, *shape)).astype(np.float32)  # noqa: E731
    picked = np.array([[lists(row) for row in range(count)]], np.int32)
    weights = rng.dirichlet(np.ones(chosen), (1, count)).astype(np.float32)
    return Rows(normal(hidden), picked, weights, normal(hidden), normal(1))


def expected(rows: Rows, weights: Weights) -> np.ndarray:
    """In float64."""

    def wide(weight: jax.Array, expert: int) -> np.ndarray:
        return np.asarray(weight[expert].astype(jnp.float32), np.float64)

    x, experts, scale, shared, share = (np.asarray(part[0], np.float64) for part in rows)
    out = shared / (1 + np.exp(-share))
    for row, slot in np.ndindex(experts.shape):
        expert = int(experts[row, slot])
        gate, up = np.split(wide(weights.gate_up, expert) @ x[row], 2)
        out[row] += scale[row, slot] * (
            wide(weights.down, expert) @ (gate / (1 + np.exp(-gate)) * up)
        )
    return out[None]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("choices", ["random", "same", "distinct"])
def test_values(size: tuple[int, ...], dtype: object, choices: str):
    weights, rows = weights_of(size, dtype), rows_of(11, size, choices)
    wanted = expected(rows, weights)
    np.testing.assert_allclose(run(rows, weights), wanted, rtol=1e-5, atol=3e-6)
    swapped = rows._replace(experts=np.roll(rows.experts, 1, axis=-1))
    assert not np.allclose(run(swapped, weights), wanted, rtol=1e-5, atol=3e-6)


def test_an_expert_has_the_bits_of_row_products():
    """One expert of weight one, nothing shared: two row products with swiglu between them."""
    size = (3, 264, 520, 1)
    weights, rows = weights_of(size, jnp.bfloat16), rows_of(4, size)
    rows = rows._replace(
        experts=np.full_like(rows.experts, 2),
        weights=np.ones_like(rows.weights),
        shared=np.zeros_like(rows.shared),
    )

    @jax.jit
    def plain(x: jax.Array) -> jax.Array:
        gate_up = weights.gate_up[2]
        gate, up = ops.row_products(x, (gate_up[:264], gate_up[264:]))
        return ops.row_product(ops.swiglu(gate, up), weights.down[2])

    np.testing.assert_array_equal(run(rows, weights), plain(rows.x))


@pytest.mark.parametrize("choices", ["random", "same", "reversed", "distinct"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 70])
def test_a_row_is_a_row(count: int, choices: str):
    size = (12, 24, 40, 4) if count % 2 else (12, 13, 37, 4)
    weights = weights_of(size, jnp.bfloat16 if count % 3 else jnp.float32)
    rows = rows_of(count, size, choices)
    alone = [np.asarray(run(rows.pick([row]), weights))[0, 0] for row in range(count)]
    whole = np.asarray(run(rows, weights))[0]
    assert_same_bits(whole, np.array(alone))
    for at in range(count) if count < 10 else (0, count // 2, count - 1):
        others = np.arange(count) != at
        for poison in (np.nan, np.inf, 1e30):
            spoilt = Rows(*(np.array(part) for part in rows))
            for part in (spoilt.x, spoilt.weights, spoilt.shared, spoilt.share):
                part[0, others] = poison
            assert_same_bits(np.asarray(run(spoilt, weights))[0, at], alone[at])


def test_the_order_of_the_list_matters():
    """The negative control of the test above: another order of the sum has other bits."""
    size = (12, 24, 40, 4)
    weights, rows = weights_of(size, jnp.float32), rows_of(8, size)
    turned = rows._replace(experts=rows.experts[..., ::-1], weights=rows.weights[..., ::-1])
    a, b = run(rows, weights), run(turned, weights)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert (np.asarray(a) != np.asarray(b)).any()


def test_a_row_dependent_sum_is_caught():
    """A sum in the order of expert numbers over the batch's union would break the promise."""
    size = (12, 24, 40, 4)
    weights, rows = weights_of(size, jnp.float32), rows_of(8, size)

    def sloppy(rows: Rows) -> np.ndarray:
        shift = rows.x.shape[1]  # a split that depends on the number of rows
        turned = {k: np.roll(getattr(rows, k), shift, axis=-1) for k in ("experts", "weights")}
        return np.asarray(run(rows._replace(**turned), weights))[0]

    alone = np.array([sloppy(rows.pick([row]))[0] for row in range(8)])
    with pytest.raises(AssertionError):
        assert_same_bits(sloppy(rows), alone)


@pytest.mark.parametrize("choices", ["same", "distinct", "random"])
def test_real_size(choices: str):
    """The released model's shapes with 32 of its 512 experts."""
    size = (32, 640, 2560, 10)
    weights, rows = weights_of(size, jnp.bfloat16), rows_of(5, size, choices)
    whole = np.asarray(run(rows, weights))
    np.testing.assert_allclose(whole, expected(rows, weights), rtol=1e-4, atol=2e-5)
    for row in range(5):
        assert_same_bits(whole[:, [row]], run(rows.pick([row]), weights))


def test_wrong_experts_read_nothing_else():
    size = SIZES[0]
    weights, rows = weights_of(size, jnp.float32), rows_of(3, size)
    rows.experts[0, 0], rows.experts[0, 1] = [-5, 1000], [7, 7]
    clamped = rows._replace(experts=np.clip(rows.experts, 0, 7))
    assert_same_bits(run(rows, weights), run(clamped, weights))


def test_transformations():
    size = SIZES[1]
    weights, rows = weights_of(size, jnp.bfloat16), rows_of(12, size)
    wanted = np.asarray(run(rows, weights))
    batch = Rows(*(part.reshape(3, 1, 4, -1) for part in rows))
    mapped = jax.jit(jax.vmap(run, in_axes=(0, None)))(batch, weights)
    assert_same_bits(np.asarray(mapped).reshape(wanted.shape), wanted)
    _, scanned = jax.lax.scan(lambda c, some: (c, run(some, weights)), 0, batch)
    assert_same_bits(np.asarray(scanned).reshape(wanted.shape), wanted)
    other = weights_of(size, jnp.bfloat16, seed=1)
    both = Weights(*(jnp.stack(pair) for pair in zip(weights, other, strict=True)))
    twice = jax.vmap(run, in_axes=(None, 0))(rows, both)
    assert_same_bits(twice[0], wanted)
    assert_same_bits(twice[1], run(rows, other))


SNIPPET = """
import jax.numpy as jnp
from hipjax.ffi import ops
names = ("x", "gate_up", "down", "experts", "weights", "shared", "share")
with ops.implementation("kernel"):
    results["out"] = ops.expert_rows(*(jnp.asarray(given[name]) for name in names))
"""


SHARDED = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from hipjax.ffi import ops
names = ("x", "experts", "weights", "shared", "share", "gate_up", "down")
split, whole = PartitionSpec("d"), PartitionSpec()
def one(x, experts, weights, shared, share, gate_up, down):
    with ops.implementation("kernel"):
        return ops.expert_rows(x, gate_up, down, experts, weights, shared, share)
assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
spread = jax.shard_map(one, mesh=mesh, in_specs=(split,) * 5 + (whole,) * 2, out_specs=split)
results["out"] = jax.jit(spread)(*(jnp.asarray(given[name]) for name in names))
"""


def test_shard_map():
    size = SIZES[1]
    weights, rows = weights_of(size, jnp.float32), rows_of(8, size)
    batch = Rows(*(part.reshape(4, 2, -1) for part in rows))
    given = {**batch._asdict(), **{name: np.asarray(w) for name, w in weights._asdict().items()}}
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    got = bits_under(instruction_sets()[-1], SHARDED, four, **given)["out"]
    assert_same_bits(got.reshape(1, 8, -1), run(rows, weights))


@pytest.mark.parametrize("size", [SIZES[2], SIZES[3]])
def test_instruction_sets(size: tuple[int, ...]):
    weights, rows = weights_of(size, jnp.float32), rows_of(9, size)
    given = {**rows._asdict(), **{name: np.asarray(w) for name, w in weights._asdict().items()}}
    wanted = run(rows, weights)
    for one in instruction_sets():
        assert_same_bits(bits_under(one, SNIPPET, **given)["out"], wanted)


@pytest.mark.parametrize("width", [1, 31, 640, 1001])
def test_swiglu(width: int):
    rng = np.random.default_rng(0)
    gate, up = (4 * rng.normal(size=(2, 5, 3, width))).astype(np.float32)
    got = np.asarray(ops.swiglu(jnp.asarray(gate), jnp.asarray(up)))
    exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    assert not np.allclose(ops.swiglu(jnp.asarray(up), jnp.asarray(gate)), exact, rtol=1e-6)
    alone = [ops.swiglu(jnp.asarray(gate[i : i + 1]), jnp.asarray(up[i : i + 1])) for i in range(5)]
    assert_same_bits(got, np.concatenate(alone))
    assert_same_bits(jax.vmap(ops.swiglu)(jnp.asarray(gate), jnp.asarray(up)), got)


def test_refusals():
    size = (8, 16, 32, 2)
    weights, rows = weights_of(size, jnp.float32), rows_of(3, size)
    given = {**weights._asdict(), **{k: jnp.asarray(v) for k, v in rows._asdict().items()}}

    def refused(error: type[Exception], sentence: str, **changed: jax.Array) -> None:
        with pytest.raises(error, match=sentence):
            ops.expert_rows(**{**given, **changed})

    refused(ValueError, "x has 2 axes; it must have 3", x=given["x"][0])
    refused(ValueError, r"gate_up has shape .*; it must be \[E, 2 I, 32\]", gate_up=given["down"])
    refused(ValueError, r"down has shape .*; it must be \(8, 32, 16\)", down=given["down"][:7])
    refused(ValueError, "experts has 2 axes; it must have 3", experts=given["experts"][0])
    refused(ValueError, "weights has shape", weights=given["weights"][..., :1])
    refused(ValueError, "shared has shape", shared=given["shared"][..., :1])
    refused(ValueError, "share has shape", share=given["share"][..., 0])
    refused(TypeError, "x has dtype bfloat16", x=given["x"].astype(jnp.bfloat16))
    refused(TypeError, "experts has dtype float32", experts=given["weights"])
    many = jnp.zeros((1, 3, 17), jnp.int32)
    refused(ValueError, "experts has rows of 17; allowed: 1 to 16", experts=many)
    with pytest.raises(ValueError, match=r"up has shape \(2, 3\); it must be \(2, 4\)"):
        ops.swiglu(jnp.zeros((2, 4)), jnp.zeros((2, 3)))
