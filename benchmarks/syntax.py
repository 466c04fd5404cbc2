"""Does the bundled model's Python parse? Held-out functions, continued greedily.

    python -m benchmarks.syntax --heldout build/nano/heldout_code.npz [--out FILE.json]

The prompt is a function's signature and doc string; the continuation, 96 tokens, is cut at
the first line that leaves the function. Counted are the functions whose whole body parses,
and those that parse at least up to some statement.
"""

import argparse
import ast
import datetime
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import hipjax

_FUNCTION = re.compile(r'^ *def \w+\([^\n]*\):\n +"""[^"]*"""$', re.MULTILINE)
_PER_DOCUMENT = 4
_MOST = 60


def parses(source: str) -> bool:
    """Whether Python accepts the text."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def prompts(text: str) -> list[str]:
    """Signatures with doc strings, a few from each document."""
    found = []
    for document in text.split("<|endoftext|>"):
        heads = [textwrap.dedent(match.group(0)) for match in _FUNCTION.finditer(document)]
        found += [head for head in heads[:_PER_DOCUMENT] if parses(head)]
    return found[:_MOST]


def judged(prompt: str, continuation: str) -> tuple[bool, bool]:
    """Whether the whole body parses, and whether some first part of it does."""
    start = prompt.count("\n") + 1
    lines = (prompt + continuation).split("\n")[:-1]
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
        end += 1
    written = [n for n in range(start + 1, end + 1) if lines[n - 1].strip()]
    good = [n for n in written if parses("\n".join(lines[:n]) + "\n")]
    return bool(good) and good[-1] == written[-1], bool(good)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = hipjax.load_nano(dtype=jnp.float32)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(np.load(args.heldout)["tokens"].tolist(), skip_special_tokens=False)
    verdicts = []
    for prompt in prompts(text):
        result = hipjax.speculative_generate(
            model.params,
            None,
            tokenizer.encode(prompt).ids,
            config=model.config,
            max_new_tokens=96,
        )
        verdicts.append(judged(prompt, tokenizer.decode(result.tokens.tolist())))
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m benchmarks.syntax --heldout build/nano/heldout_code.npz",
        "functions": len(verdicts),
        "whole_body_parses": sum(whole for whole, _ in verdicts),
        "some_statement_parses": sum(some for _, some in verdicts),
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
