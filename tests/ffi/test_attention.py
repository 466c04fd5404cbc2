"""Attention of decoded rows by kernels: against float64, and a row is a row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi import kernels, ops
from hipjax.model.attention import rotary_frequencies
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

BITS = np.dtype(np.uint16)  # of bfloat16


@pytest.fixture(autouse=True)
def by_kernels() -> Iterator[None]:
    with ops.implementation("kernel"):
        yield


class Sizes(NamedTuple):
    heads: int
    groups: int
    width: int
    ratio: int
    slots: int
    length: int


SIZES = {
    "tiny": Sizes(4, 2, 32, 4, 2, 41),
    "two_ple": Sizes(6, 2, 16, 2, 5, 40),
    "nano": Sizes(4, 2, 32, 4, 64, 1500),
    "real": Sizes(24, 2, 256, 4, 512, 3000),
    "odd": Sizes(5, 1, 37, 3, 30, 200),
    "shared": Sizes(12, 1, 40, 1, 70, 130),
}


class Case(NamedTuple):
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    selected: np.ndarray
    count: np.ndarray
    positions: np.ndarray
    projected: np.ndarray


@functools.cache
def case(name: str, rows: int, batch: int = 1, spare: int = 7) -> Case:
    """Rows at the end of a sequence, and lists of blocks of their own, some of them short."""
    s, rng = SIZES[name], np.random.default_rng(len(name))
    capacity = s.length + spare
    positions = s.length - rows + np.tile(np.arange(rows, dtype=np.int32), (batch, 1))
    selected = np.full((batch, rows, s.slots), -1, np.int32)
    count = np.zeros((batch, rows), np.int32)
    for b, r in np.ndindex(batch, rows):
        whole = (positions[b, r] + 1) // s.ratio
        n = min(s.slots, whole) if r % 3 == 0 else rng.integers(0, min(s.slots, whole) + 1)
        selected[b, r, :n] = np.sort(rng.permutation(whole)[:n])
        count[b, r] = n
        if n == 0 and (positions[b, r] + 1) % s.ratio == 0:
            selected[b, r, 0], count[b, r] = 0, 1
    cache = rng.standard_normal((2, batch, s.groups, capacity, s.width)).astype(np.float32)
    cache[..., s.length :, :] = np.nan
    query = 2 * rng.standard_normal((batch, rows, s.heads, s.width)).astype(np.float32)
    projected = rng.standard_normal((batch, rows, s.heads, 2, s.width)).astype(np.float32)
    return Case(query, cache[0], cache[1], selected, count, positions, projected)


def exact(c: Case, ratio: int) -> np.ndarray:
    """The same in float64."""
    out = np.zeros(c.query.shape)
    share = c.query.shape[2] // c.keys.shape[1]
    for b, r, n in np.ndindex(c.query.shape[:3]):
        blocks = c.selected[b, r, : c.count[b, r]]
        at = [k * ratio + i for k in blocks for i in range(ratio)]
        at += range((c.positions[b, r] + 1) // ratio * ratio, c.positions[b, r] + 1)
        keys, values = (x[b, n // share, at].astype(np.float64) for x in (c.keys, c.values))
        scores = keys @ c.query[b, r, n] / np.sqrt(c.query.shape[-1])
        weights = np.exp(scores - scores.max())
        gate = 1 / (1 + np.exp(-c.projected[b, r, n, 1].astype(np.float64)))
        out[b, r, n] = weights / weights.sum() @ values * gate
    return out


def rounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(ops.decode(ops.encode(jnp.asarray(x), BITS)))


def run(c: Case, ratio: int, bits: bool = False) -> np.ndarray:
    arrays = list(map(jnp.asarray, c))
    if bits:
        arrays[1:3] = [ops.encode(x, BITS) for x in arrays[1:3]]
    return np.asarray(ops.attend(*arrays, ratio))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("bits", [False, True])
def test_attention_against_float64(name: str, bits: bool) -> None:
    ratio, c = SIZES[name].ratio, case(name, 4, 2)
    if bits:
        c = c._replace(keys=rounded(c.keys), values=rounded(c.values))
    wanted = exact(c, ratio)
    np.testing.assert_allclose(run(c, ratio, bits), wanted, atol=3e-6)
    # Negative controls: a token less in the tail or a block less, and no gate.
    fewer = exact(c._replace(count=np.maximum(c.count - 1, 1)), ratio)
    assert np.abs(fewer - wanted).max() > 1e-4
    assert np.abs(exact(c._replace(projected=0 * c.projected), ratio) - wanted).max() > 1e-2


def one_row(c: Case, r: int) -> Case:
    of_rows = ("query", "selected", "count", "positions", "projected")
    return c._replace(**{name: getattr(c, name)[:, r : r + 1] for name in of_rows})


@pytest.mark.parametrize("name", ["tiny", "two_ple", "odd", "nano"])
@pytest.mark.parametrize("other", [np.nan, np.inf, 1e30])
def test_a_row_is_a_row(name: str, other: float) -> None:
    ratio = SIZES[name].ratio
    for rows in (*range(1, 10), 17, 33) if name == "tiny" else range(1, 9):
        whole = case(name, rows)
        for r in range(rows):
            alone = run(one_row(whole, r), ratio)
            assert np.isfinite(alone).all()
            own = np.arange(rows) == r
            query = np.where(own[:, None, None], whole.query, np.float32(other))
            keys, values = whole.keys.copy(), whole.values.copy()
            after = int(whole.positions[0, r]) + 1  # rows past this one, and dead ones
            keys[:, :, after:], values[:, :, after:] = other, other
            mixed = whole._replace(query=query, keys=keys, values=values)
            assert_same_bits(run(mixed, ratio)[:, r], alone[:, 0])


def test_real_sizes_row_by_row() -> None:
    whole = case("real", 8)
    found = run(whole, 4, bits=True)
    for r in range(8):
        assert_same_bits(run(one_row(whole, r), 4, bits=True)[:, 0], found[:, r])


def test_a_row_dependent_split_is_noticed() -> None:
    """Negative control: pieces that begin elsewhere give other bits."""
    whole = case("nano", 1)
    wanted = run(whole, 4)
    selected = np.roll(whole.selected, 1, axis=-1)
    assert (run(whole._replace(selected=selected), 4) != wanted).any()


def test_capacity_does_not_matter() -> None:
    small, large = case("nano", 3, spare=4), case("nano", 3, spare=2600)
    filled = {}
    for name in ("keys", "values"):
        room = np.full_like(getattr(large, name), np.nan)
        room[:, :, :1500] = getattr(small, name)[:, :, :1500]
        filled[name] = room
    assert_same_bits(run(small._replace(**filled), 4), run(small, 4))
    # Nor do empty slots: a longer list may be possible without being there.
    slots = np.full((1, 3, 200), -1, np.int32)
    slots[..., : small.selected.shape[-1]] = small.selected
    assert_same_bits(run(small._replace(selected=slots), 4), run(small, 4))


def test_bad_lists_stay_inside_the_cache() -> None:
    c = case("tiny", 2)
    wild = c._replace(selected=np.full_like(c.selected, 2**28), count=np.full_like(c.count, 99))
    assert run(wild, 4).shape == c.query.shape


def inputs(rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    shapes = [(2, rows, 6, 2, 40), (2, rows, 2, 40), (2, rows, 4, 25)]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    arrays.append(rng.integers(0, 262_144, (2, rows)).astype(np.int32))
    arrays += [rng.standard_normal(n).astype(np.float32) for n in (40, 40, 25)]
    return [*arrays, rotary_frequencies(1e7, 18)]


def turned(
    x: np.ndarray, weight: np.ndarray, positions: np.ndarray, freq: np.ndarray
) -> np.ndarray:
    """Norm and rotary embedding of [.., N, width] in float64; the angle as float32 has it."""
    x = x.astype(np.float64)
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + weight.astype(np.float64))
    angle = (positions.astype(np.float32)[..., None, None] * freq).astype(np.float64)
    half = len(freq)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def test_inputs_against_float64() -> None:
    arrays = inputs(5)
    projected, key, index, positions, *norms, freq = arrays
    found = ops.attention_inputs(*map(jnp.asarray, arrays), eps=1e-6)
    heads = (projected[..., 0, :], key, index[..., :-1, :])
    for x, got, norm in zip(heads, found, norms, strict=True):
        np.testing.assert_allclose(got, turned(x, norm, positions, freq), atol=4e-6)
        assert np.abs(np.asarray(got) - turned(x, norm, positions + 1, freq)).max() > 0.1


@pytest.mark.parametrize("other", [np.nan, np.inf, 1e30])
def test_inputs_row_by_row(other: float) -> None:
    for rows in (*range(1, 10), 17, 33):
        arrays = inputs(rows)
        for r in range(rows):
            mixed = [a.copy() for a in arrays]
            for a in mixed[:3]:
                a[:, np.arange(rows) != r] = other
            alone = [a[:, r : r + 1] for a in arrays[:4]] + arrays[4:]
            found = ops.attention_inputs(*map(jnp.asarray, mixed), eps=1e-6)
            wanted = ops.attention_inputs(*map(jnp.asarray, alone), eps=1e-6)
            for got, want in zip(found, wanted, strict=True):
                assert_same_bits(got[:, r], want[:, 0])


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("bits", [False, True])
def test_block_keys_against_float64(ratio: int, bits: bool) -> None:
    rng = np.random.default_rng(3)
    raw = rounded(rng.standard_normal((2, 3 * ratio, 25)).astype(np.float32))
    first = np.array([0, 60_000], np.int32)
    norm, freq = rng.standard_normal(25).astype(np.float32), rotary_frequencies(1e6, 16)
    stored = ops.encode(jnp.asarray(raw), BITS if bits else np.dtype(np.float32))
    found = ops.block_keys(stored, *map(jnp.asarray, (first, norm, freq)), 1e-6, ratio)
    mean = raw.astype(np.float64).reshape(2, 3, ratio, 25).mean(axis=2)
    positions = (first[:, None] + np.arange(3)) * ratio
    wanted = turned(mean[:, :, None], norm, positions, freq)[:, :, 0]
    np.testing.assert_allclose(found, wanted, atol=4e-6)
    # A block is a block: its key has the same bits alone.
    alone = ops.block_keys(
        stored[:, ratio : 2 * ratio], *map(jnp.asarray, (first + 1, norm, freq)), 1e-6, ratio
    )
    assert_same_bits(alone[:, 0], found[:, 1])


def test_transformations() -> None:
    c = case("two_ple", 4, 3)
    wanted = run(c, 2)
    arrays = tuple(map(jnp.asarray, c))
    assert_same_bits(jax.jit(lambda *a: ops.attend(*a, 2))(*arrays), wanted)
    mapped = jax.vmap(lambda *a: ops.attend(*(x[None] for x in a), 2)[0])(*arrays)
    assert_same_bits(mapped, wanted)

    def step(carry: int, a: tuple[jax.Array, ...]) -> tuple[int, jax.Array]:
        return carry, ops.attend(*(x[None] for x in a), 2)[0]

    assert_same_bits(jax.lax.scan(step, 0, arrays)[1], wanted)
    many = tuple(map(jnp.asarray, inputs(3)))
    found = jax.vmap(lambda *a: ops.attention_inputs(*(x[None] for x in a), *many[4:], eps=1e-6))(
        *many[:4]
    )
    chex.assert_trees_all_equal(
        [x[:, 0] for x in found], list(ops.attention_inputs(*many, eps=1e-6))
    )


def test_instruction_sets_and_devices() -> None:
    """The same bits from every instruction set, and from four devices under shard_map."""
    c = case("odd", 3, 4)
    code = """
    import jax
    from jax.sharding import PartitionSpec as P
    from hipjax.ffi.kernels import attend
    names = ("query", "keys", "values", "selected", "count", "positions", "projected")
    arrays = [jax.numpy.asarray(given[name]) for name in names]
    results["whole"] = attend(*arrays, 3)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    one = jax.shard_map(lambda *a: attend(*a, 3), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    results["sharded"] = jax.jit(one)(*arrays)
    """
    wanted = run(c, 3)
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    for name in instruction_sets():
        found = bits_under(name, code, devices, **c._asdict())
        assert_same_bits(found["whole"], wanted)
        assert_same_bits(found["sharded"], wanted)


def test_bfloat16_bits_are_rounded_on_integers() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x, np.array([0.0, -0.0, 1e-45, 3.4e38, np.inf, np.nan], np.float32)])
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = x.astype(jnp.bfloat16)
    found = np.asarray(ops.encode(jnp.asarray(x), BITS)).view(jnp.bfloat16)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint16)[~nan], wanted.view(np.uint16)[~nan])


def test_what_is_refused() -> None:
    # Unwrapped, since the test run's checks of annotations would come first.
    attend, attention_inputs, block_keys = map(
        inspect.unwrap, (kernels.attend, kernels.attention_inputs, kernels.block_keys)
    )
    c = list(map(jnp.asarray, case("tiny", 2)))
    with pytest.raises(TypeError, match="values has dtype uint16; allowed: float32"):
        attend(*c[:2], ops.encode(c[2], BITS), *c[3:], 4)
    with pytest.raises(ValueError, match=r"count has shape \(1, 1\); allowed: \(1, 2\)"):
        attend(*c[:4], c[4][:, :1], *c[5:], 4)
    with pytest.raises(ValueError, match="query has 4 heads; allowed: multiples of the 3 of keys"):
        attend(c[0], jnp.zeros((1, 3, 9, 32)), jnp.zeros((1, 3, 9, 32)), *c[3:], 4)
    with pytest.raises(ValueError, match="raw has 5 tokens; they must be whole blocks of 4"):
        block_keys(jnp.zeros((1, 5, 8)), jnp.zeros(1, jnp.int32), c[0], jnp.zeros(2), 1e-6, 4)
    arrays = list(map(jnp.asarray, inputs(2)))
    with pytest.raises(ValueError, match="frequencies has 13 elements; allowed: at most 12"):
        attention_inputs(*arrays[:-1], jnp.zeros(13), eps=1e-6)
