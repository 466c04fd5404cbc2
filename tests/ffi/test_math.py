"""The functions that kernels compute with, against float64: accuracy, special values, bits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hipjax.ffi.call import call
from hipjax.ffi.registration import verdict
from tests.ffi.support import assert_same_bits, bits_under, instruction_sets

INF, NAN = np.inf, np.nan
TINY = 2.0**-149  # the least denormal
HUGE = float(np.finfo(np.float32).max)
TURNS = 2.0**18  # sine and cosine are stated up to here
FAR = 2.0**20  # and are NaN from here on


def _sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def _silu(x: Any) -> Any:
    return np.where(x == -INF, -0.0, x * _sigmoid(x))


def _softplus(x: Any) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _reciprocal_root(x: Any) -> Any:
    return 1 / np.sqrt(x)


class Function(NamedTuple):
    exact: Callable[[Any], Any]  # in float64
    bound: float  # stated in csrc/order.md, in units in the last place
    special: list[tuple[float, float]]  # values and results, by the bit
    edges: tuple[float, ...]  # where the method changes its ways
    farthest: float = INF


# In the order of the kernel's enum MathFunction.
FUNCTIONS = {
    "exp": Function(
        np.exp,
        1.0,
        [
            (0.0, 1.0),
            (-0.0, 1.0),
            (INF, INF),
            (-INF, 0.0),
            (HUGE, INF),
            (-HUGE, 0.0),
            (TINY, 1.0),
            (-TINY, 1.0),
        ],
        (-112.0, -103.97, -103.28, -87.34, 88.73, 89.0, *(np.arange(-150, 129) * np.log(2.0) / 2)),
    ),
    "sigmoid": Function(
        _sigmoid,
        1.0,
        [
            (0.0, 0.5),
            (-0.0, 0.5),
            (INF, 1.0),
            (-INF, 0.0),
            (HUGE, 1.0),
            (-HUGE, 0.0),
            (TINY, 0.5),
            (-TINY, 0.5),
        ],
        (-112.0, -103.97, -103.28, -87.34, 16.6, 17.4, 112.0, *(np.arange(-150, 129) * 0.34657359)),
    ),
    "silu": Function(
        _silu,
        1.0,
        [
            (0.0, 0.0),
            (-0.0, -0.0),
            (INF, INF),
            (-INF, -0.0),
            (HUGE, HUGE),
            (-HUGE, -0.0),
            (TINY, 0.0),
        ],
        (-112.0, -108.8, -103.97, -87.34, 16.6, 17.4, 112.0, *(np.arange(-150, 129) * 0.34657359)),
    ),
    "softplus": Function(
        _softplus,
        1.25,
        [
            (INF, INF),
            (-INF, 0.0),
            (HUGE, HUGE),
            (-HUGE, 0.0),
            (0.0, float(np.float32(np.log(2.0)))),
        ],
        (-112.0, -103.97, -103.28, -87.34, -0.8814, 0.8814, 16.6, 17.4, 112.0),
    ),
    "log1p": Function(
        np.log1p,
        1.0,
        [
            (0.0, 0.0),
            (-0.0, -0.0),
            (INF, INF),
            (-INF, NAN),
            (-1.0, -INF),
            (-2.0, NAN),
            (TINY, TINY),
            (-TINY, -TINY),
        ],
        (-1.0, -0.5, -0.2928932, 0.4142135, 1.828427, 2.0**24, 2.0**25),
    ),
    "reciprocal_root": Function(
        _reciprocal_root,
        1.5,
        [
            (0.0, INF),
            (-0.0, -INF),
            (INF, 0.0),
            (-INF, NAN),
            (-1.0, NAN),
            (TINY, float(np.float32(2.0**74.5))),
        ],
        (),
    ),
    "sin": Function(
        np.sin,
        1.0,
        [
            (0.0, 0.0),
            (-0.0, -0.0),
            (INF, NAN),
            (-INF, NAN),
            (HUGE, NAN),
            (FAR, NAN),
            (TINY, TINY),
            (-TINY, -TINY),
        ],
        tuple(np.arange(-2000, 2000) * np.pi / 4),
        TURNS,
    ),
    "cos": Function(
        np.cos,
        1.0,
        [
            (0.0, 1.0),
            (-0.0, 1.0),
            (INF, NAN),
            (-INF, NAN),
            (HUGE, NAN),
            (-FAR, NAN),
            (TINY, 1.0),
            (-TINY, 1.0),
        ],
        tuple(np.arange(-2000, 2000) * np.pi / 4),
        TURNS,
    ),
}


def evaluate(name: str, x: np.ndarray, *, uniform: bool = False) -> np.ndarray:
    """A function of math.h, elementwise, by the kernel that exists for this test."""
    assert verdict(jax.default_backend()).kernels
    number = list(FUNCTIONS).index(name)
    item = jnp.asarray(x, jnp.float32)[None]
    types = [(x.shape, jnp.float32)]
    (out,) = call("math_probe", [item], [], types, function=number, uniform=int(uniform))
    return np.asarray(out[0])


def points(name: str, step: int) -> np.ndarray:
    """Every step-th float32 of all, and those around powers of two and the function's edges."""
    function = FUNCTIONS[name]
    all_over = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)
    powers = np.ldexp(1.0, np.arange(-149, 128))
    centres = np.concatenate([powers, -powers, np.array(function.edges)]).astype(np.float32)
    near = (centres.view(np.int32)[:, None] + np.arange(-40, 41, dtype=np.int32)).ravel()
    x = np.concatenate([all_over, near.view(np.float32)])
    if function.farthest < INF:  # angles of positions times frequencies, and multiples of pi / 2
        positions = np.arange(1, TURNS, 7, dtype=np.float32)
        turns = (np.arange(1, int(TURNS / np.pi * 2)) * (np.pi / 2)).astype(np.float32)
        x = np.concatenate([x, positions, turns, np.nextafter(turns, np.float32(0)), -turns])
        x = x[np.abs(x) <= function.farthest]
    return x


def errors(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distances from the exact values, in units of the last place of a float32 there.

    Below 2**-126 the unit is the least denormal. NaN, infinity and what rounds to infinity
    are right or infinitely wrong.
    """
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, np.maximum(exponent - 24, -149))
    rounded = exact.astype(np.float32)
    distance = np.abs(got.astype(np.float64) - exact) / unit
    right = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    return np.where(np.isfinite(rounded) & np.isfinite(got), distance, np.where(right, 0.0, INF))


def check_accuracy(got: np.ndarray, x: np.ndarray, function: Function) -> float:
    with np.errstate(all="ignore"):
        found = errors(got, function.exact(x.astype(np.float64)))
    at = int(found.argmax())
    assert found[at] <= function.bound, f"{found[at]:.2f} units at {x[at]!r}: {got[at]!r}"
    return float(found[at])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name: str) -> None:
    x = points(name, 1009)
    assert x.size > 2_000_000
    worst = check_accuracy(evaluate(name, x), x, FUNCTIONS[name])
    assert worst > 0.4  # a sampling of so many values meets nearly every rounding


def test_a_wrong_value_among_millions_is_found() -> None:
    function = FUNCTIONS["silu"]
    x = points("silu", 1009)
    got = evaluate("silu", x)
    check_accuracy(got, x, function)
    for centre in (1.7, -90.0):  # the second result is denormal
        place = int(np.flatnonzero((x > centre - 0.01) & (x < centre + 0.01))[0])
        wrong = got.copy()
        wrong.view(np.int32)[place] += 4
        with pytest.raises(AssertionError, match="units at"):
            check_accuracy(wrong, x, function)
    with np.errstate(all="ignore"):
        textbook = x / (np.float32(1) + np.exp(-x))  # -0 where e^-x overflows
    with pytest.raises(AssertionError, match="units at"):
        check_accuracy(textbook, x, function)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str) -> None:
    x, wanted = np.array([*FUNCTIONS[name].special, (NAN, NAN)], np.float32).T
    assert_same_bits(evaluate(name, x), wanted)


def test_the_sign_of_zero_counts() -> None:
    got = evaluate("silu", np.array([-0.0], np.float32))
    with pytest.raises(AssertionError):
        assert_same_bits(got, -got)


@pytest.mark.parametrize("count", [1, 31, 33, 1025])
def test_a_value_does_not_depend_on_its_neighbours(count: int) -> None:
    x = points("exp", 40_009)[:2048]
    for name in FUNCTIONS:
        assert_same_bits(evaluate(name, x[:count]), evaluate(name, x)[:count])


@pytest.fixture(scope="module")
def here() -> dict[str, np.ndarray]:
    return every_function()


def every_function() -> dict[str, np.ndarray]:
    out = {}
    for name in FUNCTIONS:
        x = points(name, 40_009)
        out[name] = evaluate(name, x)
        out[f"uniform {name}"] = evaluate(name, x, uniform=True)
    return out


def test_uniform_values_have_the_bits_of_lanes(here: dict[str, np.ndarray]) -> None:
    for name in FUNCTIONS:
        assert_same_bits(here[f"uniform {name}"], here[name])
    with pytest.raises(AssertionError):
        assert_same_bits(here["sin"], here["cos"])


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512"])
def test_bits_are_the_same_everywhere(instruction_set: str, here: dict[str, np.ndarray]) -> None:
    """The default device's bits, a GPU's too, are those of every instruction set."""
    if instruction_set not in instruction_sets():
        pytest.skip(f"this processor has no {instruction_set}")
    code = "from tests.ffi.test_math import every_function; results.update(every_function())"
    there = bits_under(instruction_set, code)
    assert there.keys() == here.keys()
    for name, values in here.items():
        assert_same_bits(there[name], values)


def test_an_unknown_function_is_refused() -> None:
    x = jnp.zeros((1, 4), jnp.float32)
    with pytest.raises(Exception, match="there is no function 99"):
        out = call("math_probe", [x], [], [((4,), jnp.float32)], function=99, uniform=0)
        jax.block_until_ready(out)
