"""What a request did, counted.

Source: decoding-spec section 16.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts and times of one request.

    Attributes:
      emitted: tokens emitted, the first (from the prompt's last row) included.
      mtp_windows: windows in which the head drafted, or was kept level without a draft
        because the budget left no room for one.
      ar_windows: steps of plain decoding.
      drafted: drafts that were verified.
      accepted: drafts that were kept.
      drafted_by_depth: how often a draft of depth 1, 2, ... was verified.
      accepted_by_depth: how often it was kept.
      replacements: windows that ended with the target's token in place of a draft.
      bonuses: windows that ended with a token after their last draft.
      nonfinite_rows: rows without a finite logit; each emitted id 0.
      prefill_seconds: time to the first token, compilation included.
      decode_seconds: time of all windows, compilation included.
    """

    emitted: int = 0
    mtp_windows: int = 0
    ar_windows: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    replacements: int = 0
    bonuses: int = 0
    nonfinite_rows: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def windows(self) -> int:
        """All steps after the first token."""
        return self.mtp_windows + self.ar_windows

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted, to three decimals; 0 without drafts."""
        return round(self.accepted / self.drafted, 3) if self.drafted else 0.0

    @property
    def tokens_per_window(self) -> float:
        """Tokens emitted per window, the first token aside; 0 without windows."""
        return (self.emitted - 1) / self.windows if self.windows else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted by windows per second of their time; 0 without windows."""
        return (self.emitted - 1) / self.decode_seconds if self.decode_seconds else 0.0

    def after_window(
        self, *, drafted: int, accepted: int, emitted: int, head: bool, seconds: float, lost: int
    ) -> "Stats":
        """These counts with one more window in them.

        Args:
          drafted: drafts verified.
          accepted: drafts kept.
          emitted: tokens emitted: ``accepted``, or one more with a replacement or bonus.
          head: whether it was a window of the head, not a plain step.
          seconds: its time.
          lost: its rows without a finite logit.
        """
        own = emitted - accepted
        depth = max(drafted, len(self.drafted_by_depth))
        return dataclasses.replace(
            self,
            emitted=self.emitted + emitted,
            mtp_windows=self.mtp_windows + head,
            ar_windows=self.ar_windows + (not head),
            drafted=self.drafted + drafted,
            accepted=self.accepted + accepted,
            drafted_by_depth=_added(self.drafted_by_depth, drafted, depth),
            accepted_by_depth=_added(self.accepted_by_depth, accepted, depth),
            replacements=self.replacements + (own if accepted < drafted else 0),
            bonuses=self.bonuses + (own if head and accepted == drafted else 0),
            nonfinite_rows=self.nonfinite_rows + lost,
            decode_seconds=self.decode_seconds + seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """All counts, times and rates, ready for JSON."""
        rates = ("acceptance_rate", "tokens_per_window", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in rates}


def _added(counts: tuple[int, ...], reached: int, depth: int) -> tuple[int, ...]:
    padded = counts + (0,) * (depth - len(counts))
    return tuple(n + (i < reached) for i, n in enumerate(padded))
