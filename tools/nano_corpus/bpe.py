"""Trains the byte-level BPE tokenizer of the nano model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|fim|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Words take the character before them along and digits stand alone.  Line ends join the
# punctuation before them and the indentation after them, except for its last blank, which
# belongs to the next word: a line of code then costs few tokens at this vocabulary size.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+(?:[ \t]+(?=[ \t]))?)?"
    r"|\s*[\r\n]+(?:[ \t]+(?=[ \t]))?|\s+(?!\S)|\s+"
)

ROUND_TRIP = (
    "plain text",
    "tabs\tand\r\nCRLF\r\n\r\n",
    "    indented\n\t\tmixed \t \n",
    "Grüße, naïve Œuvre",
    "日本語とスペース　全角",
    "العربية עברית हिन्दी",
    "emoji \U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \u2705",
    "\u0000\u0001\ufeff\u200b",
    "don't we'll 1234567 3.14e-10",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
    " ",
    "\n",
    "e\u0301 vs \u00e9",
    '<tool_call>\n{"name": "x"}\n</tool_call>',
    "a\u2028b\u2029c\u0085d",
)


def train(texts: Iterable[str], path: Path) -> Tokenizer:
    """Train on ``texts``, save to ``path`` and return the tokenizer as loaded from there.

    The trainer can only reserve the first ids for special tokens, whereas the tags of tool calls
    have to survive decoding; their flag is cleared in the saved file.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL, *TAGS],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    loaded = Tokenizer.from_file(str(path))
    check(loaded)
    return loaded


def check(tokenizer: Tokenizer) -> None:
    """Raise if the vocabulary is not the promised one or decoding loses text."""
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} entries")
    for number, token in enumerate((*SPECIAL, *TAGS)):
        if tokenizer.token_to_id(token) != number:
            raise ValueError(f"{token} has id {tokenizer.token_to_id(token)}, not {number}")
    for text in ROUND_TRIP:
        if tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) != text:
            raise ValueError(f"round trip changes {text!r}")
