"""Float64 NumPy reference for the MTP draft head, one row at a time.

Written from the model specification alone (its section 5, and the ordinary attention layer of its
section 3). It shares no code with hipjax and none of it was read while writing this file, so
agreement between the two is evidence about both. Keep it that way: import nothing from hipjax here,
and settle a disagreement from the specification, not by copying one side into the other.

Everything is float64 and nothing is rounded in between (RoPE frequencies included). Block keys are
recomputed from the raw index keys for every row; only K, V and raw index keys are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Selection(NamedTuple):
    """What one row attended to."""

    tokens: tuple[int, ...]
    """Ascending head-row indices."""
    gap: float
    """Lowest kept block score minus highest dropped one; inf when no block was dropped."""


def sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    p: Array = e / e.sum()
    return p


def rms(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm over the last axis with the (1 + w) scale."""
    scale: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x / scale * (1.0 + weight)


def rope(x: Array, position: int, rotary_dim: int, theta: float) -> Array:
    """Rotate the first rotary_dim entries of the last axis, pairing i with i + rotary_dim / 2."""
    half = rotary_dim // 2
    angle = position * theta ** (-2.0 * np.arange(half, dtype=np.float64) / rotary_dim)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[..., :half], x[..., half:rotary_dim]
    rotated = [first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]]
    return np.concatenate(rotated, axis=-1)


def top_indices(scores: Array, count: int) -> list[int]:
    """Return the count highest entries, best first, equal ones by lower index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


class HeadReference:
    """The draft head of one sequence. position_offset is added to every RoPE position."""

    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, ArrayLike], position_offset: int = 0
    ) -> None:
        found = [name for name in weights if name.startswith("mtp.")]
        if len(found) != 31:
            raise ValueError(f"{len(found)} mtp tensors, expected 31 (experts fused)")
        used = [*found, "model.embed_tokens.weight", "lm_head.weight"]
        self._w: dict[str, Array] = {n: np.asarray(weights[n]).astype(np.float64) for n in used}
        c = config["text_config"]
        self.hidden, self.streams, self.eps = c["hidden_size"], c["hc_count"], c["rms_norm_eps"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim, self.theta = c["head_dim"], float(c["mtp"]["rope_theta"])
        self.rotary_dim = int(self.head_dim * c["rope_parameters"]["partial_rotary_factor"])
        self.index_heads, self.index_dim = c["indexer_n_heads"], c["indexer_head_dim"]
        self.block = c["indexer_compress_ratio"]
        self.kept_blocks = c["indexer_budget"] // self.block
        self.top_k, self.norm_topk = c["num_experts_per_tok"], c.get("norm_topk_prob", True)
        self.position_offset = position_offset
        self.keys: list[Array] = []
        self.values: list[Array] = []
        self.index_keys: list[Array] = []
        self._selections: list[Selection] = []

    def __len__(self) -> int:
        return len(self.keys)

    def rows(
        self, tokens: Sequence[int], carries: ArrayLike, first_position: int
    ) -> tuple[Array, Array, Array]:
        """Append rows (tokens[t], carries[t]); return (carry_out [T, D], hidden [T, H], logits)."""
        width, vocab = self.streams * self.hidden, self._w["lm_head.weight"].shape[0]
        wide = np.asarray(carries).astype(np.float64)
        if wide.shape != (len(tokens), width):
            raise ValueError(f"carries {wide.shape}, expected {(len(tokens), width)}")
        if first_position != len(self):
            raise ValueError(f"first_position {first_position}, but {len(self)} rows are present")
        if not all(0 <= token < vocab for token in tokens):
            raise ValueError("token id outside the vocabulary")
        carry_out = np.empty((len(tokens), width))
        hidden = np.empty((len(tokens), self.hidden))
        logits = np.empty((len(tokens), vocab))
        for t, token in enumerate(tokens):
            carry_out[t], hidden[t] = self._row(int(token), wide[t])
            logits[t] = self._w["lm_head.weight"] @ hidden[t]
        return carry_out, hidden, logits

    def chain(
        self, token: int, carry: ArrayLike, position: int, depth: int
    ) -> list[tuple[int, Array]]:
        """Greedy drafts with their logits; all depth rows stay until the caller truncates."""
        drafts: list[tuple[int, Array]] = []
        wide = np.asarray(carry).astype(np.float64)[None]
        for step in range(depth):
            wide, _, logits = self.rows([token], wide, position + step)
            token = int(np.argmax(logits[0]))  # the first maximum, so the lowest id on ties
            drafts.append((token, logits[0]))
        return drafts

    def truncate(self, length: int) -> None:
        """Drop the rows with index >= length."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot truncate {len(self)} rows to {length}")
        del self.keys[length:], self.values[length:]
        del self.index_keys[length:], self._selections[length:]

    def selected_tokens(self, row: int) -> tuple[int, ...]:
        """Return the head rows that this row attended to, ascending."""
        return self._selections[row].tokens

    def selection_gap(self, row: int) -> float:
        """How far the block selection of this row was from a tie (inf: nothing dropped)."""
        return self._selections[row].gap

    def _under(self, prefix: str) -> dict[str, Array]:
        return {n.removeprefix(prefix): w for n, w in self._w.items() if n.startswith(prefix)}

    def _row(self, token: int, carry: Array) -> tuple[Array, Array]:
        w = self._w
        embedding = w["model.embed_tokens.weight"][token]
        e = rms(embedding, w["mtp.pre_fc_norm_embedding.weight"], self.eps)
        # One RMS over all D values here, unlike every hc_norm.
        c = rms(carry, w["mtp.pre_fc_norm_hidden.weight"], self.eps)
        x = c.reshape(self.streams, self.hidden) @ w["mtp.fc_hidden.weight"].T
        x = x + w["mtp.fc_embedding.weight"] @ e
        for name, block in (("attn", self._attention), ("mlp", self._moe)):
            prefix = f"mtp.layers.0.{name}_hyper_connection."
            mixed, normed = self._mix(x, prefix)
            inject = w[prefix + "block_inject_weight.weight"] @ normed
            x = x + np.outer(2.0 * sigmoid(inject / self.streams), block(mixed))
        return x.reshape(-1), self._mix(x, "mtp.hyper_connection_mixer.")[0]

    def _mix(self, x: Array, prefix: str) -> tuple[Array, Array]:
        """Gated mean of the normed streams [H], and the normed streams themselves [D]."""
        w = self._under(prefix)
        n = rms(x, w["hc_norm.weight"].reshape(x.shape), self.eps).reshape(-1)
        low = silu(w["input_mix_weight_down.weight"] @ n / self.streams)
        gate = sigmoid(w["input_mix_weight_up.weight"] @ low)
        return (gate * n).reshape(x.shape).mean(axis=0), n

    def _attention(self, m: Array) -> Array:
        w = self._under("mtp.layers.0.self_attn.")
        position = len(self) + self.position_offset
        q_gate = (w["q_proj.weight"] @ m).reshape(self.heads, 2 * self.head_dim)
        q, gate = q_gate[:, : self.head_dim], q_gate[:, self.head_dim :]
        k = (w["k_proj.weight"] @ m).reshape(self.kv_heads, self.head_dim)
        v = (w["v_proj.weight"] @ m).reshape(self.kv_heads, self.head_dim)
        q = self._rope(rms(q, w["q_norm.weight"], self.eps), position)
        k = self._rope(rms(k, w["k_norm.weight"], self.eps), position)
        index = (w["indexer.index_qk_proj.weight"] @ m).reshape(-1, self.index_dim)
        index_q = rms(index[: self.index_heads], w["indexer.q_layernorm.weight"], self.eps)
        self.keys.append(k)
        self.values.append(v)
        self.index_keys.append(index[self.index_heads])
        selection = self._select(self._rope(index_q, position), w["indexer.k_layernorm.weight"])
        self._selections.append(selection)
        out = np.empty((self.heads, self.head_dim))
        for head in range(self.heads):
            shared = head // (self.heads // self.kv_heads)
            keys = np.stack([self.keys[i][shared] for i in selection.tokens])
            values = np.stack([self.values[i][shared] for i in selection.tokens])
            out[head] = softmax(keys @ q[head] / np.sqrt(self.head_dim)) @ values
        return w["o_proj.weight"] @ (out * sigmoid(gate)).reshape(-1)

    def _select(self, index_q: Array, key_norm: Array) -> Selection:
        """QSA for the newest row: the best complete blocks, and always the incomplete tail."""
        visible, size = len(self.index_keys), self.block
        blocks = visible // size
        scores = np.empty(blocks)
        for b in range(blocks):
            mean = np.mean(self.index_keys[b * size : (b + 1) * size], axis=0)
            key = self._rope(rms(mean, key_norm, self.eps), b * size + self.position_offset)
            scores[b] = np.maximum(index_q @ key, 0.0).sum() / np.sqrt(self.index_dim)
        order = top_indices(scores, blocks)
        kept, dropped = order[: self.kept_blocks], order[self.kept_blocks :]
        tokens = [b * size + i for b in sorted(kept) for i in range(size)]
        gap = float(scores[kept[-1]] - scores[dropped[0]]) if dropped else np.inf
        return Selection((*tokens, *range(blocks * size, visible)), gap)

    def _rope(self, x: Array, position: int) -> Array:
        return rope(x, position, self.rotary_dim, self.theta)

    def _moe(self, m: Array) -> Array:
        w = self._under("mtp.layers.0.mlp.")
        p = softmax(w["gate.weight"] @ m)
        chosen = top_indices(p, self.top_k)
        total = p[chosen].sum() if self.norm_topk else 1.0
        out = np.zeros(self.hidden)
        for e in chosen:
            gate, up = np.split(w["experts.gate_up_proj"][e] @ m, 2)
            out += p[e] / total * (w["experts.down_proj"][e] @ (silu(gate) * up))
        gate, up = (w[f"shared_expert.{n}_proj.weight"] @ m for n in ("gate", "up"))
        shared = w["shared_expert.down_proj.weight"] @ (silu(gate) * up)
        return out + sigmoid(w["shared_expert_gate.weight"] @ m) * shared
