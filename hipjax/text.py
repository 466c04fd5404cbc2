"""From token ids to text while they arrive."""

from collections.abc import Iterable

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes ids piece by piece; the pieces join up to ``tokenizer.decode`` of all ids.

    A token may hold only some bytes of a character. Decoded by itself such a token gives a
    replacement character, so a trailing one is held back until later tokens decide it.

    Args:
      tokenizer: the model's tokenizer.

    Example:
      >>> import hipjax
      >>> tokenizer = hipjax.load_nano().tokenizer
      >>> stream = TextStream(tokenizer)
      >>> pieces = [stream.push([i]) for i in tokenizer.encode("naïve €").ids]
      >>> "".join(pieces) + stream.end()
      'naïve €'
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The newest ids, from a boundary of characters on. The first of them are all out, and
        # stay as context for decoders that look at the neighbours.
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become certain with ``ids``; may be empty.

        Args:
          ids: the ids that follow those pushed before.
        """
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._shown :]
        if piece and certain == text:
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._shown = len(self._tokenizer.decode(self._ids))
        else:
            self._shown += len(piece)
        return piece

    def end(self) -> str:
        """What was held back to the last: bytes that never became a character."""
        rest = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids, self._context, self._shown = [], 0, 0
        return rest
