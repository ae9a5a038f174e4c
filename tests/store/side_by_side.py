"""A store and the reference model side by side: each call goes to both, and both are compared."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore, request_token
from agentlightning.store.engine import clock, runtime
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.rules.tx import Tx
from tests.store.reference_model import Model, Refused, Task, Try

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
        answer = self.run(with_token(token, call))
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


async def with_token(token: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    request_token.set(token)
    return await call()
