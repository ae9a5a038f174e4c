"""The result of `import_history`: numbers of imported and existing parts, and the refused parts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentlightning.base.field_help import Value

HistoryKind = Literal["resources", "rollout", "attempt", "span"]
"""Kind of a part of a history."""
HistoryReason = Literal["not_ended", "different", "no_rollout", "no_attempt", "wrong_number", "evicted"]
"""Reason for a refusal. `not_ended`: the rollout or attempt has not ended; `different`: the store has different data
with the same id; `no_rollout`, `no_attempt`: its rollout or attempt does not exist; `wrong_number`: its number is not
the next one; `evicted`: the spans of its attempt were evicted from memory."""


class HistoryRefusal(Value):
    """A part of a history that was not imported."""

    kind: HistoryKind
    """Kind of the part."""
    id: str
    """Id of the part. For resources: id and version, such as `rs-1/2`. For a span: rollout, attempt and span ids,
    separated by `/`."""
    reason: HistoryReason
    """Reason of the refusal."""
    message: str
    """Message with the problem, the expected value and what to do."""


class HistoryImport(Value):
    """The result of one call of `import_history`."""

    resources: int = 0
    """Number of imported versions of resources."""
    rollouts: int = 0
    """Number of imported rollouts."""
    attempts: int = 0
    """Number of imported attempts."""
    spans: int = 0
    """Number of imported spans."""
    present: int = 0
    """Number of parts that existed already."""
    refused: list[HistoryRefusal] = Field(default_factory=list[HistoryRefusal])
    """Parts that were not imported. All parts that do not depend on them were imported."""
