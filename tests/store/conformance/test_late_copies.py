"""A request that is delivered again, when the world has gone on, changes nothing and is answered like the first one.

Every kind of request that changes something is a story: the call, what happens after it, and what a copy of the call,
delivered then, may be answered with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from agentlightning.errors import ConflictError, GoneError, NotFoundError, TokenReusedError
from agentlightning.store.base import LightningStore
from agentlightning.store.operations import OPERATIONS
from agentlightning.types import EnqueueRolloutRequest, NamedResources, PromptTemplate, RunRecord, Span
from tests.store.parts import required, span_of, with_token

Ids = dict[str, Any]
Act = Callable[[LightningStore, Ids], Awaitable[Any]]
MANY = 40
"""Newer calls than any record remembers by itself."""
PROMPT: NamedResources = {"p": PromptTemplate(template="one", engine="f-string")}
OTHER_PROMPT: NamedResources = {"p": PromptTemplate(template="two", engine="f-string")}


@dataclass
class Story:
    """A call whose copy, if it is carried out, would show. In arguments `$started` is the id that `before` noted."""

    operation: str
    name: str
    before: Act
    arguments: dict[str, Any]
    then: Act
    other: dict[str, Any] | None
    """Arguments that the same token may not come with; None where nothing distinguishes the call."""
    refused: type[Exception] | None = None
    """The error that refuses the call and its copy."""
    copy_refused: type[Exception] | None = None
    """An error that may refuse the copy alone."""

    def __str__(self) -> str:
        return f"{self.operation}, {self.name}"

    async def call(self, store: LightningStore, ids: Ids, *, other: bool = False) -> Any:
        """Return the answer to the call, or the error that refuses it."""
        arguments = {**self.arguments, **((self.other or {}) if other else {})}
        if self.operation in ("add_span", "add_many_spans"):
            arguments = {"span": _span(ids)} if self.operation == "add_span" else {"spans": [_span(ids)]}
        filled = {name: _filled(value, ids) for name, value in arguments.items() if value is not ...}
        try:
            return await with_token("the token", getattr(store, self.operation)(**filled))
        except (ConflictError, NotFoundError, GoneError, TokenReusedError) as error:
            return error


def _filled(value: Any, ids: Ids) -> Any:
    """Replace `$name`, by itself or in a list, by the id of that name."""
    if isinstance(value, list):
        return [_filled(each, ids) for each in value]
    return ids[value[1:]] if isinstance(value, str) and value.startswith("$") else value


async def nothing(store: LightningStore, ids: Ids) -> None:
    """Change nothing."""


async def started(store: LightningStore, ids: Ids) -> None:
    ids["started"] = (await store.start_rollout("started", worker_id="w", run_id="r")).rollout_id


async def queued(store: LightningStore, ids: Ids) -> None:
    ids["queued"] = (await store.enqueue_rollout("queued", run_id="r")).rollout_id


async def ended(store: LightningStore, ids: Ids) -> None:
    await started(store, ids)
    await store.update_attempt(ids["started"], "latest", status="succeeded")


async def idle(store: LightningStore, ids: Ids) -> None:
    """The next question of this worker goes on with this wait, and does not look at the queue by itself."""
    assert await with_token("before", store.dequeue_rollout(worker_id="w", run_id="r", timeout=0.1)) is None


async def work_comes(store: LightningStore, ids: Ids) -> None:
    await store.enqueue_rollout("more", run_id="r")


async def made_is_deleted(store: LightningStore, ids: Ids) -> None:
    await store.delete_rollouts(rollout_ids=_ids(ids["answer"]), force=True)
    await work_comes(store, ids)


async def made_is_done(store: LightningStore, ids: Ids) -> None:
    for _ in _ids(ids["answer"]):
        claim = await store.dequeue_rollout(worker_id="other", run_id="r")
        if claim is not None:
            await store.update_attempt(claim.rollout_id, "latest", status="succeeded")


async def many_updates(store: LightningStore, ids: Ids) -> None:
    for number in range(MANY):
        update = store.update_rollout(ids["started"], metadata={"n": number})
        await with_token(f"newer {number} {ids['started']}", update)


def _ids(answer: Any) -> list[str]:
    answers = cast("list[Any]", answer) if isinstance(answer, list) else [answer]
    return [each.rollout_id for each in answers]


def _span(ids: Ids) -> Span:
    return span_of((ids["started"], ids["attempt"]), "late", span_id="00000000000000aa")


async def _with_attempt(store: LightningStore, ids: Ids) -> None:
    await started(store, ids)
    latest = required(await store.get_latest_attempt(ids["started"]))
    ids["attempt"] = latest.attempt_id


async def _restarted(store: LightningStore, ids: Ids) -> None:
    await store.start_attempt(ids["started"], worker_id="w2")
    await many_updates(store, ids)


async def _claimed_again(store: LightningStore, ids: Ids) -> None:
    required(await store.dequeue_rollout(worker_id="w2", run_id="r"))


async def _revived(store: LightningStore, ids: Ids) -> None:
    await store.update_rollout(ids["started"], status="queuing")


async def _ended_now(store: LightningStore, ids: Ids) -> None:
    await store.update_attempt(ids["started"], "latest", status="succeeded")


async def _another_ends(store: LightningStore, ids: Ids) -> None:
    other = await store.start_rollout("another", run_id="r")
    await store.update_attempt(other.rollout_id, "latest", status="succeeded")


async def _newer_versions(store: LightningStore, ids: Ids) -> None:
    for number in range(12):
        newer: NamedResources = {"p": PromptTemplate(template=f"newer {number}", engine="f-string")}
        await with_token(f"newer version {number}", store.update_resources("res", newer))


async def _newer_beats(store: LightningStore, ids: Ids) -> None:
    for number in range(9):
        await with_token(f"newer beat {number}", store.update_worker("w", {"beat": number}))


async def _is_deleted(store: LightningStore, ids: Ids) -> None:
    await store.delete_rollouts(rollout_ids=[ids["started"]], force=True)


async def run_started(store: LightningStore, ids: Ids) -> None:
    await store.start_run("r", config={"lr": 1})
    await store.add_run_records("r", [RunRecord(kind="step", step=n) for n in (1, 2, 3)])


async def _run_goes_on(store: LightningStore, ids: Ids) -> None:
    """Forty more calls than its row remembers, and the run ends, is begun again, and has gone back a step."""
    await store.update_run("r", state="failed")
    await store.start_run("r", config={"lr": 2})
    await store.rewind_run("r", 1)
    for number in range(MANY):
        await with_token(f"newer of run {number}", store.update_run("r", metadata={"n": number}))
    await store.add_run_records("r", [RunRecord(kind="step", step=2, data={"second": True})])


async def _run_is_deleted(store: LightningStore, ids: Ids) -> None:
    await store.delete_runs(["r"], force=True)


STEPS = [RunRecord(kind="step", step=n) for n in range(6)]
REQUESTS = [EnqueueRolloutRequest(input=n, run_id="r") for n in range(4)]
STARTED, OF_WORKER = {"rollout_id": "$started"}, {"worker_id": "w", "run_id": "r"}
LATEST, STOP = {**STARTED, "attempt_id": "latest"}, {"run_id": "r", "stop_reason": "enough"}
BEAT = {"worker_id": "w", "heartbeat_stats": {"beat": -1}}
SHORT_WAIT, OTHER_RUN, OTHER_BEAT = (
    {**OF_WORKER, "timeout": 0.05},
    {"run_id": "other"},
    {"heartbeat_stats": {"beat": -2}},
)

STORIES = [
    Story("start_run", "ended and begun again since", nothing, {"run_id": "r", "config": {"lr": 1}}, _run_goes_on,
          {"config": {"lr": 3}}),
    Story("start_run", "deleted since", nothing, {"run_id": "r", "config": {"lr": 1}}, _run_is_deleted,
          {"config": {"lr": 3}}, copy_refused=GoneError),
    Story("update_run", "begun again since", run_started, {**STOP, "state": "stopped"}, _run_goes_on,
          {"stop_reason": ..., "state": "failed"}),
    Story("update_run", "a stop note that made the run, which was deleted since", nothing, STOP, _run_is_deleted,
          {"stop_reason": "other"}, copy_refused=GoneError),
    Story("add_run_records", "gone back behind them since", run_started, {"run_id": "r", "records": STEPS[4:5]},
          _run_goes_on, {"records": STEPS[5:6]}),
    Story("add_run_records", "deleted since", run_started, {"run_id": "r", "records": STEPS[4:5]}, _run_is_deleted,
          None, copy_refused=NotFoundError),
    Story("rewind_run", "gone on since", run_started, {"run_id": "r", "step": 1}, _run_goes_on, {"step": 0}),
    Story("delete_runs", "begun anew since", run_started, {"run_ids": ["r"], "force": True}, run_started,
          {"force": ...}),
    Story("delete_runs", "refused then, ended since", run_started, {"run_ids": ["r"]}, _run_goes_on,
          {"run_ids": ["r", "s"]}, refused=ConflictError),
    Story("enqueue_rollout", "deleted since", nothing, {"input": "x", "run_id": "r"}, made_is_deleted, {"input": "y"},
          copy_refused=GoneError),
    Story("enqueue_rollout", "done since", nothing, {"input": "x", "run_id": "r", "metadata": {"a": 1}}, made_is_done,
          {"metadata": {"a": 2}}),
    Story("enqueue_many_rollouts", "one of them deleted since", nothing, {"rollouts": REQUESTS[:3]},
          lambda s, i: s.delete_rollouts(rollout_ids=_ids(i["answer"])[1:2], force=True), {"rollouts": REQUESTS},
          copy_refused=GoneError),
    Story("start_rollout", "deleted since", nothing, {"input": "x", **OF_WORKER}, made_is_deleted, {"worker_id": "w2"},
          copy_refused=GoneError),
    Story("start_rollout", "ended since", nothing, {"input": "x", **OF_WORKER},
          lambda s, i: s.update_attempt(_ids(i["answer"])[0], "latest", status="succeeded"), {"input": "y"}),
    Story("dequeue_many_rollouts", "nothing there then", nothing, {"limit": 2, **OF_WORKER}, work_comes,
          {"worker_id": "w2"}),
    Story("dequeue_many_rollouts", "nothing there then, and nobody named", nothing, {"limit": 2, "run_id": "r"},
          work_comes, {"limit": 1}),
    Story("dequeue_rollout", "nothing there then, after a wait", nothing, SHORT_WAIT, work_comes, OTHER_RUN),
    Story("dequeue_rollout", "nothing there then, one of many questions of an idle worker", idle, SHORT_WAIT,
          work_comes, OTHER_RUN),
    Story("dequeue_many_rollouts", "the claimed one deleted since", queued, {"limit": 1, **OF_WORKER}, made_is_deleted,
          {"limit": 2}),
    Story("start_attempt", "ended and begun anew", started, {**STARTED, "worker_id": "w2"}, _restarted,
          {"worker_id": "w3"}),
    Story("update_rollout", "claimed since", ended, {**STARTED, "status": "queuing"}, _claimed_again,
          {"status": "cancelled"}),
    Story("update_rollout", "many newer ones", started, {**STARTED, "metadata": {"first": True}}, many_updates,
          {"metadata": {"first": False}}),
    Story("update_rollout", "refused then, allowed now", ended, {**STARTED, "status": "running"}, _revived,
          {"status": "cancelled"}, refused=ConflictError),
    Story("update_attempt", "the latest is another now", started, {**LATEST, "status": "failed"}, _restarted,
          {"status": "succeeded"}),
    Story("update_attempt", "refused then for there was none", queued,
          {"rollout_id": "$queued", "attempt_id": "latest", "status": "succeeded"}, _claimed_again,
          {"status": "failed"}, refused=NotFoundError),
    Story("finish_attempt", "begun anew since", started, STARTED, _restarted, {"status": "failed"}),
    Story("finish_rollout", "begun anew since", started, {**STARTED, "response": "a"}, _restarted, {"response": "b"}),
    Story("add_resources", "others published since", nothing, {"resources": PROMPT, "run_id": "r"},
          lambda s, i: s.add_resources(OTHER_PROMPT, run_id="r"), {"resources": OTHER_PROMPT}),
    Story("update_resources", "many newer versions", nothing, {"resources_id": "res", "resources": PROMPT},
          _newer_versions, {"resources": OTHER_PROMPT}),
    Story("delete_rollouts", "refused then, ended since", started, {"rollout_ids": ["$started"]}, _ended_now,
          {"force": True}, refused=ConflictError),
    Story("delete_rollouts", "of a run, in which more has ended", ended, {"run_id": "r"}, _another_ends, OTHER_RUN),
    Story("delete_rollouts", "by a bound, beyond which more has ended", ended, {"keep_last": 0}, _another_ends,
          {"keep_last": 1}),
    Story("update_worker", "newer ones since", nothing, BEAT, _newer_beats, OTHER_BEAT),
    Story("register_worker", "newer heartbeats since", nothing, BEAT, _newer_beats, OTHER_BEAT),
    Story("add_span", "ended since", _with_attempt, {}, _ended_now, None),
    Story("add_many_spans", "begun anew since", _with_attempt, {}, _restarted, None),
    Story("add_many_spans", "deleted since", _with_attempt, {}, _is_deleted, None, copy_refused=NotFoundError),
]  # fmt: skip


async def world(store: LightningStore, *, events: bool = False) -> dict[str, Any]:
    """Return all that can be seen of a store, beside the numbers that are given to spans.

    `events` are told by another server a moment later.
    """
    rollouts = [rollout.model_dump() for rollout in await store.query_rollouts()]
    ids = [rollout["rollout_id"] for rollout in rollouts]
    resources = [update.model_dump() for update in await store.query_resources()]
    return {
        "rollouts": rollouts,
        "attempts": {i: [a.model_dump() for a in await store.query_attempts(i)] for i in ids},
        "spans": {i: [span.model_dump() for span in await store.query_spans(i)] for i in ids},
        "resources": resources,
        "latest": await store.get_latest_resources(run_id="r"),
        "workers": [worker.model_dump() for worker in await store.query_workers()],
        "runs": [run.model_dump() for run in await store.query_runs()],
        "records": [record.model_dump() for record in await store.query_run_records("r")],
        "events": (await store.query_events(after="0", limit=1000)).events if events else [],
    }


async def check_late_copy(
    story: Story, store: LightningStore, open_other: Callable[[], Awaitable[LightningStore]]
) -> None:
    """Run a story in one store and deliver the copy to another one over the same data."""
    ids: Ids = {}
    await story.before(store, ids)
    answer = ids["answer"] = await story.call(store, ids)
    _check_refusal(answer, story.refused)
    await story.then(store, ids)
    expected = await world(store)
    other_store = await open_other()
    here = other_store is store
    before = await world(other_store, events=here)
    assert before | {"events": []} == expected
    for _ in range(2):
        copy = await story.call(other_store, ids)
        assert await world(other_store, events=here) == before
        if story.refused is not None:
            assert (type(copy), str(copy)) == (type(answer), str(answer))
        elif story.copy_refused is not None:
            _check_refusal(copy, story.copy_refused)
        else:
            _check_same(copy, answer)
    if story.other is not None:
        reused = await story.call(other_store, ids, other=True)
        assert type(reused) in (TokenReusedError, story.copy_refused), reused
        if type(reused) is TokenReusedError and story.other.keys() <= {"input", "metadata"}:
            assert f"({', '.join(story.other)})" in str(reused)
        assert await world(other_store, events=here) == before


def _check_refusal(answer: Any, expected: type[Exception] | None) -> None:
    assert type(answer) is expected if expected is not None else not isinstance(answer, Exception), answer


def _check_same(copy: Any, answer: Any) -> None:
    """Compare the answer to a copy with the first one, unless it is None or empty."""
    if copy is not None and copy != []:
        assert _identity(copy) == _identity(answer)


def _identity(answer: Any) -> Any:
    """Return the part of an answer that later changes do not affect."""
    if isinstance(answer, list):
        return [_identity(each) for each in cast("list[Any]", answer)]
    for name in ("attempt_id", "rollout_id", "resources_id", "worker_id", "span_id", "run_id"):
        if hasattr(answer, name):
            return getattr(answer, name), getattr(answer, "version", None)
    return answer


def test_every_operation_that_carries_a_token_has_a_story() -> None:
    carries = {each.name for each in OPERATIONS.values() if each.retry == "token"}
    assert carries <= {story.operation for story in STORIES}


@pytest.mark.parametrize("story", STORIES, ids=str)
async def test_a_copy_that_comes_late_changes_nothing(store: LightningStore, story: Story) -> None:
    async def here() -> LightningStore:
        return store

    await check_late_copy(story, store, here)
