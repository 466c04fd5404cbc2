"""Puts a training run's weights into the package as bfloat16.

    python -m tools.export_nano --run build/nano/run
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import Tokenizer

import hipjax

ASSETS = Path(__file__).parents[1] / "hipjax" / "assets" / "nano"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    args = parser.parse_args()
    config = hipjax.ModelConfig.from_dict(json.loads((args.run / "log.json").read_text())["config"])
    leaves = {}
    for file in sorted(args.run.glob("params.*.npz")):
        leaves.update({name: jnp.asarray(x, jnp.bfloat16) for name, x in np.load(file).items()})
    params = unflatten_dict(leaves, sep=".")
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    hipjax.save(ASSETS, params, config=config, tokenizer=tokenizer, overwrite=True)


if __name__ == "__main__":
    main()
