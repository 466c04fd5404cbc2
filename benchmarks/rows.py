"""Products of 1 to 8 rows with weights of the real model's shapes, against XLA's dot.

    python -m benchmarks.rows [--shapes lm_head …] [--out benchmarks/results/NAME.json]

One program multiplies the same rows with many different matrices one after the other, as the
layers of a model do, so that no matrix is still in a cache when its turn comes again. Kernel
and dots take turns in one process: `dot` rounds the rows to bfloat16, which is the fastest that
XLA has and is not the same numbers; `exact dot` multiplies float32 rows with the widened
weights, as the kernel does. Read bandwidth is measured in the same run. Row cost is
(time of R rows - time of one) / (R - 1) / time of one.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.report import machine, spread
from benchmarks.timing import compile_all, looped, read_bandwidth, seconds_each
from hipjax.ffi import ops

SHAPES = {
    "lm_head": (248320, 2560),
    "q_proj": (12288, 2560),
    "in_proj_qkv": (10240, 2560),
    "in_proj_z": (6144, 2560),
    "out_proj": (2560, 6144),
    "hyper_down": (320, 10240),
    "hyper_up": (10240, 320),
    "expert_gate_up": (1280, 2560),
    "expert_down": (2560, 640),
}
CACHES = 5e8  # bytes, several times any cache


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """XLA's dot of rows rounded to the weights' dtype, accumulating in float32."""
    return lax.dot_general(
        x.astype(weight.dtype), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def exact_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """XLA's dot of the numbers that the kernel multiplies."""
    return lax.dot_general(
        x, weight.astype(jnp.float32), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )


PRODUCTS = {"kernel": ops.row_product, "dot": dot, "exact_dot": exact_dot}


def measure(
    shape: tuple[int, int],
    repeats: int,
    rows: list[int],
    products: dict[str, Callable[..., jax.Array]],
    exact: list[int],
) -> Any:
    """Times of the products for every number of rows; of the exact dot for those in ``exact``."""
    outputs, depth = shape
    each = 2 * outputs * depth
    count = max(1, min(32, int(CACHES // each)))
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    weights = [make(jax.random.key(i)) for i in range(count)]
    turns = 1 if jax.default_backend() == "cpu" else max(2, round(256 / count))
    programs = {}
    for r in rows:
        x = jax.random.normal(jax.random.key(r), (r, depth), jnp.float32)
        for name, product in products.items():
            if name != "exact_dot" or r in exact:
                programs[f"{name} {r}"] = looped(product, x, weights, turns)
    times = seconds_each(compile_all(programs), count * turns, repeats)
    one = statistics.median(times["kernel 1"])
    found: dict[str, Any] = {"bytes": each, "matrices": count, "turns": turns}
    for r in rows:
        ours = times[f"kernel {r}"]
        median = statistics.median(ours)
        found[str(r)] = {
            "kernel_us": spread([t * 1e6 for t in ours]),
            "bytes_per_second": each / median,
            "row_cost": 0.0 if r == 1 else (median - one) / (r - 1) / one,
        }
        for name in ("dot", "exact_dot"):
            if theirs := times.get(f"{name} {r}"):
                found[str(r)][f"{name}_us"] = spread([t * 1e6 for t in theirs])
                found[str(r)][f"{name}_over_kernel"] = spread(
                    [d / k for d, k in zip(theirs, ours, strict=True)]
                )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(range(1, 9)))
    parser.add_argument("--exact", nargs="*", type=int, default=[1, 4, 8])
    parser.add_argument("--alone", action="store_true", help="the kernel without any dot")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    products = {"kernel": ops.row_product} if args.alone else PRODUCTS
    limit = read_bandwidth()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.rows", *sys.argv[1:]]),
        "machine": machine(),
        "read_bandwidth": limit,
        "shapes": {},
    }
    print(f"read bandwidth {limit / 1e9:.1f} GB/s")
    for name in args.shapes:
        found = measure(SHAPES[name], args.repeats, args.rows, products, args.exact)
        report["shapes"][name] = found
        for r in args.rows:
            row = found[str(r)]
            beside = "".join(
                f", {other} / kernel {row[f'{other}_over_kernel']['median']:.2f}"
                for other in ("dot", "exact_dot")
                if f"{other}_over_kernel" in row
            )
            print(
                f"{name:15} rows {r}: {row['kernel_us']['median']:9.2f} us "
                f"{row['bytes_per_second'] / limit:6.1%} of limit, "
                f"row cost {row['row_cost']:6.3f}{beside}",
                flush=True,
            )
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
