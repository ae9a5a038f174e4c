"""The setting of asynchronous collection, and what it does not go together with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agentlightning.field_help import explain_fields
from agentlightning.utils.setting_checks import check_number

LARGEST: Final = 64
"""Weight versions."""
MOST_GROUPS: Final = 512
"""In flight; each waits for its end by a request of its own, which a store on another machine holds open."""


@explain_fields
@dataclass(frozen=True, kw_only=True)
class FlightSettings:
    """How far sampling may be ahead of learning."""

    max_staleness: int = 0
    """How many weight versions the weights of a reply may be behind those that learn from it. 0 collects synchronously:
    a step waits for all its rollouts. With n, rollouts go on while the weights are updated, at most n + 1 times
    `batch_size` groups at a time; a group that is older when it ends is dropped as `too_stale`, and stale tokens of the
    others are corrected (`staleness_clip_max`). [no counterpart: `async_training.staleness_threshold` is a share of
    samples]"""

    def check_flight(self) -> None:
        """Check the value.

        Raises:
            BadRequestError: it is out of its range.
        """
        check_number("max_staleness", self.max_staleness, int, at_least=0, at_most=LARGEST)
