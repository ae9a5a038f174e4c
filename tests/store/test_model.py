"""Random sequences of operations on each backend, compared step by step with a small reference model.

A failure is shrunk to a short story. `AGL_MODEL_EXAMPLES=2000` looks at other and at more stories than the suite does.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig, Span
from tests.chaos.stores import SPECS, fresh_place
from tests.store.reference_model import FINISHED, Task
from tests.store.side_by_side import SideBySide, with_token

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
        spans = [
            Span.from_attributes(
                attributes={},
                rollout_id=task.rollout_id,
                attempt_id=attempt.attempt_id,
                sequence_id=number,
                span_id=span_id,
            )
            for span_id in ids
        ]
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
        self.run(with_token(token, call))


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
