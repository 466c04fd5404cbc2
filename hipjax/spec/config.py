"""What a request asks for: settings objects, checked on creation.

Source: decoding-spec sections 7 and 15.
"""

import dataclasses
from collections.abc import Iterable

from hipjax import checks

MAX_DRAFTS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen and when a request ends. Choice is greedy.

    Attributes:
      stop_token_ids: ids that end the request, besides the model's end-of-sequence.
      ignore_eos: treat every id as an ordinary token, so that only the budget ends it.

    Raises:
      TypeError, ValueError: an attribute is not of the kind, or the two contradict.
    """

    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks.boolean("ignore_eos", self.ignore_eos)
        given: object = self.stop_token_ids
        if not isinstance(given, Iterable):
            raise TypeError(f"stop_token_ids is {given!r}; it must hold integers")
        ids = tuple(checks.integer("stop_token_ids", i, 0) for i in given)
        object.__setattr__(self, "stop_token_ids", ids)
        if self.ignore_eos and ids:
            raise ValueError("ignore_eos is True, but stop_token_ids is given; choose one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How a request drafts for itself.

    Attributes:
      mtp_k: drafts of the model's own head per window, 1 to 10.

    Raises:
      TypeError, ValueError: an attribute is of another type or out of range.
    """

    mtp_k: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtp_k", checks.integer("mtp_k", self.mtp_k, 1, MAX_DRAFTS))
