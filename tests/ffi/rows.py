"""The promise of every kernel, as a check: a row's bits depend on that row alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.ffi.support import assert_same_bits

POISON = (np.nan, np.inf, 1e30, -np.inf, -1e30)
TILED = (9, 17, 33)


def drawn(seed: int, *shape: int) -> np.ndarray:
    """Normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def places(count: int) -> Iterable[int]:
    """Every position among up to eight rows; of more, those next to a tile's edge."""
    return range(count) if count <= 8 else sorted({0, 7, 8, count // 2, count - 1})


def check_rows(
    run: Callable[..., Any], items: Sequence[np.ndarray], counts: Iterable[int] = range(1, 9)
) -> None:
    """Row ``at`` of R rows equals the one-row call, whatever the other rows hold.

    ``run`` takes arrays with a leading axis of rows; ``items`` are its arguments for one row.
    """
    run = jax.jit(run)
    one = jax.tree.leaves(run(*(jnp.asarray(x[None]) for x in items)))
    for count in counts:
        for at in places(count):
            operands = []
            for x in items:
                rows = np.empty((count, *x.shape), x.dtype)
                for i in range(count):
                    rows[i] = POISON[(i + at) % len(POISON)]
                rows[at] = x
                operands.append(jnp.asarray(rows))
            for whole, alone in zip(jax.tree.leaves(run(*operands)), one, strict=True):
                assert_same_bits(whole[at], alone[0])


def check_close(got: Any, exact: np.ndarray, scale: np.ndarray | float, ulps: float = 16) -> None:
    """Within some float32 roundings of magnitude ``scale`` of the float64 value."""
    error = np.abs(np.asarray(got, np.float64) - exact)
    assert np.all(error <= ulps * 2.0**-24 * scale), (error / scale).max() * 2.0**24
