"""Random operations with random arguments, right and wrong, and how their answers are made comparable.

The operations of a story depend on its seed and on the ids that its operations make, which depend on their tokens: the
same ones on every store. Times are cut to whole seconds of a clock that the story moves.
"""

from __future__ import annotations

import math
import random
from typing import Any

from pydantic import BaseModel

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStore, request_token
from agentlightning.types import (
    LLM,
    EnqueueRolloutRequest,
    EventPage,
    PaginatedResult,
    PromptTemplate,
    RolloutConfig,
    Span,
)

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
            reset = request_token.set(f"story {self.seed} step {step}")
            try:
                answer = await getattr(store, name)(**arguments)
            except (AgentLightningError, ValueError, TypeError) as error:
                answers.append(type(error).__name__)
            else:
                self.learn(answer)
                answers.append(comparable(answer))
            finally:
                request_token.reset(reset)
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
        name = self.random.choice(NAMES)
        arguments: dict[str, Any] = getattr(self, name)()
        wrong = sorted(arguments.keys() & WRONG.keys())
        if wrong and self.random.random() < 0.15:
            argument = self.random.choice(wrong)
            arguments[argument] = self.random.choice(WRONG[argument])
        return name, arguments

    def some(self, **arguments: Any) -> dict[str, Any]:
        """Return some of the arguments."""
        return {name: value for name, value in arguments.items() if self.random.random() < 0.4}

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def rollout(self) -> str:
        return self.one(
            *self.ids[-8:], *(("ro-nothing", "search", "delete") if self.random.random() < 0.1 else ()), "ro-0"
        )

    def pair(self) -> tuple[str, str]:
        rollout_id, attempt_id = self.one(*self.attempts[-8:], ("ro-0", "at-0"))
        return (rollout_id, "latest") if self.random.random() < 0.2 else (rollout_id, attempt_id)

    def config(self) -> RolloutConfig:
        return RolloutConfig(
            max_attempts=self.one(1, 2, 3),
            retry_condition=self.one([], ["failed", "timeout"]),
            retry_delay_seconds=self.one(0.0, 0.0, 5.0),
        )

    def page(self, *fields: str) -> dict[str, Any]:
        return self.some(
            sort_by=self.one(*fields, None),
            sort_order=self.one("asc", "desc"),
            limit=self.one(-1, 0, 1, 2, 3, 50),
            offset=self.one(0, 1, 2, 40),
        )

    # --- operations ------------------------------------------------------------------------------------------------

    def enqueue_rollout(self) -> dict[str, Any]:
        options = self.some(
            mode=self.one("train", "val", "test"), config=self.config(), metadata={"k": [1, "ä"]},
            run_id=self.one(*RUNS), priority=self.one(-1, 0, 5), not_before=self.now + self.one(-5, 5),
            resources_id=self.one(*RESOURCES, "rs-?"),
        )  # fmt: skip
        return {"input": self.one(1, "text", {"a": [None, 1.5]}), **options}

    def enqueue_many_rollouts(self) -> dict[str, Any]:
        return {"rollouts": [EnqueueRolloutRequest(input=n, run_id=self.one(*RUNS)) for n in range(self.one(0, 1, 3))]}

    def start_rollout(self) -> dict[str, Any]:
        return {"input": 1, **self.some(worker_id=self.one(*WORKERS), run_id=self.one(*RUNS), config=self.config())}

    def dequeue_rollout(self) -> dict[str, Any]:
        return self.some(worker_id=self.one(*WORKERS), run_id=self.one(*RUNS))

    def dequeue_many_rollouts(self) -> dict[str, Any]:
        return {"limit": self.one(0, 1, 2, 3), **self.dequeue_rollout()}

    def start_attempt(self) -> dict[str, Any]:
        return {"rollout_id": self.rollout(), **self.some(worker_id=self.one(*WORKERS))}

    def add_many_spans(self) -> dict[str, Any]:
        rollout_id, attempt_id = self.pair()
        return {"spans": [self._span(rollout_id, attempt_id) for _ in range(self.one(0, 1, 3))]}

    def add_span(self) -> dict[str, Any]:
        return {"span": self._span(*self.pair())}

    def _span(self, rollout_id: str, attempt_id: str) -> Span:
        number = self.random.randrange(1, 40)
        return Span.from_attributes(
            attributes={"n": number}, rollout_id=rollout_id, attempt_id=attempt_id,
            sequence_id=self.one(-1, -1, number), trace_id=f"{number % 3:032x}", span_id=f"{number:016x}",
            name=self.one("a", "b.c"), start_time=self.now,
        )  # fmt: skip

    def get_next_span_sequence_id(self) -> dict[str, Any]:
        rollout_id, attempt_id = self.pair()
        return {"rollout_id": rollout_id, "attempt_id": attempt_id}

    def get_many_span_sequence_ids(self) -> dict[str, Any]:
        return {"rollout_attempt_ids": [self.pair() for _ in range(self.one(0, 1, 3))]}

    def update_rollout(self) -> dict[str, Any]:
        options = self.some(
            status=self.one(*STATUSES), input="new", mode=self.one("val", None), metadata=self.one({"m": 1}, None),
            config=self.config(), resources_id=self.one(*RESOURCES, None),
        )  # fmt: skip
        return {"rollout_id": self.rollout(), **options}

    def update_attempt(self) -> dict[str, Any]:
        rollout_id, attempt_id = self.pair()
        options = self.some(
            status=self.one(*ATTEMPTS), worker_id=self.one(*WORKERS), last_heartbeat_time=self.now, metadata={"m": 1},
            outcome=self.one("scored", "policy_fault"), outcome_reason="why",
        )  # fmt: skip
        return {"rollout_id": rollout_id, "attempt_id": attempt_id, **options}

    def update_worker(self) -> dict[str, Any]:
        return {"worker_id": self.one(*WORKERS), **self.some(heartbeat_stats={"cpu": 0.5}, run_id=self.one(*RUNS))}

    def delete_rollouts(self) -> dict[str, Any]:
        if self.random.random() < 0.7:
            return {"rollout_ids": [self.rollout()], **self.some(force=self.one(True, False))}
        return {"keep_last": self.one(0, 3, 8), **self.some(run_id=self.one(*RUNS))}

    def query_rollouts(self) -> dict[str, Any]:
        options = self.some(
            status_in=self.random.sample(STATUSES, self.one(0, 1, 3)), filter_logic=self.one("and", "or"),
            rollout_id_in=[self.rollout() for _ in range(self.one(0, 1, 4))], run_id=self.one(*RUNS),
            rollout_id_contains=self.one("a", "ro-", "1"),
        )  # fmt: skip
        return {**options, **self.page("start_time", "end_time", "status", "rollout_id", "mode", "priority", "config")}

    def query_attempts(self) -> dict[str, Any]:
        return {"rollout_id": self.rollout(), **self.page("sequence_id", "status", "end_time", "worker_id", "metadata")}

    def query_spans(self) -> dict[str, Any]:
        rollout_id, attempt_id = self.pair()
        options = self.some(
            attempt_id=attempt_id, name=self.one("a", "c"), name_contains=".", span_id=f"{self.one(1, 2, 3):016x}",
            trace_id_contains="1", filter_logic=self.one("and", "or"),
        )  # fmt: skip
        return {
            "rollout_id": rollout_id,
            **options,
            **self.page("sequence_id", "name", "start_time", "span_id", "status"),
        }

    def query_workers(self) -> dict[str, Any]:
        options = self.some(
            status_in=[self.one("idle", "busy", "unknown")], worker_id_contains=self.one("w", "1"),
            filter_logic=self.one("and", "or"),
        )  # fmt: skip
        return {**options, **self.page("worker_id", "status", "last_heartbeat_time")}

    def query_resources(self) -> dict[str, Any]:
        options = self.some(resources_id=self.one(*RESOURCES), resources_id_contains=self.one("rs", " "))
        return {**options, **self.page("resources_id", "version", "update_time")}

    def query_events(self) -> dict[str, Any]:
        return {"after": self.cursors[-1], "limit": 100, **self.some(run_id=self.one(*RUNS))}

    def wait_for_rollouts(self) -> dict[str, Any]:
        return {"rollout_ids": [self.rollout() for _ in range(self.one(0, 1, 4))], "timeout": 0}

    def get_rollout_by_id(self) -> dict[str, Any]:
        return {"rollout_id": self.rollout()}

    def get_latest_attempt(self) -> dict[str, Any]:
        return {"rollout_id": self.rollout()}

    def get_worker_by_id(self) -> dict[str, Any]:
        return {"worker_id": self.one(*WORKERS)}

    def get_resources_by_id(self) -> dict[str, Any]:
        return {"resources_id": self.one(*RESOURCES), **self.some(version=self.one(1, 2, 9))}

    def get_latest_resources(self) -> dict[str, Any]:
        return self.some(run_id=self.one(*RUNS))

    def add_resources(self) -> dict[str, Any]:
        return {"resources": self._resources(), **self.some(run_id=self.one(*RUNS))}

    def update_resources(self) -> dict[str, Any]:
        return {"resources_id": self.one(*RESOURCES), **self.add_resources()}

    def _resources(self) -> dict[str, Any]:
        llm = LLM(endpoint="http://h/v1", model=self.one("m", "n"))
        return {"llm": llm, "p": PromptTemplate(template="{x}", engine="f-string")}

    def statistics(self) -> dict[str, Any]:
        return {}


NAMES = sorted(name for name in vars(Story) if name[0] != "_" and hasattr(LightningStore, name))
"""The operations, by the methods above."""


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
