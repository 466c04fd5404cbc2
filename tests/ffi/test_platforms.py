"""The same bits on a GPU as on the CPU, for the whole bundled model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hipjax
from hipjax.ffi.registration import verdict
from hipjax.model.state import DecodeState
from hipjax.model.trunk import trunk_logits, trunk_rows

TOKENS = 64


def has_gpu() -> bool:
    return jax.default_backend() == "gpu" and verdict("gpu").kernels


def greedy(device: jax.Device, rows: int, recurrent: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits and tokens of a greedy text whose prompt is decoded by rows as well."""
    model = hipjax.load_nano()
    config = model.config
    params = jax.device_put(model.params, device)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("def fibonacci(n):\n").ids

    @jax.jit
    def advance(state: DecodeState, tokens: jax.Array) -> tuple[DecodeState, jax.Array]:
        tape = trunk_rows(params, tokens, state, config=config)
        kept = jnp.full((1,), tokens.shape[1], jnp.int32)
        return tape.commit(kept), trunk_logits(params, tape.streams, config=config)

    with jax.default_device(device):
        state = DecodeState.init(config, 256, head=False, recurrent=recurrent)
        found, tokens = [], list(prompt)
        while len(tokens) < len(prompt) + TOKENS:
            done = sum(map(len, found))
            piece = tokens[done : done + (rows if done + rows <= len(prompt) else 1)]
            state, logits = advance(state, jnp.array([piece], jnp.int32))
            found.append(np.asarray(logits[0]))
            if done + len(piece) == len(tokens):
                tokens.append(int(np.argmax(found[-1][-1])))
    return np.concatenate(found), np.array(tokens)


@pytest.mark.parametrize("recurrent", ["float32", "q8"])
def test_logits_have_the_same_bits(recurrent: str) -> None:
    if not has_gpu():
        pytest.skip("there is no GPU that kernels run on")
    gpu, cpu = jax.devices()[0], jax.devices("cpu")[0]
    logits, tokens = greedy(gpu, 4, recurrent)
    wanted, same_tokens = greedy(cpu, 1, recurrent)
    np.testing.assert_array_equal(tokens, same_tokens)
    np.testing.assert_array_equal(logits.view(np.int32), wanted.view(np.int32))


def test_a_step_by_rows_has_the_bits_of_single_steps() -> None:
    """The same on one device, prompt rows by four and one by one."""
    device = jax.devices()[0]
    by_four, tokens = greedy(device, 4, "float32")
    singly, same_tokens = greedy(device, 1, "float32")
    np.testing.assert_array_equal(tokens, same_tokens)
    np.testing.assert_array_equal(by_four.view(np.int32), singly.view(np.int32))
