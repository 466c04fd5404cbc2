"""Decoding the bundled model on this machine: plain, speculative, and by rows.

    python -m benchmarks.decode [--transformers] [--out benchmarks/results/NAME.json]

``--transformers`` runs Hugging Face's own ``generate`` on the same checkpoint and prompts,
alternating with this library in one process; it needs torch and transformers. Weights are
float32 on both sides, which is the bundled bfloat16 widened exactly. Compilation is kept
out of every figure. Figures are medians over repeats, with the range beside them.
"""

import argparse
import datetime
import json
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import hipjax
from benchmarks.report import machine, spread
from hipjax.ffi import ops
from hipjax.model.state import DecodeState
from hipjax.spec import generate

PROMPTS = {
    "code": 'import os\nimport sys\n\n\ndef read_file(path, encoding="utf-8"):\n'
    '    """Read a text file and return its content."""\n    with open(path',
    "prose": "The committee met again in the evening, and after some discussion it was agreed "
    "that the report should be",
    "structured": "<tool_call>\n"
    '{"name": "read_file", "arguments": {"path": "src/server/config.py", "start": 1}}\n'
    "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n",
}
NEW_TOKENS = 200
IMPLEMENTATIONS = ("kernel", "reference")


def window_times(
    model: hipjax.FlashNext, repeats: int, implementations: tuple[str, ...]
) -> dict[str, Any]:
    """Milliseconds of one whole window (drafts, verify, commit, head) by rows 1 to 8.

    The programs of all row counts, by kernels and by plain JAX, take turns. One row is given
    with the head kept level and without a head, which is plain decoding.
    """
    one = jnp.array([5], jnp.int32)
    budget = jnp.array([10**6], jnp.int32)
    stops = jnp.zeros(0, jnp.int32)
    rows = {"1 (no head)": (0, False)} | {str(k + 1): (k, True) for k in range(8)}
    cases = [(how, name) for how in implementations for name in rows]
    states = {case: DecodeState.init(model.config, 4096, head=rows[case[1]][1]) for case in cases}
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for repeat in range(repeats + 10):
        for case in cases:
            with ops.implementation(case[0]):
                began = time.perf_counter()
                states[case], *_, report = generate._window(
                    model.params,
                    states[case],
                    one,
                    budget,
                    stops,
                    config=model.config,
                    drafts=rows[case[1]][0],
                )
                report.block_until_ready()
                if repeat >= 10:
                    times[case].append(1e3 * (time.perf_counter() - began))
    return {how: {name: spread(times[how, name]) for name in rows} for how in implementations}


def hipjax_runs(
    model: hipjax.FlashNext, ids: list[int], implementations: tuple[str, ...]
) -> dict[str, Callable[[], Any]]:
    """One call of this library per way to decode."""

    def plain(how: str = "kernel") -> hipjax.Result:
        return hipjax.generate(
            model.params,
            None,
            ids,
            config=model.config,
            max_new_tokens=NEW_TOKENS,
            implementation=how,
        )

    def speculative(k: int, how: str = "kernel") -> hipjax.Result:
        return hipjax.speculative_generate(
            model.params,
            None,
            ids,
            config=model.config,
            speculation=hipjax.SpeculationConfig(mtp_k=k),
            max_new_tokens=NEW_TOKENS,
            implementation=how,
        )

    runs: dict[str, Callable[[], Any]] = {"plain": plain}
    runs |= {f"mtp_k={k}": (lambda k=k: speculative(k)) for k in (1, 2, 3, 5, 7)}
    if "reference" in implementations:
        runs["plain, reference"] = lambda: plain("reference")
        runs["mtp_k=3, reference"] = lambda: speculative(3, "reference")
    return runs


def transformers_run(ids: list[int]) -> Callable[[], np.ndarray]:
    """Hugging Face's greedy ``generate`` on the bundled checkpoint."""
    import torch
    from transformers import Qwen4ExpForCausalLM

    folder = Path(hipjax.__file__).parent / "assets" / "nano"
    reference = Qwen4ExpForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([ids])

    def run() -> np.ndarray:
        with torch.no_grad():
            out = reference.generate(
                prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=3
            )
        return out[0, len(ids) :].numpy()

    return run


def decode_rates(
    model: hipjax.FlashNext,
    repeats: int,
    transformers: bool,
    implementations: tuple[str, ...],
) -> dict[str, Any]:
    """Tokens per second by genre and way to decode, all ways taking turns.

    The figure is all tokens over the wall time of the whole call, prompt included, for
    every side alike.
    """
    assert model.tokenizer is not None
    figures: dict[str, Any] = {}
    for genre, text in PROMPTS.items():
        ids = model.tokenizer.encode(text).ids
        runs = hipjax_runs(model, ids, implementations)
        if transformers:
            runs["transformers"] = transformers_run(ids)
        for run in runs.values():
            run()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        last: dict[str, Any] = {}
        for _ in range(repeats):
            for name, run in runs.items():
                began = time.perf_counter()
                last[name] = run()
                seconds[name].append(time.perf_counter() - began)
        tokens = last["plain"].tokens
        figures[genre] = {"prompt_tokens": len(ids), "new_tokens": len(tokens)}
        for name in runs:
            entry: dict[str, Any] = {
                "tokens_per_second": spread([len(tokens) / s for s in seconds[name]])
            }
            pairs = zip(seconds["plain"], seconds[name], strict=True)
            entry["speed_up_over_plain"] = spread([plain / own for plain, own in pairs])
            own_tokens = last[name] if name == "transformers" else last[name].tokens
            same = np.array_equal(own_tokens, tokens)
            entry["ids_equal_plain"] = bool(same)
            if name != "transformers":
                stats = last[name].stats
                entry["tokens_per_window"] = round(stats.tokens_per_window, 3)
                entry["accepted_by_depth"] = stats.accepted_by_depth
                entry["drafted_by_depth"] = stats.drafted_by_depth
            figures[genre][name] = entry
    return figures


def host_overhead(model: hipjax.FlashNext, windows: dict[str, Any], repeats: int) -> Any:
    """Milliseconds per window that a request adds to the program of its windows (k = 3)."""
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(PROMPTS["code"]).ids
    run = hipjax_runs(model, ids, ("kernel",))["mtp_k=3"]
    each = []
    for _ in range(repeats):
        stats = run().stats
        each.append(1e3 * stats.decode_seconds / stats.windows - windows["kernel"]["4"]["median"])
    return spread(each)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--kernels-only", action="store_true", help="leave plain JAX out")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = hipjax.load_nano(dtype=jnp.float32)
    implementations = IMPLEMENTATIONS[:1] if args.kernels_only else IMPLEMENTATIONS
    windows = window_times(model, 20 * args.repeats, implementations)
    result = {
        "what": "bundled model, float32 weights, bfloat16 cache, batch 1",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": " ".join(["python -m benchmarks.decode", *sys.argv[1:]]),
        "machine": machine(),
        "repeats": args.repeats,
        "window_ms_by_rows": windows,
        "host_ms_per_window": host_overhead(model, windows, args.repeats),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "decode": decode_rates(model, args.repeats, args.transformers, implementations),
    }
    if args.transformers:
        result["machine"] |= {name: version(name) for name in ("torch", "transformers")}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
