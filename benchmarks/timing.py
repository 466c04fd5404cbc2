"""How programs are timed here: bandwidth of the same run, loops on the device, taking turns."""

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Program = Callable[[], Any]


def read_bandwidth() -> float:
    """Bytes per second that this machine reads at best, of the ways tried here."""
    if jax.default_backend() == "cpu":
        return _host_bandwidth(1 << 27)
    count = 1 << 31
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


def looped(
    function: Callable[..., Any],
    x: jax.Array,
    operands: Sequence[Any],
    turns: int,
) -> Callable[[], Program]:
    """A program that calls ``function(x, operand)`` for all operands, ``turns`` times over.

    Everything happens on the device: a loop whose body calls the function for one operand after
    the other, as the layers of a step do. The rows of a turn depend on the turn before, so that
    no call can be moved out of the loop. One turn needs no loop, and none of the copies that XLA
    makes of what a loop reads. Returns what compiles the program.
    """

    def run(x: jax.Array, operands: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            rows, _ = carry
            outs = [function(rows, operand) for operand in operands]
            last = jax.tree.leaves(outs[-1])[0].reshape(-1)[0]
            return rows + (0 * last).astype(rows.dtype), outs

        if turns == 1:
            return [function(x, operand) for operand in operands]
        shapes = [jax.eval_shape(function, x, operand) for operand in operands]
        outs = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return lax.fori_loop(0, turns, body, (x, outs))[1]

    def compiled() -> Program:
        program = jax.jit(run).lower(x, operands).compile()
        return lambda: program(x, operands)

    return compiled


def compile_all(programs: dict[str, Callable[[], Program]]) -> dict[str, Program]:
    """Compiles side by side, since that takes longer than running."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        ready = list(pool.map(lambda make: make(), programs.values()))
    return dict(zip(programs, ready, strict=True))


def seconds_each(programs: dict[str, Program], calls: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of one of a program's ``calls``, of every program, taking turns.

    A turn is two runs, the second of them timed: what the program before has left behind (memory
    to give back, cores that have slowed down) is not this one's time.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    for run in programs.values():
        jax.block_until_ready(run())
    for _ in range(repeats):
        for name, run in programs.items():
            jax.block_until_ready(run())
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append((time.perf_counter() - began) / calls)
    return times
