"""Write, or check, the logits and layer outputs of transformers that the tests compare with.

Run from the repository root in an environment with torch and transformers::

    python -m tools.make_goldens            # write tests/goldens/*.npz
    python -m tools.make_goldens --check    # recompute and compare with the stored files

The reference is ``Qwen4ExpForCausalLM`` in float32 with eager attention and experts, without a
cache, on the weights of ``tests.tiny.random_tensors``. A golden is worth storing only if another
correct implementation must agree with it, so a case is refused when a float32 rounding could
change a discrete choice: which blocks the sparse attention keeps, or which experts are routed to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tests.tiny import TINY, TINY_TWO_PLE, Config, Tensors, prompt_ids, random_tensors, text_config

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
LENGTH = 97
TRACE_LENGTH = 40
MIN_INDEX_GAP = 1e-4
MIN_ROUTER_GAP = 1e-5
TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden file: which weights and prompt it is made from, and how much it stores."""

    name: str
    config: Config
    seed: int
    layers: bool = False

    @property
    def path(self) -> Path:
        """The stored file."""
        return GOLDENS / f"{self.name}.npz"

    @property
    def length(self) -> int:
        """Number of prompt tokens."""
        return TRACE_LENGTH if self.layers else LENGTH


CASES = (
    Case("tiny-0", TINY, 0),
    Case("tiny-1", TINY, 1),
    Case("tiny-2", TINY, 2),
    Case("two_ple-0", TINY_TWO_PLE, 0),
    Case("two_ple-1", TINY_TWO_PLE, 1),
    Case("tiny-0-layers", TINY, 0, layers=True),
)


def build_reference(config: Config, tensors: Tensors) -> Qwen4ExpForCausalLM:
    """The transformers model with the given weights (fused experts, prefix ``"model."``)."""
    model = Qwen4ExpForCausalLM._from_config(
        Qwen4ExpTextConfig(**text_config(config)),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    state: dict[str, torch.Tensor] = {}
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in tensors.items():
        table, is_shard, number = name.removesuffix(".weight").partition(".shard_")
        if is_shard:
            shards.setdefault(table, {})[int(number)] = torch.tensor(value)
        elif not name.startswith("mtp."):
            state[name] = torch.tensor(value)
    for table, parts in shards.items():
        state[f"{table}.weight"] = torch.cat([parts[number] for number in sorted(parts)])
    model.load_state_dict(state, strict=True)
    return model.eval()


class _TopKGaps(TorchFunctionMode):
    """Records how far the last kept entry of every ``topk`` lies above the first dropped one."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: str | None = None
        self.gaps: dict[str, list[float]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk) and self.owner is not None:
            values, count = args[0], args[1] if len(args) > 1 else kwargs["k"]
            if count < values.shape[-1]:
                ordered = values.detach().sort(dim=-1, descending=True).values
                gap = (ordered[..., count - 1] - ordered[..., count]).min().item()
                self.gaps.setdefault(self.owner, []).append(gap)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _hooks(model: Qwen4ExpForCausalLM, out: Tensors, gaps: _TopKGaps) -> Iterator[None]:
    """Store module outputs in ``out`` and tell ``gaps`` whose ``topk`` it sees."""
    handles: list[Any] = []

    def keep(name: str, module: torch.nn.Module, pick: Callable[[Any], torch.Tensor]) -> None:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            value = pick(output).detach().squeeze(0)
            out[name] = value.numpy().copy()

        handles.append(module.register_forward_hook(hook))

    def watch(name: str, module: torch.nn.Module) -> None:
        def enter(_module: torch.nn.Module, _args: Any) -> None:
            gaps.owner = name

        def leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
            gaps.owner = None

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))

    def keep_router(name: str, module: torch.nn.Module) -> None:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            _, weights, experts = output
            order = experts.argsort(dim=-1)
            out[f"{name}.experts"] = experts.gather(-1, order).to(torch.int32).numpy()
            out[f"{name}.weights"] = weights.gather(-1, order).numpy()

        handles.append(module.register_forward_hook(hook))

    def keep_rows(name: str, table: torch.nn.Module) -> None:
        def hook(_module: torch.nn.Module, args: Any) -> None:
            out[name] = args[0].squeeze(0).to(torch.int32).numpy()

        handles.append(table.register_forward_pre_hook(hook))

    for number, layer in enumerate(model.model.layers):
        name = f"layers.{number}"
        keep(f"{name}.streams", layer, lambda output: output)
        keep(f"{name}.attn_mixed", layer.attn_hyper_connection, lambda output: output[0])
        keep(f"{name}.attn_injection", layer.attn_hyper_connection, lambda output: output[2])
        keep(f"{name}.mlp_mixed", layer.mlp_hyper_connection, lambda output: output[0])
        keep(f"{name}.mlp_injection", layer.mlp_hyper_connection, lambda output: output[2])
        keep(f"{name}.moe", layer.mlp, lambda output: output)
        keep_router(f"{name}.router", layer.mlp.gate)
        watch(f"{name}.router", layer.mlp.gate)
        if layer.ple is not None:
            keep(f"{name}.ple", layer.ple, lambda output: output)
            keep_rows(f"{name}.ple_rows", layer.ple.ple_embedding.ngram_embedding)
        if layer.layer_type == "linear_attention":
            keep(f"{name}.deltanet", layer.linear_attn, lambda output: output)
        else:
            keep(f"{name}.attention", layer.self_attn, lambda output: output[0])
            keep(f"{name}.selected", layer.self_attn.indexer, lambda output: output.squeeze(1))
            watch(f"{name}.indexer", layer.self_attn.indexer)
    keep("mixed", model.model.hyper_connection_mixer, lambda output: output)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_reference(model: Qwen4ExpForCausalLM, ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] float32 of the token ids [T], in one pass without a cache."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor(ids, dtype=torch.long)[None], use_cache=False)
    return output.logits[0].numpy()


def trace_reference(
    model: Qwen4ExpForCausalLM, ids: np.ndarray
) -> tuple[np.ndarray, Tensors, dict[str, float]]:
    """Logits, every intermediate by name, and the smallest top-k gap of every router and indexer.

    Stream states keep the flat layout of the reference, ``stream * hidden + channel``. An indexer
    that never had to drop a block is absent from the gaps.
    """
    intermediates: Tensors = {}
    gaps = _TopKGaps()
    with _hooks(model, intermediates, gaps), gaps:
        logits = run_reference(model, ids)
    return logits, intermediates, {name: min(values) for name, values in gaps.gaps.items()}


def _smallest_gap(gaps: dict[str, float], kind: str, minimum: float, owners: list[str]) -> float:
    for owner in owners:
        name = f"{owner}.{kind}"
        if name not in gaps:
            raise AssertionError(f"{name}: nothing was ever dropped")
        if gaps[name] <= minimum:
            raise AssertionError(f"{name}: gap {gaps[name]:.2e} at the cut, need > {minimum:.0e}")
    return min(gaps[f"{owner}.{kind}"] for owner in owners)


def compute(case: Case) -> dict[str, np.ndarray]:
    """The contents of one golden file.

    Raises:
        AssertionError: a choice of the case is too close to call, or nothing was pruned.
    """
    model = build_reference(case.config, random_tensors(case.config, case.seed))
    ids = prompt_ids(case.config, case.seed, case.length)
    logits, intermediates, gaps = trace_reference(model, ids)
    layers = [f"layers.{number}" for number in range(len(model.model.layers))]
    attention = [name for name in layers if f"{name}.selected" in intermediates]
    visible = np.tril(np.ones((case.length, case.length), bool))
    for name in attention:
        selected = intermediates[f"{name}.selected"]
        if (selected & ~visible).any() or not (visible & ~selected).any():
            raise AssertionError(f"{name}: expected a strict subset of the visible tokens")
    contents = {
        "ids": ids,
        "logits": logits,
        "seed": np.int64(case.seed),
        "index_gap": np.float64(_smallest_gap(gaps, "indexer", MIN_INDEX_GAP, attention)),
        "router_gap": np.float64(_smallest_gap(gaps, "router", MIN_ROUTER_GAP, layers)),
        "versions": np.array(
            [f"{module.__name__} {module.__version__}" for module in (torch, transformers)]
        ),
    }
    return contents | (intermediates if case.layers else {})


def differences(case: Case) -> list[str]:
    """How the stored file of a case differs from a fresh computation; empty if it is current.

    Float values may differ by the rounding of another machine's torch; the recorded versions and
    gaps are not compared.
    """
    fresh = compute(case)
    with np.load(case.path) as file:
        stored = dict(file)
    lone = sorted(fresh.keys() ^ stored.keys())
    found = [f"{case.name}: {name} is only in one of the two" for name in lone]
    for name in sorted(fresh.keys() & stored.keys() - {"versions", "index_gap", "router_gap"}):
        old, new = stored[name], fresh[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            found.append(f"{case.name}: {name} has another shape or dtype")
        elif np.issubdtype(old.dtype, np.floating):
            worst = float(np.abs(old - new).max())
            if not worst <= TOLERANCE:
                found.append(f"{case.name}: {name} differs by {worst:.2e}")
        elif not np.array_equal(old, new):
            found.append(f"{case.name}: {name} differs")
    return found


def main() -> None:
    """Command line: write all cases, or check them and exit with 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored files")
    check = parser.parse_args().check
    torch.set_num_threads(1)  # the matrices are tiny: more threads only wait for each other
    if check:
        found = [line for case in CASES for line in differences(case)]
        print("\n".join(found) or f"{len(CASES)} files are current")
        raise SystemExit(bool(found))
    GOLDENS.mkdir(exist_ok=True)
    for case in CASES:
        contents = compute(case)
        np.savez_compressed(case.path, **contents)
        print(
            f"{case.name}: logit std {contents['logits'].std():.3f}, "
            f"index gap {contents['index_gap']:.2e}, router gap {contents['router_gap']:.2e}, "
            f"{case.path.stat().st_size} bytes"
        )


if __name__ == "__main__":
    main()
