"""The examples in the docstrings of the public names run, and print what they say."""

import doctest
import importlib
import types

import pytest

MODULES = (
    "hipjax.model.load",
    "hipjax.model.nano",
    "hipjax.model.save",
    "hipjax.model.score",
    "hipjax.spec.generate",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_a_wrong_example_is_noticed() -> None:
    """Negative control."""
    module = types.ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert doctest.testmod(module, report=False).failed == 1
