"""`DataProto`: what an agent gives back to be judged, where that is more than a reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agentlightning.field_help import explain_fields


@explain_fields
@dataclass
class DataProto:
    """What an agent returns for `Trainer(reward_fn=...)` to judge: a record with names, and the model's own words.

    An agent may return any other value as well. It has nothing to do with the tensor batches of the same name that some
    training frameworks have.
    """

    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """The result by field."""
    raw_response: str | None = None
    """What the model said, before it was read."""
