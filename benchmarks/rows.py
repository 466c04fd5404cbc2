"""Products of 1 to 8 rows with weights of the real model's shapes, against XLA's dot.

    python -m benchmarks.rows [--shapes 10240x2560 …] [--out benchmarks/results/NAME.json]

One program multiplies the same rows with many different matrices one after the other, as the
layers of a model do, so that no matrix is still in a cache when its turn comes again. Kernel
and dot take turns in one process. Read bandwidth is measured in the same run. Row cost is
(time of R rows - time of one) / (R - 1) / time of one.
"""

import argparse
import datetime
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.report import machine, spread
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
ROWS = tuple(range(1, 9))


def read_bandwidth(gigabytes: float) -> float:
    """Bytes per second that this machine reads at best, of the ways tried here."""
    count = int(gigabytes * 2**30) // 4
    if jax.default_backend() == "cpu":
        return _host_bandwidth(count)
    x = jnp.ones((count // 2048, 2048), jnp.float32)
    total = jax.jit(lambda x: jnp.max(x, axis=1))
    copied = jax.jit(lambda x: x + 1.0)
    best = 0.0
    for program, passes in ((total, 1), (copied, 2)):
        program(x).block_until_ready()
        for _ in range(8):
            began = time.perf_counter()
            program(x).block_until_ready()
            best = max(best, passes * 4 * count / (time.perf_counter() - began))
    return best


def _host_bandwidth(count: int) -> float:
    threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(count, np.float32).view(np.int32), threads)
    best = 0.0
    for reduction in (np.maximum.reduce, np.bitwise_or.reduce, np.add.reduce):
        for _ in range(4):
            workers = [threading.Thread(target=reduction, args=(part,)) for part in parts]
            began = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            best = max(best, 4 * count / (time.perf_counter() - began))
    return best


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """What a user would otherwise call: XLA's dot, accumulating in float32."""
    return lax.dot_general(
        x.astype(weight.dtype), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def seconds_each(
    programs: dict[str, Callable[[], Any]], matrices: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds for one matrix, of every program, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for run in programs.values():
        jax.block_until_ready(run())
    for _ in range(repeats):
        for name, run in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append((time.perf_counter() - began) / matrices)
    return times


def _in_place(
    product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, weights: list[jax.Array]
) -> Callable[[], Any]:
    """All products as one program whose results stay where they were: XLA then launches the
    same recorded graph again, as it does in a decoding loop that donates its state."""
    run = jax.jit(
        lambda x, weights, _: [product(x, weight) for weight in weights],
        donate_argnums=2,
        keep_unused=True,
    )
    outs = [jnp.zeros((x.shape[0], weight.shape[0])) for weight in weights]

    def again() -> Any:
        nonlocal outs
        outs = run(x, weights, outs)
        return outs

    return again


def measure(shape: tuple[int, int], total_bytes: float, repeats: int, rows: tuple[int, ...]) -> Any:
    """Times of both products for every number of rows."""
    outputs, depth = shape
    each = 2 * outputs * depth
    count = max(3, min(96, int(total_bytes // each)))
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    weights = [make(jax.random.key(i)) for i in range(count)]
    programs: dict[str, Callable[[], Any]] = {}
    for r in rows:
        x = jax.random.normal(jax.random.key(r), (r, depth), jnp.float32)
        programs[f"kernel {r}"] = _in_place(ops.row_product, x, weights)
        programs[f"dot {r}"] = _in_place(dot, x, weights)
    times = seconds_each(programs, count, repeats)
    one = statistics.median(times["kernel 1"])
    found: dict[str, Any] = {"bytes": each, "matrices": count}
    for r in rows:
        kernel_times, dot_times = times[f"kernel {r}"], times[f"dot {r}"]
        median = statistics.median(kernel_times)
        found[str(r)] = {
            "kernel_us": spread([t * 1e6 for t in kernel_times]),
            "dot_us": spread([t * 1e6 for t in dot_times]),
            "dot_over_kernel": spread(
                [d / k for d, k in zip(dot_times, kernel_times, strict=True)]
            ),
            "bytes_per_second": each / median,
            "row_cost": 0.0 if r == 1 else (median - one) / (r - 1) / one,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cpu = jax.default_backend() == "cpu"
    limit = read_bandwidth(0.5 if cpu else 8.0)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "read_bandwidth": limit,
        "shapes": {},
    }
    print(f"read bandwidth {limit / 1e9:.1f} GB/s")
    for name in args.shapes:
        found = measure(SHAPES[name], 2e9 if cpu else 4e9, args.repeats, tuple(args.rows))
        report["shapes"][name] = found
        for r in args.rows:
            row = found[str(r)]
            print(
                f"{name:15} rows {r}: {row['kernel_us']['median']:9.2f} us "
                f"{row['bytes_per_second'] / limit:6.1%} of limit, "
                f"row cost {row['row_cost']:6.3f}, "
                f"dot / kernel {row['dot_over_kernel']['median']:.2f}",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
