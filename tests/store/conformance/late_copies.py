"""Every kind of request that changes something, as a story: the call, what happens in the world after it, and what a
copy of the call, delivered then, may be answered with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from agentlightning.errors import ConflictError, GoneError, NotFoundError, TokenReusedError
from agentlightning.store.base import LightningStore, request_token
from agentlightning.types import EnqueueRolloutRequest, NamedResources, PromptTemplate, RunRecord, Span

Ids = dict[str, Any]
Act = Callable[[LightningStore, Ids], Awaitable[Any]]
MANY = 40
"""Newer calls than any record remembers by itself."""
PROMPT: NamedResources = {"p": PromptTemplate(template="one", engine="f-string")}
OTHER_PROMPT: NamedResources = {"p": PromptTemplate(template="two", engine="f-string")}


@dataclass
class Story:
    """A call whose copy, if it is carried out, would show."""

    operation: str
    name: str
    before: Act
    call: Act
    then: Act
    other: Act | None
    """The call with other arguments; None where nothing distinguishes it from the first."""
    refused: type[Exception] | None = None
    """The error that refuses the call and its copy."""
    copy_refused: type[Exception] | None = None
    """An error that may refuse the copy alone."""

    def __str__(self) -> str:
        return f"{self.operation}, {self.name}"


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
    assert await with_token(store.dequeue_rollout(worker_id="w", run_id="r", timeout=0.1), "before") is None


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
        await with_token(update, f"newer {number} {ids['started']}")


def _ids(answer: Any) -> list[str]:
    answers = cast("list[Any]", answer) if isinstance(answer, list) else [answer]
    return [each.rollout_id for each in answers]


async def with_token(call: Awaitable[Any], token: str | None) -> Any:
    """Await a call that carries a token."""
    before = request_token.set(token)
    try:
        return await call
    finally:
        request_token.reset(before)


def _span(ids: Ids, name: str = "late") -> Span:
    return Span.from_attributes(
        attributes={"k": "v"}, rollout_id=ids["started"], attempt_id=ids["attempt"], sequence_id=-1, name=name,
        span_id="00000000000000aa",
    )  # fmt: skip


async def _with_attempt(store: LightningStore, ids: Ids) -> None:
    await started(store, ids)
    latest = await store.get_latest_attempt(ids["started"])
    assert latest is not None
    ids["attempt"] = latest.attempt_id


async def _restarted(store: LightningStore, ids: Ids) -> None:
    await store.start_attempt(ids["started"], worker_id="w2")
    await many_updates(store, ids)


async def _claimed_again(store: LightningStore, ids: Ids) -> None:
    claim = await store.dequeue_rollout(worker_id="w2", run_id="r")
    assert claim is not None


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
        await with_token(store.update_resources("res", newer), f"newer version {number}")


async def _newer_beats(store: LightningStore, ids: Ids) -> None:
    for number in range(9):
        await with_token(store.update_worker("w", {"beat": number}), f"newer beat {number}")


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
        await with_token(store.update_run("r", metadata={"n": number}), f"newer of run {number}")
    await store.add_run_records("r", [RunRecord(kind="step", step=2, data={"second": True})])


async def _run_is_deleted(store: LightningStore, ids: Ids) -> None:
    await store.delete_runs(["r"], force=True)


STORIES = [
    Story(
        "start_run", "ended and begun again since", nothing,
        lambda s, i: s.start_run("r", config={"lr": 1}), _run_goes_on,
        lambda s, i: s.start_run("r", config={"lr": 3}),
    ),
    Story(
        "start_run", "deleted since", nothing,
        lambda s, i: s.start_run("r", config={"lr": 1}), _run_is_deleted,
        lambda s, i: s.start_run("r", config={"lr": 3}), copy_refused=GoneError,
    ),
    Story(
        "update_run", "begun again since", run_started,
        lambda s, i: s.update_run("r", state="stopped", stop_reason="enough"), _run_goes_on,
        lambda s, i: s.update_run("r", state="failed"),
    ),
    Story(
        "update_run", "a stop note that made the run, which was deleted since", nothing,
        lambda s, i: s.update_run("r", stop_reason="enough"), _run_is_deleted,
        lambda s, i: s.update_run("r", stop_reason="other"), copy_refused=GoneError,
    ),
    Story(
        "add_run_records", "gone back behind them since", run_started,
        lambda s, i: s.add_run_records("r", [RunRecord(kind="step", step=4)]), _run_goes_on,
        lambda s, i: s.add_run_records("r", [RunRecord(kind="step", step=5)]),
    ),
    Story(
        "add_run_records", "deleted since", run_started,
        lambda s, i: s.add_run_records("r", [RunRecord(kind="step", step=4)]), _run_is_deleted, None,
        copy_refused=NotFoundError,
    ),
    Story(
        "rewind_run", "gone on since", run_started,
        lambda s, i: s.rewind_run("r", 1), _run_goes_on, lambda s, i: s.rewind_run("r", 0),
    ),
    Story(
        "delete_runs", "begun anew since", run_started,
        lambda s, i: s.delete_runs(["r"], force=True), run_started, lambda s, i: s.delete_runs(["r"]),
    ),
    Story(
        "delete_runs", "refused then, ended since", run_started,
        lambda s, i: s.delete_runs(["r"]), _run_goes_on, lambda s, i: s.delete_runs(["r", "s"]),
        refused=ConflictError,
    ),
    Story(
        "enqueue_rollout", "deleted since", nothing,
        lambda s, i: s.enqueue_rollout("x", run_id="r"), made_is_deleted,
        lambda s, i: s.enqueue_rollout("y", run_id="r"), copy_refused=GoneError,
    ),
    Story(
        "enqueue_rollout", "done since", nothing,
        lambda s, i: s.enqueue_rollout("x", run_id="r", metadata={"a": 1}), made_is_done,
        lambda s, i: s.enqueue_rollout("x", run_id="r", metadata={"a": 2}),
    ),
    Story(
        "enqueue_many_rollouts", "one of them deleted since", nothing,
        lambda s, i: s.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, run_id="r") for n in range(3)]),
        lambda s, i: s.delete_rollouts(rollout_ids=_ids(i["answer"])[1:2], force=True),
        lambda s, i: s.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, run_id="r") for n in range(4)]),
        copy_refused=GoneError,
    ),
    Story(
        "start_rollout", "deleted since", nothing,
        lambda s, i: s.start_rollout("x", worker_id="w", run_id="r"), made_is_deleted,
        lambda s, i: s.start_rollout("x", worker_id="w2", run_id="r"), copy_refused=GoneError,
    ),
    Story(
        "start_rollout", "ended since", nothing,
        lambda s, i: s.start_rollout("x", worker_id="w", run_id="r"),
        lambda s, i: s.update_attempt(_ids(i["answer"])[0], "latest", status="succeeded"),
        lambda s, i: s.start_rollout("y", worker_id="w", run_id="r"),
    ),
    Story(
        "dequeue_many_rollouts", "nothing there then", nothing,
        lambda s, i: s.dequeue_many_rollouts(limit=2, worker_id="w", run_id="r"), work_comes,
        lambda s, i: s.dequeue_many_rollouts(limit=2, worker_id="w2", run_id="r"),
    ),
    Story(
        "dequeue_many_rollouts", "nothing there then, and nobody named", nothing,
        lambda s, i: s.dequeue_many_rollouts(limit=2, run_id="r"), work_comes,
        lambda s, i: s.dequeue_many_rollouts(limit=1, run_id="r"),
    ),
    Story(
        "dequeue_rollout", "nothing there then, after a wait", nothing,
        lambda s, i: s.dequeue_rollout(worker_id="w", run_id="r", timeout=0.05), work_comes,
        lambda s, i: s.dequeue_rollout(worker_id="w", run_id="other"),
    ),
    Story(
        "dequeue_rollout", "nothing there then, one of many questions of an idle worker", idle,
        lambda s, i: s.dequeue_rollout(worker_id="w", run_id="r", timeout=0.05), work_comes,
        lambda s, i: s.dequeue_rollout(worker_id="w", run_id="other"),
    ),
    Story(
        "dequeue_many_rollouts", "the claimed one deleted since", queued,
        lambda s, i: s.dequeue_many_rollouts(limit=1, worker_id="w", run_id="r"), made_is_deleted,
        lambda s, i: s.dequeue_many_rollouts(limit=2, worker_id="w", run_id="r"),
    ),
    Story(
        "start_attempt", "ended and begun anew", started,
        lambda s, i: s.start_attempt(i["started"], worker_id="w2"), _restarted,
        lambda s, i: s.start_attempt(i["started"], worker_id="w3"),
    ),
    Story(
        "update_rollout", "claimed since", ended,
        lambda s, i: s.update_rollout(i["started"], status="queuing"), _claimed_again,
        lambda s, i: s.update_rollout(i["started"], status="cancelled"),
    ),
    Story(
        "update_rollout", "many newer ones", started,
        lambda s, i: s.update_rollout(i["started"], metadata={"first": True}), many_updates,
        lambda s, i: s.update_rollout(i["started"], metadata={"first": False}),
    ),
    Story(
        "update_rollout", "refused then, allowed now", ended,
        lambda s, i: s.update_rollout(i["started"], status="running"), _revived,
        lambda s, i: s.update_rollout(i["started"], status="cancelled"), refused=ConflictError,
    ),
    Story(
        "update_attempt", "the latest is another now", started,
        lambda s, i: s.update_attempt(i["started"], "latest", status="failed"), _restarted,
        lambda s, i: s.update_attempt(i["started"], "latest", status="succeeded"),
    ),
    Story(
        "update_attempt", "refused then for there was none", queued,
        lambda s, i: s.update_attempt(i["queued"], "latest", status="succeeded"), _claimed_again,
        lambda s, i: s.update_attempt(i["queued"], "latest", status="failed"), refused=NotFoundError,
    ),
    Story(
        "finish_attempt", "begun anew since", started,
        lambda s, i: s.finish_attempt(i["started"]), _restarted,
        lambda s, i: s.finish_attempt(i["started"], status="failed"),
    ),
    Story(
        "finish_rollout", "begun anew since", started,
        lambda s, i: s.finish_rollout(i["started"], response="a"), _restarted,
        lambda s, i: s.finish_rollout(i["started"], response="b"),
    ),
    Story(
        "add_resources", "others published since", nothing,
        lambda s, i: s.add_resources(PROMPT, run_id="r"),
        lambda s, i: s.add_resources(OTHER_PROMPT, run_id="r"),
        lambda s, i: s.add_resources(OTHER_PROMPT, run_id="r"),
    ),
    Story(
        "update_resources", "many newer versions", nothing,
        lambda s, i: s.update_resources("res", PROMPT), _newer_versions,
        lambda s, i: s.update_resources("res", OTHER_PROMPT),
    ),
    Story(
        "delete_rollouts", "refused then, ended since", started,
        lambda s, i: s.delete_rollouts(rollout_ids=[i["started"]]), _ended_now,
        lambda s, i: s.delete_rollouts(rollout_ids=[i["started"]], force=True), refused=ConflictError,
    ),
    Story(
        "delete_rollouts", "of a run, in which more has ended", ended,
        lambda s, i: s.delete_rollouts(run_id="r"), _another_ends,
        lambda s, i: s.delete_rollouts(run_id="other"),
    ),
    Story(
        "delete_rollouts", "by a bound, beyond which more has ended", ended,
        lambda s, i: s.delete_rollouts(keep_last=0), _another_ends,
        lambda s, i: s.delete_rollouts(keep_last=1),
    ),
    Story(
        "update_worker", "newer ones since", nothing,
        lambda s, i: s.update_worker("w", {"beat": -1}), _newer_beats,
        lambda s, i: s.update_worker("w", {"beat": -2}),
    ),
    Story(
        "register_worker", "newer heartbeats since", nothing,
        lambda s, i: s.register_worker("w", {"beat": -1}), _newer_beats,
        lambda s, i: s.register_worker("w", {"beat": -2}),
    ),
    Story("add_span", "ended since", _with_attempt, lambda s, i: s.add_span(_span(i)), _ended_now, None),
    Story(
        "add_many_spans", "begun anew since", _with_attempt,
        lambda s, i: s.add_many_spans([_span(i)]), _restarted, None,
    ),
    Story(
        "add_many_spans", "deleted since", _with_attempt,
        lambda s, i: s.add_many_spans([_span(i)]), _is_deleted, None, copy_refused=NotFoundError,
    ),
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


async def answer_of(call: Awaitable[Any], token: str) -> Any:
    """Return the answer to a call with a token, or the error that refuses it."""
    try:
        return await with_token(call, token)
    except (ConflictError, NotFoundError, GoneError, TokenReusedError) as error:
        return error


async def check_late_copy(
    story: Story, store: LightningStore, open_other: Callable[[], Awaitable[LightningStore]]
) -> None:
    """Run a story in one store and deliver the copy to another one over the same data."""
    ids: Ids = {}
    await story.before(store, ids)
    answer = ids["answer"] = await answer_of(story.call(store, ids), "the token")
    _check_refusal(answer, story.refused)
    await story.then(store, ids)
    expected = await world(store)
    other_store = await open_other()
    here = other_store is store
    before = await world(other_store, events=here)
    assert before | {"events": []} == expected
    for _ in range(2):
        copy = await answer_of(story.call(other_store, ids), "the token")
        assert await world(other_store, events=here) == before
        if story.refused is not None:
            assert (type(copy), str(copy)) == (type(answer), str(answer))
        elif story.copy_refused is not None:
            _check_refusal(copy, story.copy_refused)
        else:
            _check_same(copy, answer)
    if story.other is not None:
        reused = await answer_of(story.other(other_store, ids), "the token")
        assert type(reused) in (TokenReusedError, story.copy_refused), reused
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
