"""What a run comes to: rollouts by outcome, rewards and durations, and where it is kept. Pure; `follow.py` feeds it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentlightning.store.base import FINISHED
from agentlightning.terminal import one_line
from agentlightning.types import RolloutEvent

_UNCLAIMED = {"cancelled": "not run"}
"""How the statuses of rollouts are called that ended without an attempt, if not by themselves."""


class EndedRollout(NamedTuple):
    """A rollout of the run that has ended."""

    outcome: str
    """Of its latest attempt; the status of the rollout where no runner claimed it."""
    seconds: float
    """From when it was enqueued to its end."""
    reward: float | None = None


@dataclass
class RunReport:
    """The rollouts of one run, as far as they were heard of."""

    name: str
    """How messages call the run."""
    place: str
    """Where its rollouts are kept."""
    ended: dict[str, EndedRollout] = field(default_factory=dict[str, EndedRollout])
    """By rollout id."""
    statuses: dict[str, str] = field(default_factory=dict[str, str])
    """Of those that are open, by rollout id."""

    def note(self, event: RolloutEvent, reward: float | None) -> None:
        """Take in how a rollout stands; the last word counts."""
        if event.status not in FINISHED:
            self.ended.pop(event.rollout_id, None)
            self.statuses[event.rollout_id] = event.status
            return
        self.statuses.pop(event.rollout_id, None)
        seconds = max(0.0, (event.end_time or event.start_time) - event.start_time)
        self.ended[event.rollout_id] = EndedRollout(
            event.outcome or _UNCLAIMED.get(event.status, event.status), seconds, reward
        )

    @property
    def outcomes(self) -> Counter[str]:
        """Ended rollouts by outcome."""
        return Counter(rollout.outcome for rollout in self.ended.values())

    @property
    def rewards(self) -> list[float]:
        """Of the rollouts that earned one."""
        return [rollout.reward for rollout in self.ended.values() if rollout.reward is not None]

    @property
    def waiting(self) -> int:
        """Rollouts in the queue."""
        return sum(status in ("queuing", "requeuing") for status in self.statuses.values())

    @property
    def running(self) -> int:
        """Rollouts that a runner has in hand."""
        return len(self.statuses) - self.waiting

    def line(self, seconds: float) -> str:
        """Return the end of the run in one line."""
        parts = [f"{len(self.ended)} rollouts in {seconds:.1f} s{_listed(self.outcomes)}"]
        if self.statuses:
            parts.append(f"{len(self.statuses)} not at an end")
        parts.append(self.reward_text())
        if self.ended:
            parts.append(self.duration_text())
        return f"{self.name}: {'; '.join(parts)}; kept in {self.place}"

    def status(self, seconds: float) -> str:
        """Return how the run stands in one line."""
        counts = f"{len(self.ended)} ended{_listed(self.outcomes)}, {self.running} running, {self.waiting} waiting"
        return f"{self.name}, {seconds:.0f} s: {counts}; {self.reward_text()}"

    def reward_text(self) -> str:
        """Return the mean reward, and over how many."""
        rewards = self.rewards
        return f"mean reward {math.fsum(rewards) / len(rewards):.3f} (of {len(rewards)})" if rewards else "no reward"

    def duration_text(self) -> str:
        """Return how long rollouts took from the queue to their end."""
        seconds = sorted(rollout.seconds for rollout in self.ended.values())
        return (
            f"from queue to end median {quantile(seconds, 0.5):.2f} s, nine in ten within "
            f"{quantile(seconds, 0.9):.2f} s, longest {seconds[-1]:.2f} s"
        )

    def table(self, seconds: float) -> Any:
        """Return the state of the run as a table of rich."""
        from rich.table import Table
        from rich.text import Text

        title = Text(one_line(f"{self.name}, {seconds:.0f} s"))
        table = Table(box=None, pad_edge=False, show_header=False, title=title)
        table.title_justify = "left"
        table.add_row("rollouts", f"{len(self.ended)} ended, {self.running} running, {self.waiting} waiting")
        for outcome, count in sorted(self.outcomes.items()):
            table.add_row(Text(one_line(f"  {outcome}")), str(count))
        table.add_row("reward", self.reward_text())
        if self.ended:
            table.add_row("time", self.duration_text())
        table.add_row("kept in", Text(one_line(self.place)))
        return table


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ordered values that at least `share` of them do not exceed."""
    assert ordered
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _listed(outcomes: Counter[str]) -> str:
    return f" ({', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))})" if outcomes else ""
