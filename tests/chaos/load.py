"""Work for a store, and the model it is held against: every rollout says in its input what must become of it.

Actors (producers, workers, publishers) use a store as programs do and note each fact that was acknowledged to them.
`problems` compares a store with the facts: exactly, when every call has been answered, or as far as the facts go.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, PromptTemplate, RolloutConfig, Span
from tests.store.parts import span_of

Fact = list[Any]
"""["enqueued", name, rollout id], ["claimed", rollout id, attempt id], ["ended", rollout id, attempt id, status],
["span", rollout id, attempt id, span id, number], ["published", resources id, version, text], ["waited", rollout id]"""


class Actor:
    """Calls a store, and counts and records the answers."""

    def __init__(self, store: LightningStore, name: str, seed: int, note: Callable[[Fact], None]) -> None:
        self.name = name
        self.calls = 0
        self.random = random.Random(f"{seed} {name}")
        self.note = note
        self._store = store

    async def do(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Call an operation."""
        self.calls += 1
        return await getattr(self._store, operation)(*args, **kwargs)


class Producer(Actor):
    """Enqueues rollouts, one and many, and waits for their ends, until it is told that it is enough."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: list[str] = []
        self._requests = 0

    async def run(self, enough: Callable[[], bool], backlog: int = 40) -> None:
        waited = 0
        while not enough():
            requests = [self._request() for _ in range(self.random.choice((1, 1, 1, 5)))]
            if len(requests) == 1:
                one = requests[0]
                made = [await self.do("enqueue_rollout", one.input, config=one.config)]
            else:
                made = await self.do("enqueue_many_rollouts", requests)
            for request, rollout in zip(requests, made, strict=True):
                self.made.append(rollout.rollout_id)
                self.note(["enqueued", request.input["name"], rollout.rollout_id])
            if len(self.made) - waited > backlog:
                await self._wait(self.made[waited : waited + backlog // 2])
                waited += backlog // 2
        await self._wait(self.made[waited:])

    def _request(self) -> EnqueueRolloutRequest:
        attempts = self.random.choice((1, 1, 1, 2, 3))
        config = RolloutConfig(max_attempts=attempts, retry_condition=["failed"])
        self._requests += 1
        plan = {"name": f"{self.name}-{self._requests}", "attempts": attempts, "spans": self.random.randint(0, 6)}
        return EnqueueRolloutRequest(input=plan, config=config)

    async def _wait(self, rollout_ids: list[str]) -> None:
        remaining = rollout_ids
        while remaining:
            ended = await self.do("wait_for_rollouts", rollout_ids=remaining, timeout=self.random.choice((0.05, 5.0)))
            for rollout in ended:
                self.note(["waited", rollout.rollout_id])
            done = {rollout.rollout_id for rollout in ended}
            remaining = [rollout_id for rollout_id in remaining if rollout_id not in done]


class Worker(Actor):
    """Claims, adds the spans that the input asks for, and ends the attempt as the input asks."""

    async def run(self, over: asyncio.Event) -> None:
        await self.do("update_worker", self.name, {"calls": self.calls})
        while not over.is_set():
            limit = self.random.choice((1, 1, 3))
            claims = await self.do("dequeue_many_rollouts", limit=limit, worker_id=self.name, timeout=0.1)
            for claim in claims:
                self.note(["claimed", claim.rollout_id, claim.attempt.attempt_id])
            for claim in claims:
                await self._work_on(claim)

    async def _work_on(self, claim: AttemptedRollout) -> None:
        names = [f"span-{i}" for i in range(claim.input["spans"])]
        await self.random.choice((self._spans_one_by_one, self._spans_at_once))(claim, names)
        if self.random.random() < 0.2:
            await self.do("update_worker", self.name, {"calls": self.calls})
        last = claim.attempt.sequence_id >= claim.input["attempts"]
        status = "succeeded" if last else "failed"
        await self.do("update_attempt", claim.rollout_id, claim.attempt.attempt_id, status=status)
        self.note(["ended", claim.rollout_id, claim.attempt.attempt_id, status])

    async def _spans_one_by_one(self, claim: AttemptedRollout, names: list[str]) -> None:
        pair = (claim.rollout_id, claim.attempt.attempt_id)
        for name in names:
            number = await self.do("get_next_span_sequence_id", *pair) if self.random.random() < 0.3 else -1
            span = self._span(claim, name, number)
            await self.do("add_span", span)
            self._note_span(span)

    async def _spans_at_once(self, claim: AttemptedRollout, names: list[str]) -> None:
        pair = (claim.rollout_id, claim.attempt.attempt_id)
        numbers = [-1] * len(names)
        if names and self.random.random() < 0.3:
            numbers = await self.do("get_many_span_sequence_ids", [pair] * len(names))
        spans = [self._span(claim, name, number) for name, number in zip(names, numbers, strict=True)]
        await self.do("add_many_spans", spans)
        for span in spans:
            self._note_span(span)

    def _span(self, claim: AttemptedRollout, name: str, number: int) -> Span:
        return span_of(claim, name, number, attributes={"text": "x" * self.random.choice((10, 200, 2000))})

    def _note_span(self, span: Span) -> None:
        number = span.sequence_id if span.sequence_id >= 0 else None
        self.note(["span", span.rollout_id, span.attempt_id, span.span_id, number])


class Publisher(Actor):
    """Publishes one version after the other of a set of its own."""

    async def run(self, over: asyncio.Event, pause: float = 0.01) -> None:
        count = 0
        while not over.is_set():
            count += 1
            text = f"{self.name} {count}"
            resources = {"prompt": PromptTemplate(template=text, engine="f-string")}
            update = await self.do("update_resources", self.name, resources)
            self.note(["published", self.name, update.version, text])
            await asyncio.sleep(pause)


async def problems(store: LightningStore, facts: Iterable[Fact], *, complete: bool) -> list[str]:
    """Return how a store differs from the facts. If every call was answered (`complete`), it is exactly what they say;
    else it holds what they say, and what they do not mention is not looked at."""
    facts_by_kind: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        facts_by_kind[fact[0]].append(fact)
    mentioned = {fact[2 if fact[0] == "enqueued" else 1] for name in facts_by_kind for fact in facts_by_kind[name]}
    chosen: dict[str, Any] = {} if complete else {"rollout_id_in": sorted(mentioned)}
    rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts(**chosen)}
    messages = [*_enqueued(facts_by_kind, rollouts, complete), *await _published(store, facts_by_kind, complete)]
    statuses: dict[tuple[str, str], str] = {}
    numbers: dict[tuple[str, str, str], int] = {}
    for rollout_id, rollout in rollouts.items():
        attempts = list(await store.query_attempts(rollout_id))
        spans = list(await store.query_spans(rollout_id))
        statuses.update({(rollout_id, attempt.attempt_id): attempt.status for attempt in attempts})
        numbers.update({(rollout_id, span.attempt_id, span.span_id): span.sequence_id for span in spans})
        messages += _one_rollout(rollout, attempts, spans, complete)
    messages += _claimed(facts_by_kind, set(statuses), complete)
    messages += [f"span {key} is missing" for key in _missing_spans(facts_by_kind, numbers)]
    for _, rollout_id, attempt_id, status in facts_by_kind["ended"]:
        if statuses.get((rollout_id, attempt_id)) != status:
            messages.append(f"{attempt_id} was {status} and is {statuses.get((rollout_id, attempt_id))}")
    for _, rollout_id in facts_by_kind["waited"]:
        if rollout_id not in rollouts or rollouts[rollout_id].status != "succeeded":
            messages.append(f"{rollout_id} was said to have ended")
    if complete:
        counts = await store.statistics()
        reported = (counts.get("total_rollouts"), counts.get("total_attempts"), counts.get("total_spans"))
        if reported != (len(rollouts), len(statuses), len(numbers)):
            messages.append(f"the statistics say {reported}, there are {(len(rollouts), len(statuses), len(numbers))}")
    return messages


def _enqueued(facts: dict[str, list[Fact]], rollouts: dict[str, Any], complete: bool) -> Iterable[str]:
    names = Counter(rollout.input["name"] for rollout in rollouts.values())
    yield from (f"{name} is there {count} times" for name, count in names.items() if count > 1)
    enqueued = {rollout_id: name for _, name, rollout_id in facts["enqueued"]}
    for rollout_id, name in enqueued.items():
        if rollout_id not in rollouts or rollouts[rollout_id].input["name"] != name:
            yield f"{name} was enqueued as {rollout_id} and is not there"
    if complete and set(rollouts) != set(enqueued):
        yield f"nobody was told of {set(rollouts) - set(enqueued)}"


def _claimed(facts: dict[str, list[Fact]], attempts: set[tuple[str, str]], complete: bool) -> Iterable[str]:
    counts = Counter((rollout_id, attempt_id) for _, rollout_id, attempt_id in facts["claimed"])
    yield from (f"{claim} was handed out {count} times" for claim, count in counts.items() if count > 1)
    yield from (f"the claim {claim} is lost" for claim in set(counts) - attempts)
    if complete:
        yield from (f"nobody was told of the claim {claim}" for claim in attempts - set(counts))


def _missing_spans(facts: dict[str, list[Fact]], numbers: dict[tuple[str, str, str], int]) -> Iterable[str]:
    for _, rollout_id, attempt_id, span_id, number in facts["span"]:
        key = (rollout_id, attempt_id, span_id)
        if key not in numbers or number not in (None, numbers[key]):
            yield f"{key} {number}"


def _one_rollout(rollout: Any, attempts: list[Any], spans: list[Any], complete: bool) -> Iterable[str]:
    name, planned, each = rollout.input["name"], rollout.input["attempts"], rollout.input["spans"]
    if [attempt.sequence_id for attempt in attempts] != list(range(1, len(attempts) + 1)):
        yield f"{name}: attempts are numbered {[attempt.sequence_id for attempt in attempts]}"
    if len({(span.attempt_id, span.span_id) for span in spans}) != len(spans):
        yield f"{name}: a span is there twice"
    if len({span.sequence_id for span in spans}) != len(spans):
        yield f"{name}: a number was given twice, {sorted(span.sequence_id for span in spans)}"
    if len(attempts) > planned:
        yield f"{name}: {len(attempts)} attempts, planned were {planned}"
    if complete:
        statuses = [attempt.status for attempt in attempts]
        if (rollout.status, statuses) != ("succeeded", ["failed"] * (planned - 1) + ["succeeded"]):
            yield f"{name}: is {rollout.status} after {statuses}, planned were {planned} attempts"
        named = Counter((span.attempt_id, span.name) for span in spans)
        if named != Counter((attempt.attempt_id, f"span-{i}") for attempt in attempts for i in range(each)):
            yield f"{name}: has {len(spans)} spans in {len(attempts)} attempts, planned were {each} in each"


async def _published(store: LightningStore, facts: dict[str, list[Fact]], complete: bool) -> list[str]:
    notes: list[str] = []
    last: dict[str, int] = {}
    for _, resources_id, version, text in facts["published"] if complete else facts["published"][-3:]:
        update = await store.get_resources_by_id(resources_id, version)
        prompt: Any = update.resources["prompt"] if update is not None else None
        if prompt is None or prompt.template != text:
            notes.append(f"{resources_id} version {version} was {text!r} and is {prompt}")
        if complete and version != last.get(resources_id, 0) + 1:
            notes.append(f"{resources_id}: after version {last.get(resources_id, 0)} came {version}")
        last[resources_id] = version
    for resources_id, version in last.items() if complete else ():
        newest = await store.get_resources_by_id(resources_id)
        if newest is None or newest.version != version:
            notes.append(f"{resources_id}: the newest version is {newest and newest.version}, published was {version}")
    return notes
