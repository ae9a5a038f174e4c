"""The result of an import of a history: new pieces, present ones and refused ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentlightning.field_help import Value

HistoryKind = Literal["resources", "rollout", "attempt", "span"]
"""What a piece of a history is."""
HistoryReason = Literal["not_ended", "different", "no_rollout", "no_attempt", "wrong_number", "evicted"]
"""Why a piece was refused. `not_ended`: it still waits or runs; `different`: another one of its id is here;
`no_rollout`, `no_attempt`: what it belongs to is not here; `wrong_number`: its number is not the next one;
`evicted`: the spans of its attempt were dropped from memory."""


class HistoryRefusal(Value):
    """A piece of a history that was not taken."""

    kind: HistoryKind
    """What it is."""
    id: str
    """Of resources: id and version, `rs-1/2`; of a span: rollout, attempt and span, with `/` between them."""
    reason: HistoryReason
    """Why."""
    message: str
    """What was wrong, what was expected, what to do."""


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
    """Pieces that were there already."""
    refused: list[HistoryRefusal] = Field(default_factory=list[HistoryRefusal])
    """Pieces that were not taken; what does not depend on them was."""
