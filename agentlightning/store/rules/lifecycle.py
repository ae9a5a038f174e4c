"""The rules of statuses, as pure functions without clock, I/O or storage.

Attempts (rows: from, columns: to; `.` allowed, `=` no change, `x` ConflictError):

                 preparing running failed succeeded unresponsive timeout
    preparing        =        .       .       .          .          .
    running          .        =       .       .          .          .
    unresponsive     .        .       .       .          =          .
    timeout          x        x       .       .          x          =
    failed           x        x       =       x          x          x
    succeeded        x        x       x       =          x          x

Rollouts: from a non-terminal status to any status; from a terminal status (failed, succeeded, cancelled) only to the
same status (no change), or to queuing and requeuing, which clears `end_time`. `start_attempt` also reopens a rollout.
A change of an attempt never changes the status of a terminal rollout, and only the latest attempt changes the status
of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

from agentlightning.errors import BadRequestError, ConflictError
from agentlightning.store.base import FINISHED, QUEUING
from agentlightning.types import Attempt, AttemptStatus, Outcome, RolloutConfig, RolloutStatus, WorkerStatus
from agentlightning.types.core import AnyAttemptStatus, AnyRolloutStatus
from agentlightning.types.mode import meant

ATTEMPT_STATUSES: Final[tuple[AttemptStatus, ...]] = get_args(AttemptStatus)
ROLLOUT_STATUSES: Final[tuple[RolloutStatus, ...]] = get_args(RolloutStatus)
_WORDS: Final[dict[str, tuple[object, tuple[str, ...]]]] = {
    "attempt": (AnyAttemptStatus, ATTEMPT_STATUSES),
    "rollout": (AnyRolloutStatus, ROLLOUT_STATUSES),
}
ENDED: Final[frozenset[AttemptStatus]] = frozenset(("failed", "succeeded", "timeout", "unresponsive"))
_STICKY: Final[frozenset[AttemptStatus]] = frozenset(("failed", "succeeded"))
_RETRIABLE: Final[frozenset[AttemptStatus]] = frozenset(("failed", "timeout", "unresponsive"))

LEASE_EXPIRED: Final = "lease_expired"
"""Outcome reason if the worker stopped sending heartbeats, or its heartbeats stopped naming the attempt."""
SPANS_LOST: Final = "spans_lost"
"""Outcome reason of an attempt that finished, but could not send its spans because the store was unreachable."""
STORE_UNREACHABLE: Final = "store_unreachable"
"""Outcome reason of an attempt that could not continue because the store was unreachable."""
RUNNER_DIED: Final = "runner_died"
"""Outcome reason if the process of the attempt died, as reported by another process that detected it."""
STOPPED: Final = "stopped"
"""Outcome reason of an attempt that was interrupted because its run ended."""
_LOST: Final = frozenset((LEASE_EXPIRED, RUNNER_DIED, SPANS_LOST, STORE_UNREACHABLE))
"""Reasons that are independent of the attempt itself. Its retry does not count against `max_attempts`."""


def check_status(kind: Literal["attempt", "rollout"], status: object) -> Any:
    """Return the status of an attempt or a rollout for a status or an alias.

    Raises:
        BadRequestError: the status does not exist.
    """
    words, statuses = _WORDS[kind]
    meaning = meant(words, status)
    if meaning not in statuses:
        raise BadRequestError(f"Invalid {kind} status: {status!r}; expected one of {', '.join(statuses)}")
    return meaning


def check_attempt_change(attempt: Attempt, to: AttemptStatus) -> bool:
    """Return True if the status changes, False if it stays the same.

    Raises:
        BadRequestError: the status does not exist.
        ConflictError: the table does not allow the change.
    """
    check_status("attempt", to)
    if attempt.status == to:
        return False
    if attempt.status in _STICKY or (attempt.status == "timeout" and to not in _STICKY):
        raise ConflictError(
            f"Attempt {attempt.attempt_id} of rollout {attempt.rollout_id} is {attempt.status}; "
            f"it cannot become {to}. Start a new attempt with start_attempt."
        )
    return True


def check_rollout_change(rollout_id: str, status: RolloutStatus, to: RolloutStatus) -> bool:
    """Return True if the status changes, False if it stays the same.

    Raises:
        BadRequestError: the status does not exist.
        ConflictError: the rollout has ended, and `to` does not queue it again.
    """
    check_status("rollout", to)
    if status == to:
        return False
    if status in FINISHED and to not in QUEUING:
        raise ConflictError(
            f"Rollout {rollout_id} is {status}; it cannot become {to}. "
            "Requeue it with status 'queuing', or start an attempt with start_attempt."
        )
    return True


def rollout_after(attempt: Attempt, config: RolloutConfig, infrastructure_retries: int) -> RolloutStatus:
    """Return the status of a rollout with this latest attempt.

    `infrastructure_retries` is the number of its attempts that were retries after a lost worker; they do not count
    against `max_attempts`.
    """
    status = attempt.status
    if status in ("preparing", "running", "succeeded"):
        return status
    if status not in _RETRIABLE:
        raise BadRequestError(f"Invalid attempt status: {status}")
    if is_infrastructure_retry(attempt, config, infrastructure_retries):
        return "requeuing"
    counted = attempt.sequence_id - infrastructure_retries
    return "requeuing" if status in config.retry_condition and counted < config.max_attempts else "failed"


def is_infrastructure_retry(attempt: Attempt, config: RolloutConfig, infrastructure_retries: int) -> bool:
    """Return True if the rollout is requeued because the attempt was lost, not because of its result."""
    return attempt.outcome_reason in _LOST and infrastructure_retries < config.infrastructure_retries


def retry_pause(attempts: int, config: RolloutConfig) -> float:
    """Return the seconds before the retry that follows `attempts` attempts: delay * backoff**(attempts - 1)."""
    if config.retry_delay_seconds <= 0:
        return 0.0
    growth = config.retry_backoff ** min(attempts - 1, 64)
    return min(config.retry_delay_seconds * growth, config.retry_delay_max_seconds)


def health(
    attempt: Attempt, config: RolloutConfig, now: float, age: Callable[[float], float] | None = None
) -> AttemptStatus | None:
    """Return `timeout` or `unresponsive` if the attempt exceeds a limit of its rollout, else None.

    `age` returns the seconds since a time; by default the difference to `now`.
    """
    age = age or (lambda since: now - since)
    if config.timeout_seconds is not None and age(attempt.start_time) > config.timeout_seconds:
        return "timeout"
    if config.unresponsive_seconds is not None:
        last = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
        if age(last) > config.unresponsive_seconds:
            return "unresponsive"
    return None


def deadline(attempt: Attempt, config: RolloutConfig) -> float | None:
    """Return the earliest time at which `health` can return a status; None if it never can."""
    if config.timeout_seconds is None and config.unresponsive_seconds is None:
        return None
    limits: list[float] = []
    if config.timeout_seconds is not None:
        limits.append(attempt.start_time + config.timeout_seconds)
    if config.unresponsive_seconds is not None:
        last = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
        limits.append(last + config.unresponsive_seconds)
    return min(limits) if limits else None


def is_over(attempt: Attempt, rollout_status: RolloutStatus) -> bool:
    """Return True if an attempt has finally ended, so that later data is not part of its result. While its rollout has
    not ended, the worker can still end an attempt that is `timeout` or `unresponsive`."""
    return attempt.status in _STICKY or (attempt.status == "timeout" and rollout_status in FINISHED)


def default_outcome(status: AttemptStatus) -> tuple[Outcome | None, str | None]:
    """Return outcome and reason of an attempt that ended without them. For a time limit, they are the same as those
    that the runner sets, so it does not matter which of the two detects it first."""
    if status == "timeout":
        return "cancelled", status
    if status == "unresponsive":
        return "infrastructure_fault", status
    if status == "failed":
        return "infrastructure_fault", "exception"
    return None, None


def worker_after(status: AttemptStatus) -> WorkerStatus:
    """Return the status of a worker without other claims, after its attempt got this status."""
    if status in _STICKY:
        return "idle"
    return "unknown" if status in ("timeout", "unresponsive") else "busy"
