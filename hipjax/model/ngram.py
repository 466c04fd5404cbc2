"""Which rows of the n-gram table a token reads: exact hashing without 64-bit integers.

Source: model-spec section 3.3. The hash multiplies token ids by 46-bit constants, xors
the products and takes the result modulo a prime. JAX has no 64-bit integers by default,
so a product is kept as two 32-bit limbs and reduced a few bits at a time.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from hipjax.typing import Array, Int

if TYPE_CHECKING:
    from hipjax.model.config import ModelConfig

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class NgramTable:
    """Hash constants of one PLE layer.

    Attributes:
      multipliers: one odd constant per position of the n-gram, newest token first.
      sizes: per hash head, the prime number of rows that the head may address.
      offsets: per hash head, the first of its rows in the shared table.
      rows: rows of the table, padding included.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


def ngram_table(config: "ModelConfig", index: int) -> NgramTable:
    """Derives the constants of the ``index``-th PLE layer from the configuration."""
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    half = max(1, ((2**63 - 1) // config.vocab_size) // 2)
    start = config.seed + 10007 * index
    multipliers = tuple(
        2 * (_splitmix64((start + (i + 1) * _GAMMA) & _MASK64) % half) + 1
        for i in range(config.ngram_size)
    )
    primes = itertools.islice(
        _primes_from(config.ngram_vocab_size_base), index * heads, (index + 1) * heads
    )
    sizes = tuple(primes)
    offsets = tuple(itertools.accumulate(sizes, initial=0))
    unit = config.make_ngram_vocab_size_divisible_by
    return NgramTable(multipliers, sizes, offsets[:-1], -(-offsets[-1] // unit) * unit)


def row_ids(
    tokens: Int[Array, "B T"],
    history: Int[Array, "B past"],
    table: NgramTable,
    *,
    eos: int,
    heads_per_ngram: int,
) -> Int[Array, "B T heads"]:
    """Rows of the n-gram table that every token reads.

    Args:
      tokens: the tokens, all in ``[0, vocabulary)``.
      history: the ``ngram_size - 1`` tokens before them, oldest first; ``eos`` where the
        sequence had not begun.
      table: hash constants.
      eos: the id that ends a segment: an n-gram does not reach across it.
      heads_per_ngram: hash heads of each n-gram order.

    Returns:
      int32 rows, order 2 (bigrams) first; equal to the 64-bit computation.
    """
    order = len(table.multipliers)
    length = tokens.shape[1]
    whole = jnp.concatenate([history, tokens], axis=1)
    context = [tokens]
    cut = jnp.zeros(tokens.shape, bool)
    for back in range(1, order):
        earlier = whole[:, order - 1 - back : order - 1 - back + length]
        cut = cut | (earlier == eos)
        context.append(jnp.where(cut, eos, earlier))
    products = [_times(c, m) for c, m in zip(context, table.multipliers, strict=True)]
    high, low = products[0]
    rows = []
    for n in range(1, order):
        high, low = high ^ products[n][0], low ^ products[n][1]
        heads = slice((n - 1) * heads_per_ngram, n * heads_per_ngram)
        sizes = np.array(table.sizes[heads], np.uint32)
        offsets = np.array(table.offsets[heads], np.uint32)
        rows.append(_modulo(high[..., None], low[..., None], sizes) + offsets)
    return jnp.concatenate(rows, axis=-1).astype(jnp.int32)


def _times(ids: Int[Array, "B T"], constant: int) -> tuple[Array, Array]:
    """``ids * constant`` as (high, low) 32-bit limbs, from 16-bit partial products."""
    a = ids.astype(jnp.uint32)
    a0, a1 = a & 0xFFFF, a >> 16
    high = a * np.uint32(constant >> 32)
    b0, b1 = np.uint32(constant & 0xFFFF), np.uint32((constant >> 16) & 0xFFFF)
    p00, p01, p10, p11 = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = (p00 >> 16) + (p01 & 0xFFFF) + (p10 & 0xFFFF)
    low = (p00 & 0xFFFF) | (middle << 16)
    return high + p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16), low


def _modulo(high: Array, low: Array, sizes: np.ndarray) -> Array:
    """``(high * 2**32 + low) mod sizes``: the low limb enters a few bits at a time.

    A remainder below ``sizes`` may be shifted by as many bits as keep it under 2**32.
    """
    step = 32 - int(sizes.max()).bit_length()
    remainder = high % sizes
    left = 32
    while left:
        bits = min(step, left)
        left -= bits
        piece = (low >> left) & np.uint32((1 << bits) - 1)
        remainder = ((remainder << bits) | piece) % sizes
    return remainder


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _primes_from(start: int) -> Iterator[int]:
    for candidate in itertools.count(max(start, 2)):
        if all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            yield candidate
