"""What of an OTLP request was not taken, and why: the content of its partial success."""

from __future__ import annotations

MAX_REASONS = 5
MAX_REASON_CHARS = 300


class Rejections:
    """Counts rejected spans and keeps the first few different reasons."""

    __slots__ = ("_reasons", "seen", "spans")

    def __init__(self) -> None:
        self.spans = 0
        self.seen = 0
        """Spans of the request that were looked at so far, where its form is read span by span."""
        self._reasons: dict[str, int] = {}

    def add(self, reason: str, spans: int = 1) -> None:
        """Count spans that are rejected for a reason."""
        self.spans += spans
        reason = reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 3] + "..."
        if reason in self._reasons or len(self._reasons) < MAX_REASONS:
            self._reasons[reason] = self._reasons.get(reason, 0) + spans

    @property
    def message(self) -> str:
        """The reasons as one text, each with how many spans it cost; empty if nothing was rejected."""
        if not self.spans:
            return ""
        told = [reason if count == 1 else f"{reason} ({count} spans)" for reason, count in self._reasons.items()]
        rest = self.spans - sum(self._reasons.values())
        return "; ".join([*told, f"and {rest} spans for other reasons"] if rest else told)
