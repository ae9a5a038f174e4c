"""Every store answers the same operations alike: each backend, in process and over HTTP, compared with memory.

A story is random operations with random arguments, right and wrong. They depend on its seed and on the ids that its
operations make, which depend on their tokens: the same ones on every store. Times are cut to whole seconds of a clock
that the story moves. `AGL_STORIES=40` tells so many stories of 500 operations; the suite tells one short one, `make
test-heavy` 40.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pydantic import BaseModel

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStore
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import (
    LLM,
    EnqueueRolloutRequest,
    EventPage,
    PaginatedResult,
    PromptTemplate,
    RolloutConfig,
    Span,
)
from tests.chaos.stores import fresh_place
from tests.store.parts import serving, span_of, with_token

START = 1_790_000_000.5
STATUSES = ("queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing")
ATTEMPTS = ("preparing", "running", "failed", "succeeded", "unresponsive", "timeout")
RUNS = (None, None, "a", "b/ä")
WORKERS = ("w1", "w2", "search", "ä/?")
RESOURCES = ("rs-1", "search", "x y")
WRONG: dict[str, tuple[Any, ...]] = {
    "sort_by": ("nothing", "config", "attributes"),
    "sort_order": ("up",),
    "filter_logic": ("xor",),
    "limit": (-7,),
    "offset": (-1, 10**15),
    "status": ("nothing", ""),
    "status_in": (["nothing"], ["queuing", "lost"]),
    "mode": ("nothing",),
    "config": ({"max_attempts": 0}, {"retry_condition": ["nothing"]}),
    "metadata": (5, "text"),
    "priority": ("high",),
    "not_before": ("soon",),
    "outcome": ("nothing",),
    "heartbeat_stats": (5,),
    "last_heartbeat_time": ("now",),
    "resources": ({"x": {"resource_type": "nothing"}},),
    "resources_id": ("latest", "rs-?"),
    "keep_last": (-1,),
    "after": ("nothing", "-1"),
    "rollout_ids": ([],),
}


class Story:
    """One seed's operations on one store, and the answers to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.now = START
        self.ids: list[str] = []
        self.attempts: list[tuple[str, str]] = []
        self.cursors: list[str] = ["0"]
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def tell(self, store: LightningStore, steps: int) -> list[Any]:
        """Run the operations one after the other; returns the comparable answers."""
        answers: list[Any] = []
        for step in range(steps):
            name, arguments = self.draw()
            self.asked.append((name, arguments))
            try:
                answer = await with_token(f"story {self.seed} step {step}", getattr(store, name)(**arguments))
            except (AgentLightningError, ValueError, TypeError) as error:
                answers.append(type(error).__name__)
            else:
                self.learn(answer)
                answers.append(comparable(answer))
        return answers

    def time(self) -> float:
        """Return the clock of the story."""
        return self.now

    def learn(self, answer: Any) -> None:
        """Remember ids, for later operations."""
        for value in answer if isinstance(answer, list) else [answer]:
            attempt = getattr(value, "attempt", None)
            if attempt is not None and (value.rollout_id, attempt.attempt_id) not in self.attempts:
                self.attempts.append((value.rollout_id, attempt.attempt_id))
            rollout_id = getattr(value, "rollout_id", None)
            if rollout_id is not None and rollout_id not in self.ids:
                self.ids.append(rollout_id)
        cursor = getattr(answer, "cursor", None)
        if cursor is not None:
            self.cursors.append(cursor)

    # --- drawing ---------------------------------------------------------------------------------------------------

    def draw(self) -> tuple[str, dict[str, Any]]:
        """Return an operation and its arguments; one in eight has a wrong one."""
        self.now += self.random.choice((0, 0, 0, 0, 1, 2))
        key = self.random.choice(list(OPERATIONS))
        needed, optional = OPERATIONS[key]
        names = [*needed.split(), *(name for name in optional.split() if self.random.random() < 0.4)]
        arguments = {name: (VALUES.get(f"{key} {name}") or VALUES[name])(self) for name in names}
        if "attempt" in arguments:
            arguments["rollout_id"], arguments["attempt_id"] = arguments.pop("attempt")
        wrong = sorted(arguments.keys() & WRONG.keys())
        if wrong and self.random.random() < 0.15:
            argument = self.random.choice(wrong)
            arguments[argument] = self.random.choice(WRONG[argument])
        return key.split()[0], arguments

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def rollout(self) -> str:
        unknown = ("ro-nothing", "search", "delete") if self.random.random() < 0.1 else ()
        return self.one(*self.ids[-8:], *unknown, "ro-0")

    def attempt(self) -> tuple[str, str]:
        rollout_id, attempt_id = self.one(*self.attempts[-8:], ("ro-0", "at-0"))
        return (rollout_id, "latest") if self.random.random() < 0.2 else (rollout_id, attempt_id)

    def config(self) -> RolloutConfig:
        return RolloutConfig(
            max_attempts=self.one(1, 2, 3), retry_condition=self.one([], ["failed", "timeout"]),
            retry_delay_seconds=self.one(0.0, 0.0, 5.0),
        )  # fmt: skip

    def span(self) -> Span:
        rollout_id, attempt_id = self.attempt()
        number = self.random.randrange(1, 40)
        return span_of(
            (rollout_id, attempt_id), self.one("a", "b.c"), self.one(-1, -1, number), attributes={"n": number},
            trace_id=f"{number % 3:032x}", span_id=f"{number:016x}", start_time=self.now,
        )  # fmt: skip

    def resources(self) -> dict[str, Any]:
        llm = LLM(endpoint="http://h/v1", model=self.one("m", "n"))
        return {"llm": llm, "p": PromptTemplate(template="{x}", engine="f-string")}


PAGE = "sort_by sort_order limit offset"
OF_ROLLOUTS = ("start_time", "end_time", "status", "rollout_id", "mode", "priority", "config")
OPERATIONS: dict[str, tuple[str, str]] = {
    "enqueue_rollout": ("input", "mode config metadata run_id priority not_before resources_id"),
    "enqueue_many_rollouts": ("rollouts", ""),
    "start_rollout": ("input", "worker_id run_id config"),
    "dequeue_rollout": ("", "worker_id run_id"),
    "dequeue_many_rollouts": ("limit", "worker_id run_id"),
    "start_attempt": ("rollout_id", "worker_id"),
    "add_many_spans": ("spans", ""),
    "add_span": ("span", ""),
    "get_next_span_sequence_id": ("attempt", ""),
    "get_many_span_sequence_ids": ("rollout_attempt_ids", ""),
    "update_rollout": ("rollout_id", "status input mode metadata config resources_id"),
    "update_attempt": ("attempt", "status worker_id last_heartbeat_time metadata outcome outcome_reason"),
    "update_worker": ("worker_id", "heartbeat_stats run_id"),
    "delete_rollouts by id": ("rollout_ids", "force"),
    "delete_rollouts by a bound": ("keep_last", "run_id"),
    "query_rollouts": ("", f"status_in filter_logic rollout_id_in run_id rollout_id_contains {PAGE}"),
    "query_attempts": ("rollout_id", PAGE),
    "query_spans": ("rollout_id", f"name name_contains span_id trace_id_contains filter_logic {PAGE}"),
    "query_spans of an attempt": ("attempt", f"name name_contains span_id trace_id_contains filter_logic {PAGE}"),
    "query_workers": ("", f"status_in worker_id_contains filter_logic {PAGE}"),
    "query_resources": ("", f"resources_id resources_id_contains {PAGE}"),
    "query_events": ("after limit", "run_id"),
    "wait_for_rollouts": ("rollout_ids timeout", ""),
    "get_rollout_by_id": ("rollout_id", ""),
    "get_latest_attempt": ("rollout_id", ""),
    "get_worker_by_id": ("worker_id", ""),
    "get_resources_by_id": ("resources_id", "version"),
    "get_latest_resources": ("", "run_id"),
    "add_resources": ("resources", "run_id"),
    "update_resources": ("resources_id resources", "run_id"),
    "statistics": ("", ""),
}
"""The arguments that a call of an operation has, and those that it may have; `attempt` is the two ids of one."""
VALUES: dict[str, Callable[[Story], Any]] = {
    "after": lambda s: s.cursors[-1],
    "attempt": Story.attempt,
    "config": Story.config,
    "filter_logic": lambda s: s.one("and", "or"),
    "force": lambda s: s.one(True, False),
    "heartbeat_stats": lambda s: {"cpu": 0.5},
    "input": lambda s: s.one(1, "text", {"a": [None, 1.5]}),
    "keep_last": lambda s: s.one(0, 3, 8),
    "last_heartbeat_time": Story.time,
    "limit": lambda s: s.one(-1, 0, 1, 2, 3, 50),
    "dequeue_many_rollouts limit": lambda s: s.one(0, 1, 2, 3),
    "query_events limit": lambda s: 100,
    "metadata": lambda s: {"k": [1, "ä"]},
    "update_rollout metadata": lambda s: s.one({"m": 1}, None),
    "mode": lambda s: s.one("train", "val", "test"),
    "update_rollout mode": lambda s: s.one("val", None),
    "name": lambda s: s.one("a", "c"),
    "name_contains": lambda s: ".",
    "not_before": lambda s: s.now + s.one(-5, 5),
    "offset": lambda s: s.one(0, 1, 2, 40),
    "outcome": lambda s: s.one("scored", "policy_fault"),
    "outcome_reason": lambda s: "why",
    "priority": lambda s: s.one(-1, 0, 5),
    "resources": Story.resources,
    "resources_id": lambda s: s.one(*RESOURCES),
    "enqueue_rollout resources_id": lambda s: s.one(*RESOURCES, "rs-?"),
    "update_rollout resources_id": lambda s: s.one(*RESOURCES, None),
    "resources_id_contains": lambda s: s.one("rs", " "),
    "rollout_attempt_ids": lambda s: [s.attempt() for _ in range(s.one(0, 1, 3))],
    "rollout_id": Story.rollout,
    "rollout_id_contains": lambda s: s.one("a", "ro-", "1"),
    "rollout_id_in": lambda s: [s.rollout() for _ in range(s.one(0, 1, 4))],
    "rollout_ids": lambda s: [s.rollout() for _ in range(s.one(0, 1, 4))],
    "delete_rollouts by id rollout_ids": lambda s: [s.rollout()],
    "rollouts": lambda s: [EnqueueRolloutRequest(input=n, run_id=s.one(*RUNS)) for n in range(s.one(0, 1, 3))],
    "run_id": lambda s: s.one(*RUNS),
    "sort_order": lambda s: s.one("asc", "desc"),
    "query_rollouts sort_by": lambda s: s.one(*OF_ROLLOUTS, None),
    "query_attempts sort_by": lambda s: s.one("sequence_id", "status", "end_time", "worker_id", "metadata", None),
    "sort_by": lambda s: s.one("sequence_id", "name", "start_time", "span_id", "status", None),
    "query_workers sort_by": lambda s: s.one("worker_id", "status", "last_heartbeat_time", None),
    "query_resources sort_by": lambda s: s.one("resources_id", "version", "update_time", None),
    "span": Story.span,
    "span_id": lambda s: f"{s.one(1, 2, 3):016x}",
    "spans": lambda s: [s.span() for _ in range(s.one(0, 1, 3))],
    "status": lambda s: s.one(*STATUSES),
    "update_attempt status": lambda s: s.one(*ATTEMPTS),
    "status_in": lambda s: s.random.sample(STATUSES, s.one(0, 1, 3)),
    "query_workers status_in": lambda s: [s.one("idle", "busy", "unknown")],
    "timeout": lambda s: 0,
    "trace_id_contains": lambda s: "1",
    "version": lambda s: s.one(1, 2, 9),
    "worker_id": lambda s: s.one(*WORKERS),
    "worker_id_contains": lambda s: s.one("w", "1"),
}  # fmt: skip
"""A value of an argument, drawn; for one operation alone behind its name."""


def comparable(value: Any) -> Any:
    """Return an answer without what may differ: parts of a second, cursors, the name and age of a store."""
    if isinstance(value, PaginatedResult):
        page: Any = value
        return {
            "items": [comparable(item) for item in page.items],
            "total": page.total,
            "at": (page.limit, page.offset),
        }
    if isinstance(value, EventPage):  # what one call changed is told in any order
        return sorted((comparable(event) for event in value.events), key=lambda event: event["rollout_id"])
    if isinstance(value, BaseModel):
        return comparable(value.model_dump(mode="json"))
    if isinstance(value, dict):
        left_out = ("cursor", "uptime", "name") if "uptime" in value else ("cursor",)
        return {
            key: math.floor(item)
            if key.endswith(("_time", "_before")) and isinstance(item, float)
            else comparable(item)
            for key, item in value.items()
            if key not in left_out and not key.startswith(("eviction", "safe", "memory", "total_span_bytes"))
        }
    return [comparable(item) for item in value] if isinstance(value, (list, tuple)) else value


SETTINGS = {"scan_debounce_seconds": 1e9, "lease_seconds": 1e9, "synchronous": "NORMAL"}
PLACES = [(kind, over) for over in ("in process", "over HTTP") for kind in ("memory", "sqlite", "postgres", "mongo")]


@pytest.mark.parametrize(("kind", "over"), PLACES[1:])
async def test_a_story_is_answered_as_memory_answers_it(
    kind: str, over: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await compare(int(os.environ.get("AGL_STORY", "1")), 100, kind, over, request, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("story", range(int(os.environ.get("AGL_STORIES", "40"))))
async def test_twenty_thousand_operations_are_answered_as_memory_answers_them(
    story: int, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for number, (kind, over) in enumerate(PLACES[1:]):
        (tmp_path / str(number)).mkdir()
        await compare(100 + story, 500, kind, over, request, tmp_path / str(number))


async def compare(seed: int, steps: int, kind: str, over: str, request: pytest.FixtureRequest, folder: Path) -> None:
    """Run one story in memory and in another store, and compare the answers one by one."""
    expected_story, story = Story(seed), Story(seed)
    with mock.patch.object(SharedClock, "set"):
        with mock.patch("time.time", expected_story.time):
            memory = InMemoryLightningStore(scan_debounce_seconds=1e9, lease_seconds=1e9)
            expected = await expected_story.tell(memory, steps)
            await memory.close()
        with mock.patch("time.time", story.time):
            async with fresh_place(kind, request, folder).opened(**SETTINGS) as store, serving(store) as (_, client):
                answers = await story.tell(store if over == "in process" else client, steps)
    for number, (answer, expected_answer) in enumerate(zip(answers, expected, strict=True)):
        assert answer == expected_answer, f"step {number} of story {seed}: {expected_story.asked[number]}"
