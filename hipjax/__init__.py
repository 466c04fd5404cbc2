"""Exact speculative decoding of Qwen3.8-Flash-Next in JAX, with the model's own MTP head."""

from hipjax.model.config import ConfigError, ModelConfig
from hipjax.model.load import FlashNext, load
from hipjax.model.nano import load_nano
from hipjax.model.params import init_params
from hipjax.model.save import save
from hipjax.model.score import logits
from hipjax.model.tensorfile import CheckpointError
from hipjax.spec.config import SamplingConfig, SpeculationConfig
from hipjax.spec.generate import (
    Result,
    Window,
    generate,
    plain_stream,
    speculative_generate,
    speculative_stream,
)
from hipjax.spec.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "FlashNext",
    "ModelConfig",
    "Result",
    "SamplingConfig",
    "SpeculationConfig",
    "Stats",
    "Window",
    "generate",
    "init_params",
    "load",
    "load_nano",
    "logits",
    "plain_stream",
    "save",
    "speculative_generate",
    "speculative_stream",
]
