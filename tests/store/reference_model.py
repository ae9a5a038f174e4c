"""A plain model of a store: one list of rollouts, no indexes, no storage, no concurrency.

`test_model.py` holds every backend against it. Time is an argument; ids of attempts are told to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentlightning.types import RolloutConfig

QUEUING, RUNNING, FINISHED = ("queuing", "requeuing"), ("preparing", "running"), ("failed", "succeeded", "cancelled")


class Refused(Exception):
    """The change is not in the table."""


@dataclass
class Try:
    """An attempt; its spans are (span id, number, stale)."""

    attempt_id: str
    started: float
    status: str = "preparing"
    heard: float | None = None
    spans: list[tuple[str, int, bool]] = field(default_factory=list)


@dataclass
class Task:
    """A rollout."""

    rollout_id: str
    config: RolloutConfig
    run_id: str | None
    priority: int
    not_before: float | None
    status: str = "queuing"
    queued_at: float | None = None
    ended: float | None = None
    tries: list[Try] = field(default_factory=list)
    issued: int = 0

    @property
    def available_at(self) -> float | None:
        return None if self.queued_at is None else max(self.queued_at, self.not_before or 0.0)

    def become(self, status: str, now: float) -> None:
        if status in QUEUING:
            self.queued_at = now if self.status not in QUEUING or self.queued_at is None else self.queued_at
        else:
            self.queued_at = None
        self.ended = now if status in FINISHED else None
        self.status = status

    def begin(self, attempt_id: str, now: float) -> None:
        self.tries.append(Try(attempt_id, now))
        self.become("preparing", now)

    def set_status(self, status: str, now: float) -> None:
        if status != self.status:
            if self.status in FINISHED and status not in QUEUING:
                raise Refused
            self.become(status, now)

    def set_attempt(self, attempt: Try, status: str, now: float) -> None:
        if status == attempt.status:
            return
        if attempt.status in ("failed", "succeeded") or (
            attempt.status == "timeout" and status not in ("failed", "succeeded")
        ):
            raise Refused
        attempt.status = status
        if attempt is self.tries[-1] and self.status not in FINISHED:
            self.follow(status, now)

    def follow(self, status: str, now: float) -> None:
        """Set the status of the rollout for this status of the latest attempt."""
        if status in ("failed", "timeout", "unresponsive"):
            again = status in self.config.retry_condition and len(self.tries) < self.config.max_attempts
            status = "requeuing" if again else "failed"
            if again:
                grown = self.config.retry_delay_seconds * self.config.retry_backoff ** (len(self.tries) - 1)
                pause = min(grown, self.config.retry_delay_max_seconds)
                self.not_before = now + pause if pause else None
        if status != self.status:
            self.become(status, now)

    def add_span(self, attempt: Try, span_id: str, number: int, now: float) -> int | None:
        """Return the number of a new span, or None for a stored one."""
        is_new = span_id not in [other_id for other_id, _, _ in attempt.spans]
        if number >= 0:
            self.issued = max(self.issued, number)
        if not is_new:
            return None
        if number < 0:
            number = self.issued = self.issued + 1
        latest = attempt is self.tries[-1]
        over = attempt.status in ("failed", "succeeded") or (attempt.status == "timeout" and self.status in FINISHED)
        attempt.spans.append((span_id, number, over or not latest))
        attempt.heard = now
        if attempt.status in RUNNING or (attempt.status == "unresponsive" and latest):
            attempt.status = "running"
            if latest and self.status not in FINISHED and self.status != "running":
                self.become("running", now)
        return number

    def lapse(self, now: float) -> None:
        """End the latest attempt if it is past a limit."""
        if self.status not in RUNNING or not self.tries or self.tries[-1].status not in RUNNING:
            return
        attempt, config = self.tries[-1], self.config
        last_sign = attempt.started if attempt.heard is None else attempt.heard
        if config.timeout_seconds is not None and now - attempt.started > config.timeout_seconds:
            self.set_attempt(attempt, "timeout", now)
        elif config.unresponsive_seconds is not None and now - last_sign > config.unresponsive_seconds:
            self.set_attempt(attempt, "unresponsive", now)


class Model:
    """Return all rollouts, in the order in which they were made."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def queue(self, run_id: str | None, now: float) -> list[Task]:
        """Return the rollouts that may be claimed, by priority, then time of queueing, then creation."""
        ready = [
            (-task.priority, task.available_at, place, task)
            for place, task in enumerate(self.tasks)
            if task.run_id == run_id and task.available_at is not None and task.available_at <= now
        ]
        return [task for *_, task in sorted(ready)]

    def surplus(self, run_id: str | None, keep_last: int) -> list[Task]:
        """Return the ended rollouts of a run that are deleted when so many are kept."""
        ended = [task for task in self.tasks if task.run_id == run_id and task.ended is not None]
        ended.sort(key=lambda task: task.ended or 0.0)
        return ended[: max(0, len(ended) - keep_last)]
