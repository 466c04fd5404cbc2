"""Puts a training run into the package: weights as bfloat16, model card, training log.

python -m tools.export_nano --run build/nano/run --corpus build/nano/corpus.json
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import Tokenizer

import hipjax

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "hipjax" / "assets" / "nano"
SYNTAX = ROOT / "benchmarks" / "results" / "nano-syntax.json"

CARD = """# The bundled model

A Flash-Next (`qwen4_exp_text`) of {parameters:.2f} million weights with all mechanisms of the
large one: {layers} layers of which {attention} attend, {streams} residual streams,
{experts} experts of which {chosen} are chosen plus a shared one, hashed n-gram embeddings,
sparse attention over {budget} selected tokens, and a multi-token-prediction head that was
trained jointly with the trunk and chained to depth 3. Context {context:,} tokens (trained on
windows of {length:,}), byte-level BPE vocabulary of {vocabulary:,}. It is there to try and to
test this library; what it writes has the form of text, not its sense.

## Training

`tools/train_nano.py` with this library's own model code and optax, on one {device}, seed
{seed}: {steps:,} steps of {sequences} windows, AdamW, peak rate {rate}, {warmup} steps of
warm-up, linear decay over the last {decay:.0%}. Genres were drawn {mix}. `training.json` has
the configuration, the plan and the loss curves.

## Held-out figures

Whole packages and modules that were never trained on, {windows} windows of {length:,} tokens a
genre, the exported (bfloat16-rounded) weights. Bits per byte of the trunk for the next token
and of the head for the token after it; how often the head's best token is the trunk's at depth
1, and at depth 2 and 3 given the tokens between.

| genre | trunk, bits per byte | head, bits per byte | depth 1 | depth 2 | depth 3 |
| --- | --- | --- | --- | --- | --- |
{figures}

Of {functions} held-out functions, given signature and doc string, the greedy continuation of 96
tokens is Python that parses as a whole for {whole_body_parses}, and up to some statement for
{some_statement_parses} (`{command}`, {date}). Greedy decoding soon repeats itself.

## Corpora

`python -m tools.nano_corpus` fetches and cuts them; nothing of them is in this repository.
Licences are those that the packages declare. Held-out parts are listed in `training.json`.

{sources}
"""


def card(
    log: dict[str, Any], corpus: dict[str, Any], syntax: dict[str, Any], parameters: int
) -> str:
    """The model card."""
    config, plan = log["config"], log["plan"]
    columns = (
        "trunk_bits_per_byte",
        "head_bits_per_byte",
        "draft_1_agrees",
        "draft_2_agrees",
        "draft_3_agrees",
    )
    figures = "\n".join(
        f"| {genre} | " + " | ".join(f"{values[column]:.3f}" for column in columns) + " |"
        for genre, values in log["heldout"].items()
    )
    return CARD.format(
        parameters=parameters / 1e6,
        layers=config["num_hidden_layers"],
        attention=config["layer_types"].count("indexed_attention"),
        streams=config["hc_count"],
        experts=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        budget=config["indexer_budget"],
        context=config["max_position_embeddings"],
        vocabulary=config["vocab_size"],
        device=log["device"],
        decay=plan["decay_share"],
        mix=", ".join(f"{share:.0%} {genre}" for genre, share in log["genres"].items()),
        windows=64,
        figures=figures,
        sources=_sources(corpus),
        **syntax,
        **{name: plan[name] for name in ("length", "seed", "steps", "sequences", "rate", "warmup")},
    )


def _sources(corpus: dict[str, Any]) -> str:
    """One table a genre: package, version, registry, licence, megabytes used."""
    by_genre: dict[str, list[str]] = defaultdict(list)
    for source in corpus["sources"]:
        row = [source[name] for name in ("package", "version", "registry", "licence")]
        row.append(f"{(source['bytes'] + source['heldout_bytes']) / 1e6:.2f}")
        by_genre[source["genre"]].append("| " + " | ".join(map(str, row)) + " |")
    head = "| package | version | registry | licence | MB |\n| --- | --- | --- | --- | --- |\n"
    return "\n\n".join(
        f"### {genre.capitalize()}\n\n{head}" + "\n".join(rows) for genre, rows in by_genre.items()
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    args = parser.parse_args()
    log = json.loads((args.run / "log.json").read_text())
    corpus = json.loads(args.corpus.read_text())
    leaves = {}
    for file in sorted(args.run.glob("params.*.npz")):
        leaves.update({name: jnp.asarray(x, jnp.bfloat16) for name, x in np.load(file).items()})
    hipjax.save(
        ASSETS,
        unflatten_dict(leaves, sep="."),
        config=hipjax.ModelConfig.from_dict(log["config"]),
        tokenizer=Tokenizer.from_file(str(ASSETS / "tokenizer.json")),
        overwrite=True,
    )
    parameters = sum(leaf.size for leaf in leaves.values())
    syntax = json.loads(SYNTAX.read_text())
    (ASSETS / "MODEL_CARD.md").write_text(card(log, corpus, syntax, parameters))
    record = log | {"corpus": {"arrays": corpus["arrays"], "heldout": corpus["heldout"]}}
    (ASSETS / "training.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
