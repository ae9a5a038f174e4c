"""The result of an import of a history: new pieces, present ones and refused ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentlightning.base.field_help import Value

HistoryKind = Literal["resources", "rollout", "attempt", "span"]
"""Kind of a piece of a history."""
HistoryReason = Literal["not_ended", "different", "no_rollout", "no_attempt", "wrong_number", "evicted"]
"""Reason for a refusal. `not_ended`: it still waits or runs; `different`: the store has another one with its id;
`no_rollout`, `no_attempt`: the store lacks what it belongs to; `wrong_number`: its number is not the next one;
`evicted`: the spans of its attempt were dropped from memory."""


class HistoryRefusal(Value):
    """A piece of a history that was not imported."""

    kind: HistoryKind
    """Kind of the piece."""
    id: str
    """For resources id and version, `rs-1/2`; for a span rollout, attempt and span, separated by `/`."""
    reason: HistoryReason
    """Reason of the refusal."""
    message: str
    """Text with the problem, the expected value and the remedy."""


class HistoryImport(Value):
    """The result of one call of `import_history`."""

    resources: int = 0
    """Versions of resources that are new."""
    rollouts: int = 0
    """Rollouts that are new."""
    attempts: int = 0
    """Attempts that are new."""
    spans: int = 0
    """Spans that are new."""
    present: int = 0
    """Pieces that the store had already."""
    refused: list[HistoryRefusal] = Field(default_factory=list[HistoryRefusal])
    """Pieces that were not imported; pieces that do not depend on them were."""
