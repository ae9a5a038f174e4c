"""Random sequences of operations on each backend, compared step by step with a small reference model.

A failure is shrunk to a short story. `AGL_MODEL_EXAMPLES=2000` looks at other and at more stories than the suite does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.store.engine import clock, runtime
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.rules.tx import Tx
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from tests.chaos.stores import SPECS, fresh_place
from tests.store.parts import span_of, with_token

EXAMPLES = os.environ.get("AGL_MODEL_EXAMPLES")
SETTINGS = settings(
    stateful_step_count=40,
    deadline=None,
    derandomize=EXAMPLES is None,
    suppress_health_check=list(HealthCheck),
)
STORIES = {"memory": 100, "sqlite": 40, "postgres": 8, "mongo": 4}

RUNS = st.sampled_from([None, None, "a"])
CHOICE = st.integers(0, 10**6)
ATTEMPT_STATUSES = st.sampled_from(["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"])
ROLLOUT_STATUSES = st.sampled_from(
    ["queuing"] * 3 + ["requeuing"] * 3 + ["cancelled"] * 2 + ["preparing", "running", "failed", "succeeded"]
)
CONFIGS = st.builds(
    RolloutConfig,
    timeout_seconds=st.sampled_from([None, None, 20.0]),
    unresponsive_seconds=st.sampled_from([None, None, 5.0]),
    max_attempts=st.integers(1, 3),
    retry_condition=st.sampled_from([[], ["failed", "timeout", "unresponsive"]]),
    retry_delay_seconds=st.sampled_from([0.0, 0.0, 5.0]),
)


# --- the reference model: one list of rollouts, no indexes, no storage, no concurrency; time is an argument ----------

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


# --- a store and the model side by side ------------------------------------------------------------------------------

Change = tuple[str, Callable[[], Coroutine[Any, Any, Any]], set[str]]
"""Token, call, and the rollouts that it names or made."""


class SideBySide(RuleBasedStateMachine):
    """One store and one model; only a test moves the clock."""

    def __init__(self, open_one: Callable[[], LightningStore]) -> None:
        super().__init__()
        self.now = 1_000_000.0
        self.clock = contextlib.ExitStack()
        self.clock.enter_context(mock.patch("time.time", self.time))
        for module in (clock, runtime):
            self.clock.enter_context(mock.patch.object(module, "monotonic", self.time))
        self.clock.enter_context(mock.patch.object(SharedClock, "set"))  # a database has no other time
        self.loop = asyncio.new_event_loop()
        self.store: Any = open_one()
        self.model = Model()
        self.tokens = (f"token {i}" for i in itertools.count())
        self.changes: list[Change] = []
        self.cursor = self.run(self.store.query_events(after="0")).cursor
        self.seen: dict[str, Any] = {}

    def time(self) -> float:
        return self.now

    def teardown(self) -> None:
        try:
            self.check_details(self.model.tasks)
        finally:
            self.run(self.store.close())
            self.loop.close()
            self.clock.close()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    def change(self, call: Callable[[], Coroutine[Any, Any, Any]], *rollout_ids: str) -> Any:
        """Make a call with a token and remember it, to be made again."""
        token = next(self.tokens)
        answer = self.run(with_token(token, call()))
        self.changes.append((token, call, set(rollout_ids)))
        del self.changes[:-4]
        return answer

    def pick(self, choice: int) -> Task:
        """Return one of the last few rollouts, so that stories stay about the same ones."""
        recent = self.model.tasks[-4:]
        return recent[choice % len(recent)]

    def pick_attempt(self, choice: int) -> tuple[Task, Try, str]:
        """Return an attempt and a name for it: its id, or for the latest one sometimes `latest`."""
        tries = [(task, attempt) for task in self.model.tasks[-6:] for attempt in task.tries[-2:]]
        task, attempt = tries[choice % len(tries)]
        named = "latest" if attempt is task.tries[-1] and choice % 2 else attempt.attempt_id
        return task, attempt, named

    def refused_alike(self, ask: Callable[[], Any], tell: Callable[[], Any]) -> None:
        """Call the store and the model; both refuse or neither."""
        try:
            tell()
        except Refused:
            with pytest.raises(ConflictError):
                ask()
        else:
            ask()

    # --- the comparison --------------------------------------------------------------------------------------------

    @invariant()
    def the_store_equals_the_model(self) -> None:
        rollouts = self.run(self.store.query_rollouts())  # looks for lapsed attempts, too
        for task in self.model.tasks:
            task.lapse(self.now)
        plain = [(r.rollout_id, r.status, r.end_time, r.run_id, r.not_before) for r in rollouts]
        assert plain == [(t.rollout_id, t.status, t.ended, t.run_id, t.not_before) for t in self.model.tasks]
        self.check_details(self.changed_and_told())
        self.check_queues()
        self.check_counts()
        self.check_waiting()

    def check_details(self, tasks: list[Task]) -> None:
        """Compare attempts and spans of rollouts, those of all at the end of the story."""
        for task in tasks:
            attempts = self.run(self.store.query_attempts(task.rollout_id))
            assert [(a.attempt_id, a.status) for a in attempts] == [(a.attempt_id, a.status) for a in task.tries]
            spans = self.run(self.store.query_spans(task.rollout_id))
            span_ids = {(s.attempt_id, s.span_id, s.sequence_id, "agentlightning.stale" in s.attributes) for s in spans}
            assert span_ids == {(attempt.attempt_id, *span) for attempt in task.tries for span in attempt.spans}

    def changed_and_told(self) -> list[Task]:
        """Return the rollouts that have changed since the last look, and those that the store says have: all the
        former are among the latter."""
        page = self.run(self.store.query_events(after=self.cursor, limit=1000))
        statuses = {event.rollout_id: event.status for event in page.events}
        now = {task.rollout_id: repr(task) for task in self.model.tasks}
        changed = [task for task in self.model.tasks if self.seen.get(task.rollout_id) != now[task.rollout_id]]
        for task in changed:
            assert statuses.get(task.rollout_id) == task.status or self.only_a_number_was_taken(task)
        self.cursor, self.seen = page.cursor, now
        return [task for task in self.model.tasks if task in changed or task.rollout_id in statuses]

    def only_a_number_was_taken(self, task: Task) -> bool:
        """Return whether the only change is a number that was given out, which no event need report."""
        before = self.seen.get(task.rollout_id)
        return before is not None and before.rsplit("issued=", 1)[0] == repr(task).rsplit("issued=", 1)[0]

    def check_queues(self) -> None:
        """Compare the whole order of each queue, by a script that claims all of it and is aborted."""
        for run_id in (None, "a"):
            with pytest.raises(Peeked) as order:
                self.store._backend.execute(lambda tx, run_id=run_id: _claim_all(tx, run_id, self.now))
            assert list(order.value.args) == [task.rollout_id for task in self.model.queue(run_id, self.now)]

    def check_counts(self) -> None:
        statistics = self.run(self.store.statistics())
        tries = [attempt for task in self.model.tasks for attempt in task.tries]
        names = ("total_rollouts", "total_attempts", "total_spans")
        counted = (len(self.model.tasks), len(tries), sum(len(attempt.spans) for attempt in tries))
        assert tuple(statistics.get(name) for name in names) == counted

    def check_waiting(self) -> None:
        ids = [task.rollout_id for task in self.model.tasks]
        ended = self.run(self.store.wait_for_rollouts(rollout_ids=ids, timeout=0))
        assert [rollout.rollout_id for rollout in ended] == [t.rollout_id for t in self.model.tasks if t.ended]


class Peeked(Exception):
    """Aborts a script; its arguments are the values that the script read."""


def _claim_all(tx: Tx, run_id: str | None, now: float) -> None:
    order: list[str] = []
    while (record := tx.claim(run_id, now)) is not None:
        order.append(record.rollout.rollout_id)
        record.queued_at = None
        tx.save(record)
    raise Peeked(*order)


class Stories(SideBySide):
    """The operations on a store, one rule each."""

    # --- work comes in ---------------------------------------------------------------------------------------------

    @rule(
        config=CONFIGS,
        run_id=RUNS,
        priority=st.integers(-1, 1),
        delay=st.sampled_from([None, None, -5.0, 5.0]),
        count=st.sampled_from([1, 1, 3]),
    )
    def enqueue(self, config: RolloutConfig, run_id: Any, priority: int, delay: float | None, count: int) -> None:
        not_before = None if delay is None else self.now + delay
        request = EnqueueRolloutRequest(
            input={}, config=config, run_id=run_id, priority=priority, not_before=not_before
        )
        for rollout in self.change(lambda: self.store.enqueue_many_rollouts([request] * count)):
            task = Task(rollout.rollout_id, config, run_id, priority, not_before, queued_at=self.now)
            self.model.tasks.append(task)
            self.changes[-1][2].add(rollout.rollout_id)

    @rule(config=CONFIGS, run_id=RUNS)
    def start(self, config: RolloutConfig, run_id: Any) -> None:
        made = self.change(lambda: self.store.start_rollout({}, config=config, run_id=run_id))
        self.changes[-1][2].add(made.rollout_id)
        self.model.tasks.append(Task(made.rollout_id, config, run_id, 0, None))
        self.model.tasks[-1].begin(made.attempt.attempt_id, self.now)

    @rule(run_id=RUNS, limit=st.sampled_from([1, 1, 2, 5]), worker=st.sampled_from([None, "w1", "w2"]))
    def claim(self, run_id: Any, limit: int, worker: Any) -> None:
        claims = self.change(lambda: self.store.dequeue_many_rollouts(limit=limit, worker_id=worker, run_id=run_id))
        expected = self.model.queue(run_id, self.now)[:limit]
        assert [claim.rollout_id for claim in claims] == [task.rollout_id for task in expected]
        for claim, task in zip(claims, expected, strict=True):
            task.begin(claim.attempt.attempt_id, self.now)
            self.changes[-1][2].add(claim.rollout_id)

    @precondition(lambda self: self.model.tasks)
    @rule(choice=CHOICE)
    def start_attempt(self, choice: int) -> None:
        task = self.pick(choice)
        made = self.change(lambda: self.store.start_attempt(task.rollout_id), task.rollout_id)
        task.begin(made.attempt.attempt_id, self.now)

    # --- evidence and changes --------------------------------------------------------------------------------------

    @precondition(lambda self: any(task.tries for task in self.model.tasks[-6:]))
    @rule(choice=CHOICE, names=st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True), own=CHOICE)
    def add_spans(self, choice: int, names: list[int], own: int) -> None:
        task, attempt, _ = self.pick_attempt(choice)
        span_ids = {span_id for span_id, _, _ in attempt.spans}
        ids = [f"{name:016x}" for name in names]
        if len(ids) > 1 and span_ids & set(ids):
            ids = ids[:1]
        number = task.issued + own % 3 if own % 4 == 0 and len(ids) == 1 else -1
        spans = [span_of((task.rollout_id, attempt.attempt_id), number=number, span_id=each) for each in ids]
        expected = [task.add_span(attempt, span_id, number, self.now) for span_id in ids]
        stored = self.change(lambda: self.store.add_many_spans(spans), task.rollout_id)
        assert [span.sequence_id for span in stored] == [number for number in expected if number is not None]

    @precondition(lambda self: self.model.tasks)
    @rule(choice=CHOICE)
    def take_a_number(self, choice: int) -> None:
        task = self.pick(choice)
        task.issued += 1
        assert self.run(self.store.get_next_span_sequence_id(task.rollout_id, "latest")) == task.issued

    @precondition(lambda self: any(task.tries for task in self.model.tasks[-6:]))
    @rule(choice=CHOICE, status=ATTEMPT_STATUSES)
    def set_attempt(self, choice: int, status: Any) -> None:
        task, attempt, named = self.pick_attempt(choice)
        self.refused_alike(
            lambda: self.change(
                lambda: self.store.update_attempt(task.rollout_id, named, status=status), task.rollout_id
            ),
            lambda: task.set_attempt(attempt, status, self.now),
        )

    @precondition(lambda self: self.model.tasks)
    @rule(choice=CHOICE, status=ROLLOUT_STATUSES)
    def set_rollout(self, choice: int, status: Any) -> None:
        task = self.pick(choice)
        self.refused_alike(
            lambda: self.change(lambda: self.store.update_rollout(task.rollout_id, status=status), task.rollout_id),
            lambda: task.set_status(status, self.now),
        )

    @precondition(lambda self: self.model.queue(None, self.now))
    @rule(choice=CHOICE)
    def queue_again(self, choice: int) -> None:
        """Set one status of the queue on a rollout that has the other, some time later: it keeps its place."""
        self.now += 1.0
        queue = self.model.queue(None, self.now)
        task = queue[choice % len(queue)]
        other: Any = "queuing" if task.status == "requeuing" else "requeuing"
        task.set_status(other, self.now)
        self.change(lambda: self.store.update_rollout(task.rollout_id, status=other), task.rollout_id)

    @precondition(lambda self: self.model.tasks)
    @rule(choice=CHOICE, config=CONFIGS)
    def set_config(self, choice: int, config: RolloutConfig) -> None:
        task = self.pick(choice)
        task.config = config
        self.change(lambda: self.store.update_rollout(task.rollout_id, config=config), task.rollout_id)

    @precondition(lambda self: len(self.model.tasks) > 4)
    @rule(choice=CHOICE, force=st.booleans())
    def delete(self, choice: int, force: bool) -> None:
        task = self.pick(choice)
        if not force and task.status not in FINISHED:
            with pytest.raises(ConflictError):
                self.run(self.store.delete_rollouts(rollout_ids=[task.rollout_id]))
            return
        assert self.run(self.store.delete_rollouts(rollout_ids=[task.rollout_id], force=force)) == 1
        self.forget([task])

    @precondition(lambda self: len(self.model.tasks) > 6)
    @rule(run_id=RUNS, keep_last=st.integers(0, 2))
    def keep_last(self, run_id: Any, keep_last: int) -> None:
        surplus = self.model.surplus(run_id, keep_last)
        assert self.run(self.store.delete_rollouts(run_id=run_id, keep_last=keep_last)) == len(surplus)
        self.forget(surplus)

    def forget(self, tasks: list[Task]) -> None:
        deleted_ids = {task.rollout_id for task in tasks}
        self.model.tasks = [task for task in self.model.tasks if task not in tasks]
        self.changes = [change for change in self.changes if not change[2] & deleted_ids]

    # --- time and the network --------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 5.0, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass, with a look every five seconds at most: without looks the store takes itself for frozen."""
        while seconds > 0:
            self.now += min(seconds, 5.0)
            seconds -= 5.0
            self.the_store_equals_the_model()

    @precondition(lambda self: self.changes)
    @rule(choice=CHOICE)
    def deliver_again(self, choice: int) -> None:
        token, call, _ = self.changes[choice % len(self.changes)]
        self.run(with_token(token, call()))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", SPECS)
def test_random_stories_end_as_the_reference_model_says(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # spans that are there already are logged, and there are many
    numbers = itertools.count()

    def open_one() -> LightningStore:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return fresh_place(kind, request, folder).open(scan_debounce_seconds=0.0, synchronous="NORMAL")

    examples = int(EXAMPLES or STORIES[kind])
    run_state_machine_as_test(lambda: Stories(open_one), settings=settings(SETTINGS, max_examples=examples))
