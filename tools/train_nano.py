"""Trains the bundled model with the library's own model code.

    python -m tools.train_nano --data build/nano --out build/nano/run --steps 6000

Needs optax and a GPU; the corpora come from ``python -m tools.nano_corpus``. Writes
``params.*.npz`` (float32, in pieces), ``log.json`` (loss curves, final held-out figures,
configuration) and resumes from its own folder with ``--resume``.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.params import flat, init_params
from tools.nano_loss import Losses, forward, losses

GENRES = {"code": 0.45, "prose": 0.25, "structured": 0.30}

NANO = ModelConfig(
    vocab_size=2048,
    hidden_size=128,
    layer_types=(*("linear_attention",) * 3, "indexed_attention") * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    rope_theta=1e6,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    output_gate_type="sigmoid",
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=80,
    hc_count=4,
    hc_lowrank=32,
    ple_layer_ids=(2,),
    ple_embed_dim=128,
    heads_per_ngram=4,
    ngram_vocab_size_base=3000,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=4,
    indexer_n_heads=2,
    indexer_head_dim=32,
    indexer_budget=256,
    indexer_compress_ratio=4,
    eos_token_id=0,
    bos_token_id=0,
    pad_token_id=3,
    mtp_num_hidden_layers=1,
    mtp_rope_theta=1e6,
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train: all that the result depends on besides the corpora."""

    steps: int
    sequences: int = 16
    length: int = 2048
    rate: float = 5e-3
    warmup: int = 150
    decay_share: float = 0.6
    weight_decay: float = 0.05
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Learning rate: warm-up, constant, then linear to a fiftieth."""
        left = (self.steps - step) / (self.steps * self.decay_share)
        return self.rate * min((step + 1) / self.warmup, max(left, 0.02), 1.0)


def start_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Random start, with scales that suit a narrow model."""
    params = init_params(config, jax.random.key(seed))
    depth = (2 * config.num_hidden_layers) ** 0.5
    scales = {"embed_tokens": 10.0, "ngram_embedding": 10.0, "lm_head": 1.0}

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        names = [str(part.key) for part in path]
        if leaf.ndim < 2 or names[-2:] == ["conv1d", "weight"]:
            return leaf
        for name, factor in scales.items():
            if name in names:
                return leaf * factor
        factor = leaf.shape[-1] ** -0.5 / config.initializer_range
        if any(name in ("o_proj", "out_proj", "down_proj") for name in names):
            factor /= depth
        return leaf * factor

    return jax.tree_util.tree_map_with_path(scaled, params)


class Corpus:
    """Random windows of the genres' token arrays."""

    def __init__(self, folder: Path, kind: str) -> None:
        files = {genre: np.load(folder / f"{kind}_{genre}.npz") for genre in GENRES}
        self.tokens = {genre: file["tokens"] for genre, file in files.items()}
        self.bytes_per_token = {
            genre: float(file["bytes"]) / file["tokens"].size for genre, file in files.items()
        }

    def batch(self, rng: np.random.Generator, sequences: int, length: int) -> np.ndarray:
        """``sequences`` windows of ``length`` tokens, genres mixed by their shares."""
        genres = rng.choice(list(GENRES), size=sequences, p=list(GENRES.values()))
        return np.stack([self._window(rng, genre, length) for genre in genres])

    def _window(self, rng: np.random.Generator, genre: str, length: int) -> np.ndarray:
        tokens = self.tokens[genre]
        start = int(rng.integers(0, tokens.size - length))
        return tokens[start : start + length].astype(np.int32)

    def spread(self, genre: str, sequences: int, length: int) -> np.ndarray:
        """``sequences`` windows evenly spread over a genre, for evaluation."""
        tokens = self.tokens[genre]
        starts = np.linspace(0, tokens.size - length, sequences).astype(int)
        return np.stack([tokens[s : s + length] for s in starts]).astype(np.int32)


def make_step(config: ModelConfig, plan: Plan, remat: bool) -> tuple[Any, Any]:
    """The optimiser and the jitted training step."""

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    def optimiser(learning_rate: float) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(
                learning_rate, b1=0.9, b2=0.95, weight_decay=plan.weight_decay, mask=decayed
            ),
        )

    optimizer = optax.inject_hyperparams(optimiser)(learning_rate=plan.rate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array, offset: jax.Array, rate: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Losses]:
            parts = losses(params, tokens, offset, config=config, remat=remat)
            return parts.total(), parts

        (_, parts), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        state.hyperparams["learning_rate"] = rate
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, parts

    return optimizer, step


def evaluate(
    config: ModelConfig, params: Any, corpus: Corpus, length: int, sequences: int
) -> dict[str, dict[str, float]]:
    """Held-out figures per genre, teacher-forced.

    Bits per byte of the trunk, and how often the head's best token at depth 1, 2 and 3 is
    the trunk's, given that the drafts before it are the text's own tokens.
    """

    @jax.jit
    def measure(params: Any, tokens: jax.Array, offset: jax.Array) -> tuple[jax.Array, ...]:
        f = forward(params, tokens, offset, config=config, remat=False)
        logs = jax.nn.log_softmax(f.trunk)
        nats = -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1))
        best = ops.argmax(f.trunk)[0][:, 1:]
        hits = []
        for logits, mask in zip(f.drafts, f.masks, strict=True):
            same = (ops.argmax(logits)[0][:, :-1] == best) & mask[:-1]
            hits.append(jnp.sum(same) / (jnp.sum(mask[:-1]) * tokens.shape[0]))
        hard = jax.nn.log_softmax(f.drafts[0][:, :-1])
        head = -jnp.mean(jnp.take_along_axis(hard, tokens[:, 2:, None], axis=-1))
        return nats, head, *hits

    figures = {}
    for genre in GENRES:
        windows = corpus.spread(genre, sequences, length + 1)
        rows = [
            [float(x) for x in measure(params, windows[i : i + 8], jnp.int32(i))]
            for i in range(0, sequences, 8)
        ]
        nats, head, *hits = np.mean(rows, axis=0)
        per_byte = 1 / (np.log(2) * corpus.bytes_per_token[genre])
        figures[genre] = {
            "trunk_bits_per_byte": float(nats * per_byte),
            "head_bits_per_byte": float(head * per_byte),
            **{f"draft_{d + 1}_agrees": float(hit) for d, hit in enumerate(hits)},
        }
    return figures


def save_pieces(folder: Path, params: Any, pieces: int = 3) -> None:
    """Writes float32 parameters as ``pieces`` files of about the same size."""
    leaves = {name: np.asarray(leaf) for name, leaf in flat(params).items()}
    names = sorted(leaves, key=lambda name: -leaves[name].nbytes)
    for piece in range(pieces):
        np.savez(folder / f"params.{piece}.npz", **{n: leaves[n] for n in names[piece::pieces]})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--seconds", type=float, help="choose the steps that fit, once")
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--resume", type=Path, help="folder for what a later call resumes from")
    parser.add_argument("--remat", action="store_true", help="less memory, a third more time")
    args = parser.parse_args()
    began = time.monotonic()
    plan, config = Plan(steps=args.steps or 10**6), NANO
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(args.data, "train")
    optimizer, step = make_step(config, plan, args.remat)
    params = start_params(config, plan.seed)
    state = optimizer.init(params)
    last, curve = 0, []
    resume = args.resume / "state.npz" if args.resume else None
    if resume is not None and resume.exists():
        saved = np.load(resume, allow_pickle=False)
        leaves, structure = jax.tree.flatten((params, state))
        loaded = [jnp.asarray(saved[f"leaf{i}"]) for i in range(len(leaves))]
        params, state = jax.tree.unflatten(structure, loaded)
        last, curve = int(saved["step"]), json.loads(str(saved["curve"]))
        plan = dataclasses.replace(plan, steps=int(saved["steps"]))
    timed = 0.0
    while last < plan.steps and time.monotonic() - began < args.stop_after:
        rng = np.random.default_rng((plan.seed, last))
        tokens = corpus.batch(rng, plan.sequences, plan.length + 1)
        rate = jnp.float32(plan.rate_at(last))
        params, state, parts = step(params, state, tokens, jnp.int32(last), rate)
        last += 1
        if args.seconds and plan.steps == 10**6 and last in (5, 45):
            jax.block_until_ready(parts)
            each, timed = (time.monotonic() - timed) / 40, time.monotonic()
            if last == 45:
                plan = dataclasses.replace(plan, steps=int(args.seconds / each))
                print(f"{each * 1e3:.1f} ms a step, {plan.steps} steps", flush=True)
        if last % 50 == 0 or last == plan.steps:
            numbers = [round(float(x), 4) for x in jax.tree.leaves(parts)]
            curve.append([last, round(time.monotonic() - began, 1), *numbers])
            print(*curve[-1], flush=True)
    save_pieces(args.out, params)
    log: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "plan": dataclasses.asdict(plan),
        "genres": GENRES,
        "config": config.to_dict(),
        "steps_done": last,
        "curve_columns": "step seconds token draft1 draft2 draft3 balance index",
        "curve": curve,
    }
    if last < plan.steps and args.resume is not None:
        args.resume.mkdir(parents=True, exist_ok=True)
        leaves = {f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves((params, state)))}
        np.savez(
            args.resume / "state.npz",
            step=last,
            steps=plan.steps,
            curve=json.dumps(curve),
            **leaves,
        )
    if last == plan.steps:
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
        heldout = Corpus(args.data, "heldout")
        log["heldout"] = evaluate(config, rounded, heldout, plan.length, 64)
        print(json.dumps(log["heldout"], indent=1))
    (args.out / "log.json").write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
