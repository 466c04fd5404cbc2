"""Hashing of n-grams on the device against whole 64-bit integers on the host."""

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipjax.ffi import ops
from hipjax.model.config import ModelConfig
from hipjax.model.ngram import NgramTable, ngram_table, row_ids
from hipjax.model.ple import PLE, NgramTableWeight
from hipjax.model.state import PLEState
from tests.model import support as model_support
from tests.tiny import TINY, TINY_TWO_PLE, ngram_buffers

REAL = Path(__file__).parent.parent / "configs" / "flash_next.json"
EOS = 248044

# Model-spec 3.3: rows of hash heads 0, 7, 8 and 15 for a fresh sequence.
VECTOR = {
    5: (15389869, 155458159, 179763390, 315720898),
    7: (12441580, 156012011, 169119442, 314484167),
    EOS: (10204458, 158727320, 176298516, 319927855),
    9: (18043673, 144330141, 176817901, 307951937),
    11: (10041117, 150044571, 163654473, 303242927),
}
PRIMES = (
    *(20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077),
    *(20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171),
)


@pytest.fixture(scope="module")
def real() -> NgramTable:
    return ModelConfig.from_file(REAL).ngram_table(0)


def host_rows(
    tokens: list[int], history: list[int], table: NgramTable, eos: int, heads_per_ngram: int
) -> np.ndarray:
    """Row ids [T, heads] by model-spec 3.3 in Python's integers, one token at a time."""
    whole, order = [*history, *tokens], len(table.multipliers)
    rows = []
    for at in range(len(history), len(whole)):
        context = [whole[at]]
        for back in range(1, order):
            nearest = [whole[at - b] if at >= b else eos for b in range(1, back + 1)]
            context.append(eos if eos in nearest else nearest[-1])
        row = []
        for n in range(2, order + 1):
            mixed = 0
            for c, m in zip(context[:n], table.multipliers, strict=False):
                mixed ^= c * m
            assert mixed < 2**63
            for head in range((n - 2) * heads_per_ngram, (n - 1) * heads_per_ngram):
                row.append(mixed % table.sizes[head] + table.offsets[head])
        rows.append(row)
    return np.array(rows, np.int64)


def device_rows(
    tokens: list[int], history: list[int], table: NgramTable, eos: int, heads_per_ngram: int
) -> np.ndarray:
    ids, past = (jnp.array([values], jnp.int32) for values in (tokens, history))
    found = row_ids(ids, past, table, eos=eos, heads_per_ngram=heads_per_ngram)
    assert found.dtype == jnp.int32
    return np.asarray(found[0])


def test_real_constants(real: NgramTable) -> None:
    assert real.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert real.sizes == PRIMES
    assert real.offsets == tuple(itertools.accumulate(PRIMES, initial=0))[:-1]
    assert (real.offsets[15], sum(real.sizes), real.rows) == (300001275, 320001446, 320001536)


def test_real_vector(real: NgramTable) -> None:
    assert not jax.config.jax_enable_x64
    rows = device_rows(list(VECTOR), [EOS, EOS], real, EOS, 8)
    assert rows[:, [0, 7, 8, 15]].tolist() == [list(row) for row in VECTOR.values()]


def test_real_vector_has_teeth(real: NgramTable) -> None:
    """Negative control: a wrong history, and the constants of the next PLE layer."""
    expected = [row[0] for row in VECTOR.values()]
    other = device_rows(list(VECTOR), [EOS, 0], real, EOS, 8)[:, 0]
    assert other[0] != expected[0]
    assert other[1:].tolist() == expected[1:]
    second = ngram_table(ModelConfig.from_file(REAL), 1)
    assert not set(second.sizes) & set(real.sizes)
    assert not set(second.multipliers) & set(real.multipliers)


@pytest.mark.parametrize(("config", "index"), [(TINY, 0), (TINY_TWO_PLE, 0), (TINY_TWO_PLE, 1)])
def test_tiny_constants(config: dict[str, object], index: int) -> None:
    """Against the buffers that the checkpoints carry, and transformers checks."""
    table, stored = ModelConfig.from_dict(config).ngram_table(index), ngram_buffers(config, index)
    assert table.multipliers == tuple(stored["layer_multipliers"].tolist())
    assert table.sizes == tuple(stored["ngram_heads_vocab_sizes"].tolist())
    assert table.offsets == tuple(stored["ngram_heads_offsets"].tolist())
    assert table.rows >= sum(table.sizes) > table.rows - 10


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, dict[str, Any], int, int]:
    """Tokens with many end-of-sequence ids, where to split them, constants, eos, heads.

    The constants stay a dict here: checking the annotations of ``NgramTable`` draws random
    numbers, which hypothesis forbids within a strategy.
    """
    vocabulary = draw(st.integers(2, 2**20) | st.sampled_from([2, 248320, 2**20]))
    order, heads = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    largest = 2 * (((2**63 - 1) // vocabulary) // 2) - 1
    multipliers = tuple(
        draw(st.integers(0, largest // 2).map(lambda m: 2 * m + 1)) for _ in range(order)
    )
    size = st.integers(2, 2**28) | st.sampled_from([2, 3, 20000171, 2**28 - 57])
    sizes = tuple(draw(size) for _ in range((order - 1) * heads))
    offsets = tuple(itertools.accumulate(sizes, initial=0))[:-1]
    if sum(sizes) >= 2**31:
        offsets = (0,) * len(sizes)
    eos = draw(st.integers(0, vocabulary - 1))
    token = st.integers(0, vocabulary - 1) | st.sampled_from([eos, vocabulary - 1])
    # Few lengths: each is a compilation.
    tokens = draw(st.lists(token, min_size=12, max_size=12))
    constants = {"multipliers": multipliers, "sizes": sizes, "offsets": offsets, "rows": 0}
    return tokens, draw(st.sampled_from([1, 2, 7])), constants, eos, heads


@settings(max_examples=40)
@given(cases())
def test_equals_whole_integers(case: tuple[list[int], int, dict[str, Any], int, int]) -> None:
    tokens, split, constants, eos, heads = case
    table = NgramTable(**constants)
    order = len(table.multipliers)
    start = [eos] * (order - 1)
    expected = host_rows(tokens, start, table, eos, heads)
    np.testing.assert_array_equal(device_rows(tokens, start, table, eos, heads), expected)
    # A sequence that is resumed anywhere reads the same rows.
    history = (start + tokens[:split])[-(order - 1) :]
    resumed = device_rows(tokens[split:], history, table, eos, heads)
    np.testing.assert_array_equal(resumed, expected[split:])


@pytest.mark.parametrize("split", range(1, 12))
def test_split_anywhere_at_real_size(real: NgramTable, split: int) -> None:
    tokens = [5, EOS, EOS, 7, 9, 11, EOS, 248319, 0, EOS, 3, 4]
    whole = device_rows(tokens, [EOS, EOS], real, EOS, 8)
    np.testing.assert_array_equal(whole, host_rows(tokens, [EOS, EOS], real, EOS, 8))
    history = [EOS, EOS, *tokens[:split]][-2:]
    resumed = device_rows(tokens[split:], history, real, EOS, 8)
    np.testing.assert_array_equal(resumed, whole[split:])
    if tokens[split - 1] != EOS:
        wrong = device_rows(tokens[split:], [EOS, EOS], real, EOS, 8)
        assert not np.array_equal(wrong, resumed)


def test_rows_of_a_batch_do_not_mix(real: NgramTable) -> None:
    sequences, pasts = [[5, 7, EOS], [9, 11, 13]], [[EOS, EOS], [2, 3]]
    both = row_ids(jnp.array(sequences), jnp.array(pasts), real, eos=EOS, heads_per_ngram=8)
    for row, tokens, past in zip(both, sequences, pasts, strict=True):
        np.testing.assert_array_equal(row, host_rows(tokens, past, real, EOS, 8))


def test_largest_head_reaches_no_further_than_int32(real: NgramTable) -> None:
    assert real.rows < 2**31
    assert all(size < 2**28 and math.gcd(size, 2) == 1 for size in real.sizes)


def test_rows_of_a_narrow_table() -> None:
    """A float8 table is widened exactly; its one scale multiplies what the rows become."""
    narrow = jnp.arange(12.0).reshape(6, 2).astype(jnp.float8_e4m3fn)
    scale, rows = jnp.float32(0.37), jnp.array([[[5, 0], [2, 2]]])
    module = NgramTableWeight(rows=6, width=2, scale=1.0)
    given = {"params": {"weight": narrow, "weight_scale": scale}}
    found = module.apply(given, rows)
    np.testing.assert_array_equal(found, np.asarray(narrow).astype(np.float32)[np.asarray(rows)])
    assert module.apply(given, method=lambda module: module.weight_scale) == scale


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
def test_scale_of_a_narrow_table(implementation: str) -> None:
    """The block of a scaled table is that of the table times the scale."""
    config = ModelConfig.from_dict(TINY)
    index = next(i for i in range(config.num_hidden_layers) if config.ple_index(i) is not None)
    weights = model_support.model("tiny")[1]["model"]["layers"][str(index)]["ple"]
    table = weights["ple_embedding"]["ngram_embedding"]["weight"].astype(jnp.float8_e4m3fn)
    shape = (1, 5, config.hc_count, config.hidden_size)
    streams = jax.random.normal(jax.random.key(0), shape)
    tokens = jnp.array([[3, 4, 5, 6, 7]])

    def added(**embedding: jax.Array) -> np.ndarray:
        block = weights | {"ple_embedding": {"ngram_embedding": embedding}}
        with ops.implementation(implementation):
            out, _ = PLE(config, 0).apply({"params": block}, streams, tokens, state)
        return np.asarray(out - streams)

    state = PLEState.init(config, 1)
    scale = jnp.float32(0.37)
    wide = added(weight=table.astype(jnp.float32) * scale)
    np.testing.assert_allclose(added(weight=table, weight_scale=scale), wide, atol=1e-5)
    assert not np.allclose(added(weight=table), wide, atol=1e-5)


def test_same_with_x64() -> None:
    """A program that turns 64-bit integers on reads the same rows."""
    code = (
        "import jax; jax.config.update('jax_enable_x64', True)\n"
        "from tests.model.test_ngram import *\n"
        "table = ModelConfig.from_file(REAL).ngram_table(0)\n"
        "rows = device_rows(list(VECTOR), [EOS, EOS], table, EOS, 8)\n"
        "assert rows[:, [0, 7, 8, 15]].tolist() == [list(row) for row in VECTOR.values()]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
