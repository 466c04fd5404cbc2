"""The whole network against transformers' ``Qwen4ExpForCausalLM``, both reading the same files.

Needs the environment of ``.ci/run`` that has torch; without it this module fails to import, on
purpose: a comparison that quietly does not run would look like one that passed.

The tolerance is about three times what transformers itself moves when the same float32 numbers
are summed in another order (cached against uncached, float32 against float64: up to 9e-6 here).
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import Qwen4ExpForCausalLM

import hipjax
from hipjax.model.config import ModelConfig
from tests.tiny import (
    TINY,
    TINY_TWO_PLE,
    Config,
    Tensors,
    prompt_ids,
    random_tensors,
    text_config,
)
from tools.make_goldens import CASES, TOLERANCE, Case, differences, run_reference

# The matrices are tiny: more threads only wait for each other.
torch.set_num_threads(1)

# One compiled program for the weights of all seeds.
scored = jax.jit(hipjax.logits, static_argnames=("config", "chunk", "cache_dtype"))

LENGTHS = (1, 2, 13, 40, 97)
CHUNKS = (1, 7, 64)
LIVE_CASES = [case for case in CASES if not case.layers]
BOTH_CONFIGS = pytest.mark.parametrize("config", [TINY, TINY_TWO_PLE], ids=["tiny", "two_ple"])


def write_checkpoint(directory: Path, config: Config, tensors: Tensors) -> Path:
    """A checkpoint directory as a user would download it, in one shard."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def read_tensors(directory: Path) -> Tensors:
    """All tensors of a checkpoint directory, whatever its number of shards."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def load_reference(directory: Path) -> Qwen4ExpForCausalLM:
    """The transformers model of a checkpoint, and a check that it took every tensor it knows."""
    model, report = Qwen4ExpForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.eval()


def flat(params: Any) -> dict[str, Any]:
    """The leaves of nested params by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_identical(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        ours, theirs = np.asarray(found[name]), np.asarray(value)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        assert ours.tobytes() == theirs.tobytes(), name


def deviation(model: Any, ids: np.ndarray, expected: np.ndarray, chunk: int) -> float:
    """Largest absolute difference of our logits from the expected ones."""
    logits = scored(
        model.params,
        jnp.asarray(ids),
        config=model.config,
        chunk=chunk,
        cache_dtype=jnp.float32,
    )
    assert logits.dtype == jnp.float32
    assert logits.shape == expected.shape
    return float(np.abs(np.asarray(logits) - expected).max())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Writes the checkpoint of a case once, and returns where it is."""
    root = tmp_path_factory.mktemp("checkpoints")

    def path(case: Case) -> Path:
        directory = root / case.name
        if not directory.exists():
            write_checkpoint(directory, case.config, random_tensors(case.config, case.seed))
        return directory

    return path


@pytest.fixture(scope="module", params=LIVE_CASES, ids=lambda case: case.name)
def pair(
    request: pytest.FixtureRequest, checkpoint: Callable[[Case], Path]
) -> tuple[Case, Qwen4ExpForCausalLM, Any]:
    """A case with both implementations loaded from the same directory."""
    directory = checkpoint(request.param)
    return request.param, load_reference(directory), hipjax.load(directory)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_agree(pair: tuple[Case, Qwen4ExpForCausalLM, Any], length: int, chunk: int) -> None:
    case, reference, model = pair
    ids = prompt_ids(case.config, case.seed, length)
    expected = run_reference(reference, ids)
    assert expected.std() > 0.5
    assert deviation(model, ids, expected, chunk) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "model.hyper_connection_mixer.hc_norm.weight",
        "model.layers.0.attn_hyper_connection.hc_norm.weight",
        "model.layers.1.linear_attn.norm.weight",
        "model.layers.1.ple.norm_conv.weight",
        "model.layers.3.self_attn.q_norm.weight",
    ],
)
def test_a_slightly_wrong_weight_is_noticed(
    name: str, checkpoint: Callable[[Case], Path], tmp_path: Path
) -> None:
    """The negative control of `test_logits_agree`: one norm entry off by 0.01 must fail it."""
    case = LIVE_CASES[0]
    tensors = random_tensors(case.config, case.seed)
    wrong = tensors[name].copy()
    wrong[3] += 1e-2
    directory = write_checkpoint(tmp_path / "wrong", case.config, tensors | {name: wrong})
    ids = prompt_ids(case.config, case.seed, 40)
    expected = run_reference(load_reference(checkpoint(case)), ids)
    assert deviation(hipjax.load(checkpoint(case)), ids, expected, 64) <= TOLERANCE
    assert deviation(hipjax.load(directory), ids, expected, 64) > TOLERANCE


@BOTH_CONFIGS
def test_config_is_read_as_by_transformers(config: Config, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", config, random_tensors(config, 0))
    model, expected = hipjax.load(directory), load_reference(directory).config
    assert model.config == ModelConfig.from_dict(config)
    assert model.config == ModelConfig.from_dict(text_config(config))
    for field in dataclasses.fields(ModelConfig):
        # What transformers has no such field for belongs to the head or to RoPE.
        if hasattr(expected, field.name) and field.name != "eos_token_id":
            theirs = getattr(expected, field.name)
            theirs = tuple(theirs) if isinstance(theirs, list) else theirs
            assert getattr(model.config, field.name) == theirs, field.name


@BOTH_CONFIGS
def test_every_layout_of_a_checkpoint_loads_to_the_same(config: Config, tmp_path: Path) -> None:
    """Fused or single experts, text-only or multimodal names, nested or plain config."""
    trees = []
    for prefix in ("model.", "model.language_model."):
        for fused in (True, False):
            for contents in (config, text_config(config)):
                tensors = random_tensors(config, 0, fused_experts=fused, prefix=prefix)
                directory = write_checkpoint(tmp_path / str(len(trees)), contents, tensors)
                trees.append(flat(hipjax.load(directory).params))
    for tree in trees[1:]:
        assert_identical(tree, trees[0])


@BOTH_CONFIGS
@pytest.mark.parametrize("head", [True, False], ids=["mtp", "no_mtp"])
def test_round_trip_through_both_is_exact(config: Config, head: bool, tmp_path: Path) -> None:
    """transformers writes, hipjax reads and writes, transformers reads.

    transformers drops the ``mtp.*`` tensors but keeps the fields that announce them. The test
    puts the tensors back, or else withdraws the fields.
    """
    tensors = random_tensors(config, 0)
    mtp = {name: value for name, value in tensors.items() if name.startswith("mtp.")}
    original = load_reference(write_checkpoint(tmp_path / "original", config, tensors))
    saved = tmp_path / "transformers"
    original.save_pretrained(saved)
    if head:
        both = read_tensors(saved) | mtp
        save_file(both, saved / "model.safetensors", metadata={"format": "pt"})
    else:
        contents = json.loads((saved / "config.json").read_text())
        del contents["mtp"]
        (saved / "config.json").write_text(json.dumps(contents | {"mtp_num_hidden_layers": 0}))

    model = hipjax.load(saved)
    hipjax.save(tmp_path / "hipjax", model.params, config=model.config)

    again = load_reference(tmp_path / "hipjax")
    assert_identical(again.state_dict(), original.state_dict())
    written = read_tensors(tmp_path / "hipjax")
    kept = {name: value for name, value in written.items() if name.startswith("mtp.")}
    assert_identical(kept, mtp if head else {})
    assert hipjax.load(tmp_path / "hipjax").config == model.config


def test_goldens_are_current() -> None:
    """One case; ``python -m tools.make_goldens --check`` compares them all."""
    traced = next(case for case in CASES if case.layers)
    assert differences(traced) == []
    # The same file must not pass for other weights.
    assert differences(dataclasses.replace(traced, seed=traced.seed + 1)) != []
