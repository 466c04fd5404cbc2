"""Every kernel call of one step of the real model, by itself: bytes, time, share of the limit.

    python -m benchmarks.families [--rows 1 4 8] [--out benchmarks/results/NAME.json]

The calls are taken from the program of a step at the released model's configuration, so their
shapes, dtypes and attributes are those of the model, and so is how often each comes. Each is
timed in a loop over copies that are together larger than any cache. Bytes are those that the
call has to read and write; of experts and of cached rows only the chosen ones. Rows of a window
choose some experts in common: a row keeps each of the row before with probability `--overlap`.
"""

import argparse
import collections
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from benchmarks.report import machine, spread
from benchmarks.timing import Program, compile_all, looped, read_bandwidth, seconds_each
from hipjax.ffi.ops import implementation
from hipjax.model.config import ModelConfig
from hipjax.model.params import init_params
from hipjax.model.state import DecodeState
from hipjax.model.trunk import trunk_logits, trunk_rows

CONFIG = ModelConfig.from_file(Path(__file__).parent.parent / "tests/configs/flash_next.json")
CONTEXT = 32768
CHOSEN, BLOCKS, TOKENS = 10, 512, 2051
CACHES = 5e8  # bytes, several times any cache
COPIES = 32


def calls(rows: int) -> dict[str, tuple[int, Any]]:
    """The distinct kernel calls of a verify step and its commit, and how often each comes."""
    params = jax.eval_shape(lambda key: init_params(CONFIG, key), jax.random.key(0))
    stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    state = jax.eval_shape(lambda: DecodeState.init(CONFIG, CONTEXT))

    def one(params: Any, tokens: Any, state: Any) -> Any:
        tape = trunk_rows(params, tokens, state, config=CONFIG)
        kept = jnp.full(1, rows, jnp.int32)
        return trunk_logits(params, tape.streams, config=CONFIG), tape.commit(kept)

    with implementation("kernel"):
        whole = jax.make_jaxpr(one)(stored, jax.ShapeDtypeStruct((1, rows), jnp.int32), state)
    found: dict[str, tuple[int, Any]] = {}
    for equation in _equations(whole.jaxpr):
        if equation.primitive.name == "ffi_call":
            name = _name(equation)
            found[name] = (found.get(name, (0,))[0] + 1, equation)
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _name(equation: Any) -> str:
    """The operation, and for products the sizes of their matrices."""
    operation = equation.params["target_name"].removeprefix("hipjax_")
    if operation != "row_products":
        return operation
    sizes = collections.Counter(
        "x".join(map(str, v.aval.shape)) for v in equation.invars if v.aval.dtype == jnp.bfloat16
    )
    return "row_products " + " + ".join(f"{n} × {s}" if n > 1 else s for s, n in sizes.items())


def choices(rng: np.random.Generator, rows: int, overlap: float) -> np.ndarray:
    """[rows, CHOSEN]: experts, distinct within a row, shared between neighbours."""
    found = np.zeros((rows, CHOSEN), np.int32)
    for row in range(rows):
        before = found[row - 1] if row else np.zeros(0, np.int32)
        kept = before[rng.random(len(before)) < overlap]
        others = np.setdiff1d(np.arange(CONFIG.num_experts), before)
        new = rng.choice(others, CHOSEN - len(kept), replace=False)
        found[row] = rng.permutation(np.concatenate([kept, new]))
    return found


class Operands:
    """Operands of a call's copies, and the bytes that the call has to move."""

    def __init__(
        self, equation: Any, rows: int, overlap: float, experts: dict[int, jax.Array]
    ) -> None:
        self.operation = _name(equation).split()[0]
        self.avals = [v.aval for v in equation.invars]
        self.results = [v.aval for v in equation.outvars]
        self.rows, self.overlap = rows, overlap
        self.experts = experts  # the weights of all of them, made once for all numbers of rows
        self.rng = np.random.default_rng(rows)
        self.distinct: list[int] = []

    def copy(self, number: int) -> tuple[jax.Array, ...]:
        return tuple(self._operand(i, number) for i in range(len(self.avals)))

    def _operand(self, i: int, number: int) -> jax.Array:
        shape, dtype = self.avals[i].shape, self.avals[i].dtype
        if dtype == jnp.int32:
            return jnp.asarray(self._integers(i, shape), jnp.int32)
        if self.operation == "expert_rows" and i >= 5:
            if i not in self.experts:
                one = _random(jax.random.key(i), shape[1:], dtype)
                self.experts[i] = jnp.tile(one, (shape[0], 1, 1))
            return self.experts[i]
        return _random(jax.random.key(1000 * number + i), shape, dtype)

    def _integers(self, i: int, shape: tuple[int, ...]) -> Any:
        if self.operation == "expert_rows":
            chosen = choices(self.rng, self.rows, self.overlap)
            self.distinct.append(len(np.unique(chosen)))
            return chosen
        last = CONTEXT - 2 * self.rows
        if self.operation == "attend" and i == 3:
            drawn = [self.rng.choice(last // 4, BLOCKS, replace=False) for _ in range(self.rows)]
            return np.sort(drawn)[None]
        if self.operation == "attend" and i == 4:
            return np.full(shape, BLOCKS)
        if self.operation == "delta_commit":
            return np.full(shape, self.rows)
        if self.operation == "block_keys":
            return np.full(shape, last // 4 * 4)
        return last + np.arange(self.rows).reshape(shape)  # positions

    def bytes(self) -> float:
        sizes = [a.size * a.dtype.itemsize for a in self.avals]
        if self.operation == "expert_rows":
            sizes[5:] = [statistics.mean(self.distinct) * sum(sizes[5:]) / CONFIG.num_experts]
        if self.operation == "attend":
            sizes[1:3] = [2 * self.rows * TOKENS * self.avals[1].shape[1] * 256 * 2]
        return sum(sizes) + sum(a.size * a.dtype.itemsize for a in self.results)


def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if dtype == jnp.uint16:  # bits of bfloat16
        bits = jax.random.normal(key, shape, jnp.bfloat16)
        return jax.lax.bitcast_convert_type(bits, jnp.uint16)
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    # Small weights, as a model's are: activations that explode leave subnormal numbers behind.
    return (0.02 if dtype == jnp.bfloat16 else 1.0) * jax.random.normal(key, shape, dtype)


def program(equation: Any, operands: Operands) -> tuple[Callable[[], Program], int]:
    """What compiles the loop of a call, and how many calls it makes."""
    size = sum(a.size * a.dtype.itemsize for a in operands.avals)
    count = int(min(COPIES, max(2, CACHES // size + 1)))
    if operands.operation == "expert_rows":
        count = COPIES
    copies = [operands.copy(number) for number in range(count)]
    turns = 1 if jax.default_backend() == "cpu" else max(2, round(256 / count))

    def run(first: jax.Array, rest: tuple[jax.Array, ...]) -> Any:
        return equation.primitive.bind(first, *rest, **equation.params)

    return looped(run, copies[0][0], [copy[1:] for copy in copies], turns), count * turns


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 8])
    parser.add_argument("--overlap", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", help="operations")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    limit = read_bandwidth()
    all_calls = {rows: calls(rows) for rows in args.rows}
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.families", *sys.argv[1:]]),
        "machine": machine(),
        "read_bandwidth": limit,
        "overlap": args.overlap,
        "families": {},
    }
    print(f"read bandwidth {limit / 1e9:.1f} GB/s")
    for name, (often, _) in all_calls[args.rows[0]].items():
        if args.only and name.split()[0] not in args.only:
            continue
        experts: dict[int, jax.Array] = {}
        operands = {r: Operands(all_calls[r][name][1], r, args.overlap, experts) for r in args.rows}
        made = {str(r): program(all_calls[r][name][1], operands[r]) for r in args.rows}
        compiled = compile_all({r: make for r, (make, _) in made.items()})
        times = seconds_each(compiled, 1, args.repeats)
        entry: dict[str, Any] = {"calls": often}
        one = statistics.median(times[str(args.rows[0])]) / made[str(args.rows[0])][1]
        for r in args.rows:
            each = [t / made[str(r)][1] for t in times[str(r)]]
            median, moved = statistics.median(each), operands[r].bytes()
            entry[str(r)] = {
                "us": spread([1e6 * t for t in each]),
                "bytes": moved,
                "of_read_bandwidth": moved / median / limit,
                "row_cost": 0.0 if r == 1 else (median - one) / (r - 1) / one,
            }
            if operands[r].distinct:
                entry[str(r)]["distinct_experts"] = statistics.mean(operands[r].distinct)
            print(
                f"{often:3} {name:50} rows {r}: {moved / 1e6:8.2f} MB {1e6 * median:8.2f} us "
                f"{moved / median / limit:6.1%} of limit, row cost {entry[str(r)]['row_cost']:.3f}",
                flush=True,
            )
        report["families"][name] = entry
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
