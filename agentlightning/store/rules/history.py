"""Import of a finished history in parts. Existing records are skipped, and invalid records are reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast, get_args

from agentlightning.store.base import FINISHED
from agentlightning.store.rules import lifecycle
from agentlightning.store.rules.resources import take_version
from agentlightning.store.rules.rewards import Rewarded, may_reward, rewarded_by, with_reward
from agentlightning.store.rules.tx import Record, Tx
from agentlightning.store.rules.values import evolve
from agentlightning.types import (
    Attempt,
    HistoryImport,
    HistoryRefusal,
    ResourcesUpdate,
    Rollout,
    Span,
)
from agentlightning.types.history import HistoryKind, HistoryReason
from agentlightning.utils.rewards import as_reward

_COUNTS = ("resources", "rollouts", "attempts", "spans", "present")
PIECE = 1000
"""Number of rollouts, attempts and spans in one step. A larger history is split between two rollouts."""
NO_REWARD = "no_reward"
"""Outcome reason of an attempt that succeeded without a reward."""
_BEHIND_ALL_SPANS = 2**53
"""Span number of a reward that was imported with its attempt, so that no span of the attempt changes it."""


class History(NamedTuple):
    """Ended rollouts with their attempts and spans, as copies."""

    rollouts: Sequence[Rollout]
    attempts: Sequence[Attempt]
    spans: Sequence[Span]


def pieces_of(history: History) -> list[History]:
    """Return a history in parts to import one after the other. A rollout and its attempts and spans are in one part."""
    if sum(map(len, history)) <= PIECE:
        return [history]
    by_rollout: dict[str, History] = {}
    for kind, values in enumerate(history):
        for value in values:
            cast("list[object]", by_rollout.setdefault(value.rollout_id, History([], [], []))[kind]).append(value)
    pieces, size = [History([], [], [])], 0
    for of_rollout in by_rollout.values():
        if size and size + sum(map(len, of_rollout)) > PIECE:
            pieces.append(History([], [], []))
            size = 0
        size += sum(map(len, of_rollout))
        for whole, part in zip(pieces[-1], of_rollout, strict=True):
            cast("list[object]", whole).extend(part)
    return pieces


def add_up(one: HistoryImport, other: HistoryImport) -> HistoryImport:
    """Return the combined result of two parts, with the refusals grouped by kind."""
    kinds = get_args(HistoryKind)
    refused = sorted([*one.refused, *other.refused], key=lambda each: kinds.index(each.kind))
    counts = {name: getattr(one, name) + getattr(other, name) for name in _COUNTS}
    return HistoryImport(**counts, refused=refused)


def import_resources(tx: Tx, updates: Sequence[ResourcesUpdate]) -> HistoryImport:
    """Import versions of resources; return the result. No script changes both resources and rollouts."""
    done = HistoryImport()
    for update in sorted(updates, key=lambda each: each.version):
        result = take_version(tx, update)
        if result is None:
            message = (
                f"The store has other resources {update.resources_id!r} with version {update.version}; "
                "import into a store that does not have them"
            )
            place = f"{update.resources_id}/{update.version}"
            done.refused.append(HistoryRefusal(kind="resources", id=place, reason="different", message=message))
        else:
            done.resources += result
            done.present += not result
    return done


def import_history(tx: Tx, history: History) -> HistoryImport:
    """Import rollouts, attempts and spans; return the result."""
    return _Taking(tx).take(history)


class _Taking:
    """One import call: the records that it has loaded, and its result."""

    def __init__(self, tx: Tx) -> None:
        self.tx = tx
        self.done = HistoryImport()
        self.records: dict[str, Record | None] = {}
        self.changed: dict[str, None] = {}

    def take(self, history: History) -> HistoryImport:
        for rollout in history.rollouts:
            self._rollout(rollout)
        for attempt in sorted(history.attempts, key=lambda each: each.sequence_id):
            self._attempt(attempt)
        self._spans(history.spans)
        for rollout_id in self.changed:
            self.tx.save(cast("Record", self.records[rollout_id]))
            self.tx.notes.changed = True
        return self.done

    def _refuse(self, kind: HistoryKind, piece: str, reason: HistoryReason, message: str) -> None:
        self.done.refused.append(HistoryRefusal(kind=kind, id=piece, reason=reason, message=message))

    def _record(self, rollout_id: str) -> Record | None:
        if rollout_id not in self.records:
            self.records[rollout_id] = self.tx.load(rollout_id)
        return self.records[rollout_id]

    # --- the pieces ------------------------------------------------------------------------------------------------

    def _rollout(self, rollout: Rollout) -> None:
        rollout_id = rollout.rollout_id
        if rollout.status not in FINISHED:
            self._refuse(
                "rollout", rollout_id, "not_ended",
                f"Rollout {rollout_id} is {rollout.status}; expected succeeded, failed or cancelled. End it in its "
                "original store, or set its status to cancelled.",
            )  # fmt: skip
            return
        there = self._record(rollout_id)
        if there is None:
            self.records[rollout_id] = Record(rollout)
            self.changed[rollout_id] = None
            self.tx.notes.finished.append(rollout_id)
            self.done.rollouts += 1
        elif (there.rollout.start_time, there.rollout.input) == (rollout.start_time, rollout.input):
            self.done.present += 1
        else:
            self._refuse(
                "rollout", rollout_id, "different",
                f"The store has a rollout {rollout_id} with a different input or start; import into a store that does "
                "not have it",
            )  # fmt: skip

    def _attempt(self, attempt: Attempt) -> None:
        record = self._record(attempt.rollout_id)
        if record is None:
            self._refuse("attempt", attempt.attempt_id, "no_rollout", _no_rollout(attempt.rollout_id))
        elif attempt.status not in lifecycle.ENDED:
            self._refuse(
                "attempt", attempt.attempt_id, "not_ended",
                f"Attempt {attempt.attempt_id} is {attempt.status}; expected {', '.join(sorted(lifecycle.ENDED))}",
            )  # fmt: skip
        elif (there := record.find_attempt(attempt.attempt_id)) is not None:
            if (there.sequence_id, there.start_time) == (attempt.sequence_id, attempt.start_time):
                self.done.present += 1
            else:
                self._refuse(
                    "attempt", attempt.attempt_id, "different",
                    f"The store has attempt {attempt.attempt_id} of rollout {attempt.rollout_id} with a different "
                    "number or start; import into a store that does not have it",
                )  # fmt: skip
        elif record.rollout.status not in FINISHED:
            self._refuse("attempt", attempt.attempt_id, "not_ended", _is_at_work(record.rollout))
        elif attempt.sequence_id != len(record.attempts) + 1:
            self._refuse(
                "attempt", attempt.attempt_id, "wrong_number",
                f"Attempt {attempt.attempt_id} of rollout {attempt.rollout_id} has the number {attempt.sequence_id}; "
                f"expected the next number, {len(record.attempts) + 1}",
            )  # fmt: skip
        else:
            attempt = _with_outcome(_without_unusable_rewards(attempt))
            record.put_attempt(attempt)
            if attempt.reward is not None:
                record.reward_numbers = {**record.reward_numbers, attempt.attempt_id: _BEHIND_ALL_SPANS}
            self.changed[attempt.rollout_id] = None
            self.done.attempts += 1

    def _spans(self, spans: Sequence[Span]) -> None:
        fitting = [span for span in spans if self._fits(span)]
        sizes = self.tx.add_spans(fitting)
        rewards: dict[tuple[str, str], list[Rewarded]] = {}
        for span, size in zip(fitting, sizes, strict=True):
            if not size:
                self.done.present += 1
                continue
            record = cast("Record", self.records[span.rollout_id])
            record.span_count += 1
            record.span_bytes += size
            record.spans_issued = max(record.spans_issued, span.sequence_id)
            self.changed[span.rollout_id] = None
            self.done.spans += 1
            if may_reward(span) and (rewarded := rewarded_by(span)) is not None:
                rewards.setdefault((span.rollout_id, span.attempt_id), []).append(rewarded)
        for (rollout_id, attempt_id), span_rewards in rewards.items():
            record = cast("Record", self.records[rollout_id])
            attempt = cast("Attempt", record.find_attempt(attempt_id))
            record.put_attempt(_with_outcome(with_reward(record, attempt, span_rewards)))

    def _fits(self, span: Span) -> bool:
        record = self._record(span.rollout_id)
        attempt = None if record is None else record.find_attempt(span.attempt_id)
        place = f"{span.rollout_id}/{span.attempt_id}/{span.span_id}"
        if record is None:
            self._refuse("span", place, "no_rollout", _no_rollout(span.rollout_id))
        elif attempt is None or span.attempt_id == "latest":
            self._refuse(
                "span", place, "no_attempt",
                f"Rollout {span.rollout_id} has no attempt {span.attempt_id!r} in this store; import it first",
            )  # fmt: skip
        elif attempt.status not in lifecycle.ENDED:
            self._refuse("span", place, "not_ended", _is_at_work(record.rollout))
        elif attempt.sequence_id <= record.attempts_dropped:
            self._refuse(
                "span", place, "evicted",
                f"The spans of attempt {span.attempt_id} were evicted because the store is full. Increase "
                "max_span_bytes, or import into a durable store (sqlite:///FILE).",
            )  # fmt: skip
        else:
            return True
        return False


def _no_rollout(rollout_id: str) -> str:
    return f"Rollout {rollout_id} does not exist in this store; import it first"


def _is_at_work(rollout: Rollout) -> str:
    return f"Rollout {rollout.rollout_id} was restarted in this store (status {rollout.status!r}); it is not changed"


def _without_unusable_rewards(attempt: Attempt) -> Attempt:
    """Return an attempt with only its usable rewards, and without its outcome if it depended on an unusable reward."""
    usable = {name: value for name, value in (attempt.rewards or {}).items() if as_reward(value) is not None} or None
    reward = as_reward(attempt.reward)
    if (reward, usable) == (attempt.reward, attempt.rewards):
        return attempt
    outcome = None if reward is None and attempt.outcome == "scored" else attempt.outcome
    return evolve(attempt, reward=reward, rewards=usable, outcome=outcome)


def _with_outcome(attempt: Attempt) -> Attempt:
    """Return an attempt with the outcome for its status and reward, unless its source set an outcome."""
    if attempt.outcome is not None and (attempt.outcome, attempt.outcome_reason) != ("unscored", NO_REWARD):
        return attempt
    if attempt.status != "succeeded":
        outcome, reason = lifecycle.default_outcome(attempt.status)
        return evolve(attempt, outcome=outcome, outcome_reason=reason)
    scored = attempt.reward is not None
    return evolve(attempt, outcome="scored" if scored else "unscored", outcome_reason=None if scored else NO_REWARD)
