"""Importing the finished history of another store: unchanged, once, and in any order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.semconv import AGL_ANNOTATION
from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.rules import history
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    HistoryImport,
    PromptTemplate,
    ResourcesUpdate,
    Rollout,
    RolloutFilter,
    Span,
)
from tests.store.parts import required, span_of

LONG_AGO = 1_700_000_000.0


def rollout(name: str = "ro-1", **fields: Any) -> Rollout:
    values = {"status": "succeeded", "input": {"q": name}, "start_time": LONG_AGO, "end_time": LONG_AGO + 9, **fields}
    return Rollout(rollout_id=name, **values)


def attempt(of: str = "ro-1", number: int = 1, **fields: Any) -> Attempt:
    times = {"start_time": LONG_AGO + number, "end_time": LONG_AGO + number + 0.5}
    values = {"status": "succeeded", "worker_id": "w-old", **times, **fields}
    return Attempt(rollout_id=of, attempt_id=f"at-{of[3:]}-{number}", sequence_id=number, **values)


def span(of: Attempt, number: int, reward: float | None = None, **fields: Any) -> Span:
    extra = {} if reward is None else {"agentlightning.reward.0.name": "p", "agentlightning.reward.0.value": reward}
    made = span_of(
        (of.rollout_id, of.attempt_id), AGL_ANNOTATION if extra else "x", number, span_id=f"{number:016x}",
        trace_id="1" * 32, start_time=LONG_AGO, end_time=LONG_AGO + 1, attributes={**extra},
    )  # fmt: skip
    return Span(**made.model_dump(), **fields)


def resources(name: str = "rs-1", version: int = 1, text: str = "{q}", **fields: Any) -> ResourcesUpdate:
    values = {"create_time": LONG_AGO, "update_time": LONG_AGO + version, **fields}
    prompt = PromptTemplate(template=text, engine="f-string")
    return ResourcesUpdate(resources_id=name, version=version, resources={"prompt": prompt}, **values)


def counts(done: HistoryImport) -> tuple[int, int, int, int, int]:
    return done.resources, done.rollouts, done.attempts, done.spans, done.present


async def test_a_history_is_here_as_it_was(store: LightningStore) -> None:
    first, second = attempt(number=1, status="timeout"), attempt(number=2)
    spans = [span(first, 1), span(second, 7, note="kept"), span(second, 9, reward=0.25)]
    done = await store.import_history(
        resources=[resources()], rollouts=[rollout(resources_id="rs-1", metadata={"m": [1]})],
        attempts=[second, first], spans=spans,
    )  # fmt: skip
    assert counts(done) == (1, 1, 2, 3, 0)
    assert done.refused == []
    stored_rollout = required(await store.get_rollout_by_id("ro-1"))
    assert (stored_rollout.status, stored_rollout.input, stored_rollout.start_time, stored_rollout.end_time) == (
        *("succeeded", {"q": "ro-1"}, LONG_AGO, LONG_AGO + 9),
    )
    assert (stored_rollout.metadata, stored_rollout.resources_id) == ({"m": [1]}, "rs-1")
    attempts = list(await store.query_attempts("ro-1"))
    assert [(a.sequence_id, a.status, a.start_time, a.end_time, a.worker_id) for a in attempts] == [
        (1, "timeout", LONG_AGO + 1, LONG_AGO + 1.5, "w-old"),
        (2, "succeeded", LONG_AGO + 2, LONG_AGO + 2.5, "w-old"),
    ]
    assert [(a.outcome, a.outcome_reason, a.reward) for a in attempts] == [
        ("cancelled", "timeout", None),
        ("scored", None, 0.25),
    ]
    assert [(s.sequence_id, s.model_extra) for s in await store.query_spans("ro-1")] == [
        (1, {}),
        (7, {"note": "kept"}),
        (9, {}),
    ]
    assert await store.get_next_span_sequence_id("ro-1", second.attempt_id) == 10
    newest = required(await store.get_latest_resources())
    assert (newest.resources_id, newest.update_time) == ("rs-1", LONG_AGO + 1)
    sizes = await store.statistics()
    assert (sizes["total_rollouts"], sizes["total_attempts"], sizes["total_spans"]) == (1, 2, 3)


async def test_nothing_of_it_is_work(store: LightningStore) -> None:
    await store.import_history(
        rollouts=[rollout(), rollout("ro-2", status="failed")], attempts=[attempt(), attempt("ro-2", status="failed")]
    )
    assert await store.dequeue_rollout("w") is None
    assert {r.rollout_id for r in await store.wait_for_rollouts(rollout_ids=["ro-1", "ro-2"], timeout=0)} == {
        *("ro-1", "ro-2"),
    }
    assert await store.get_worker_by_id("w-old") is None
    assert [(a.outcome, a.outcome_reason) for a in await store.query_attempts("ro-2")] == [
        ("infrastructure_fault", "exception")
    ]
    page = await store.query_rollout_summaries(filter=RolloutFilter(status_in=["failed"]))
    assert [summary.rollout_id for summary in page.items] == ["ro-2"]
    again = await store.start_attempt("ro-2", worker_id="w")  # it may be tried again, as any that ended
    assert again.attempt.sequence_id == 2
    assert await store.delete_rollouts(rollout_ids=["ro-1"]) == 1


async def test_the_same_again_changes_nothing_and_another_is_refused(store: LightningStore) -> None:
    tried = attempt()
    whole: dict[str, Any] = {
        "resources": [resources()], "rollouts": [rollout()], "attempts": [tried],
        "spans": [span(tried, 1), span(tried, 2, reward=1.0)],
    }  # fmt: skip
    assert counts(await store.import_history(**whole)) == (1, 1, 1, 2, 0)
    before = await everything(store)
    assert counts(await store.import_history(**whole)) == (0, 0, 0, 0, 5)
    assert await everything(store) == before
    other = await store.import_history(
        resources=[resources(text="other {q}"), resources(version=2, create_time=1.0)],
        rollouts=[rollout(input="another")], attempts=[attempt(start_time=5.0)],
    )  # fmt: skip
    assert [(piece.kind, piece.id, piece.reason) for piece in other.refused] == [
        *(("resources", "rs-1/1", "different"), ("resources", "rs-1/2", "different")),
        *(("rollout", "ro-1", "different"), ("attempt", "at-1-1", "different")),
    ]
    assert counts(other) == (0, 0, 0, 0, 0)
    assert await everything(store) == before


async def test_what_cannot_be_taken_is_named_and_the_rest_is_taken(store: LightningStore) -> None:
    good = attempt()
    done = await store.import_history(
        rollouts=[rollout(), rollout("ro-2", status="running", end_time=None), rollout("ro-3")],
        attempts=[good, attempt("ro-2"), attempt("ro-3", status="running"), attempt("ro-3", 3), attempt("ro-9")],
        spans=[span(good, 1), span(attempt("ro-9"), 1), span(attempt("ro-3", 8), 1)],
    )
    assert sorted((piece.kind, piece.id, piece.reason) for piece in done.refused) == [
        ("attempt", "at-2-1", "no_rollout"),
        ("attempt", "at-3-1", "not_ended"),
        ("attempt", "at-3-3", "wrong_number"),
        ("attempt", "at-9-1", "no_rollout"),
        ("rollout", "ro-2", "not_ended"),
        ("span", f"ro-3/at-3-8/{1:016x}", "no_attempt"),
        ("span", f"ro-9/at-9-1/{1:016x}", "no_rollout"),
    ]
    assert counts(done) == (0, 2, 1, 1, 0)
    assert all(piece.message for piece in done.refused)


async def test_a_rollout_that_works_here_is_not_touched(store: LightningStore) -> None:
    mine = await store.start_rollout(input=1, worker_id="w")
    there = mine.attempt.model_copy(update={"attempt_id": "at-2", "sequence_id": 2, "status": "failed"})
    copy = mine.model_copy(update={"status": "succeeded"})
    done = await store.import_history(
        rollouts=[Rollout(**copy.model_dump(exclude={"attempt"}))], attempts=[there],
        spans=[span(Attempt(**{**mine.attempt.model_dump()}), 1)],
    )  # fmt: skip
    assert done.present == 1
    assert [(piece.kind, piece.reason) for piece in done.refused] == [("attempt", "not_ended"), ("span", "not_ended")]
    assert required(await store.get_rollout_by_id(mine.rollout_id)).status == "preparing"


async def test_the_latest_resources_stay_those_published_last(store: LightningStore) -> None:
    llm = LLM(endpoint="http://localhost", model="m")
    now = await store.add_resources({"main_llm": llm})
    await store.import_history(resources=[resources(version=3), resources("rs-2", update_time=LONG_AGO + 5)])
    newest = required(await store.get_latest_resources())
    assert newest.resources_id == now.resources_id
    assert required(await store.get_resources_by_id("rs-1")).version == 3
    late = await store.import_history(resources=[resources("rs-3", update_time=now.update_time + 10)])
    assert late.resources == 1
    newest = required(await store.get_latest_resources())
    assert newest.resources_id == "rs-3"
    after = await store.update_resources("rs-1", {"main_llm": llm})
    assert after.version == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rollouts": [{"rollout_id": "ro-1"}]}, "rollouts"),
        ({"rollouts": [rollout("")]}, "rollout_id"),
        ({"spans": [span(attempt(), -1)]}, "bad sequence_id -1"),
        ({"resources": [resources("latest")]}, "latest"),
        ({"resources": [resources(version=0)]}, "version"),
        ({"attempts": [attempt("ro-\ud800")]}, "surrogate|stored|utf-8|UTF-8|JSON"),
    ],
)
async def test_a_wrong_value_is_refused_with_nothing_taken(
    store: LightningStore, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadRequestError, match=says):
        await store.import_history(**{"rollouts": [rollout("ro-5")], **wrong})
    assert await store.get_rollout_by_id("ro-5") is None


async def test_several_imports_of_one_history_at_once_take_it_once(store: LightningStore) -> None:
    tried = [attempt(f"ro-{n}") for n in range(8)]
    spans = [span(each, number) for each in tried for number in range(1, 6)]
    done = await asyncio.gather(
        *(
            store.import_history(rollouts=[rollout(f"ro-{n}") for n in range(8)], attempts=tried, spans=spans)
            for _ in range(5)
        )
    )
    assert sum(each.rollouts for each in done) == 8
    assert sum(each.attempts for each in done) == 8
    assert sum(each.spans for each in done) == 40
    sizes = await store.statistics()
    assert (sizes["total_rollouts"], sizes["total_attempts"], sizes["total_spans"]) == (8, 8, 40)


async def test_a_reward_that_came_with_its_attempt_stays(store: LightningStore) -> None:
    source = attempt(reward=0.75, outcome="policy_fault", outcome_reason="budget")
    await store.import_history(rollouts=[rollout()], attempts=[source], spans=[span(source, 1, reward=0.0)])
    [only_attempt] = await store.query_attempts("ro-1")
    assert (only_attempt.reward, only_attempt.outcome, only_attempt.outcome_reason) == (0.75, "policy_fault", "budget")


@pytest.mark.parametrize("outcome", [None, "scored"])
async def test_a_reward_too_large_of_a_history_is_left_out(store: LightningStore, outcome: Any) -> None:
    for name, value in (("ro-1", 1e308), ("ro-2", -1e308), ("ro-3", 1.0)):
        came, emitted = attempt(name, reward=value, rewards={"p": value}, outcome=outcome), attempt(name, 2)
        done = await store.import_history(
            rollouts=[rollout(name, mode="train")], attempts=[came, emitted], spans=[span(emitted, 1, reward=value)]
        )
        assert not done.refused
        if value != 1.0:
            for each in await store.query_attempts(name):
                assert (each.reward, each.rewards, each.outcome) == (None, None, "unscored")
    [group] = (await store.aggregate_rollouts()).groups
    assert (group.scored, group.mean, group.maximum) == (1, 1.0, 1.0)


async def test_a_whole_store_moves_into_another(store: LightningStore) -> None:
    """Another store imports everything that a store of this package exports of its rollouts."""
    source = InMemoryLightningStore()
    for number in range(3):
        made = await source.start_rollout(input=number, run_id="r")
        await source.add_many_spans([span_of(made, attributes={"n": n}) for n in range(3)])
        await source.update_attempt(
            made.rollout_id, "latest", status="succeeded", outcome="scored", reward=0.5, rewards={"primary": 0.5}
        )
    rollouts = list(await source.query_rollouts())
    attempts = [each for one in rollouts for each in await source.query_attempts(one.rollout_id)]
    spans = [each for one in rollouts for each in await source.query_spans(one.rollout_id)]
    done = await store.import_history(rollouts=rollouts, attempts=attempts, spans=spans)
    assert counts(done) == (0, 3, 3, 9, 0)
    for one, copy in zip(
        attempts, [a for r in rollouts for a in await store.query_attempts(r.rollout_id)], strict=True
    ):
        assert copy == one
    group = (await store.aggregate_rollouts(by="none")).groups[0]
    assert (group.count, group.mean) == (3, 0.5)
    await source.close()


async def everything(store: LightningStore) -> object:
    """Return everything that a store reports of its content."""
    rollouts = sorted(await store.query_rollouts(), key=lambda each: each.rollout_id)
    return [
        (
            one.model_dump(),
            [each.model_dump() for each in await store.query_attempts(one.rollout_id)],
            [each.model_dump() for each in await store.query_spans(one.rollout_id)],
        )
        for one in rollouts
    ], [each.model_dump() for each in await store.query_resources(sort_by="resources_id")]


async def test_it_is_there_after_a_restart(tmp_path: Any) -> None:
    place = tmp_path / "store.db"
    first = SQLiteLightningStore(place)
    tried = attempt()
    await first.import_history(
        resources=[resources()], rollouts=[rollout()], attempts=[tried], spans=[span(tried, 1, reward=1.0)]
    )
    before = await everything(first)
    await first.close()
    second = SQLiteLightningStore(place)
    assert await everything(second) == before
    await second.close()


def long_history(count: int) -> dict[str, list[Any]]:
    """Return rollouts with an attempt each, in another order, and one of a rollout that is not there."""
    names = [f"ro-{number}" for number in range(count)]
    return {
        "rollouts": [rollout(name) for name in names],
        "attempts": [attempt(name) for name in ["ro-x", *names[::-1]]],
    }


async def test_a_long_history_is_taken_in_whole_and_once(
    store: LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PIECE", 8)
    whole_history = long_history(30)
    done = await store.import_history(**whole_history)
    assert (done.rollouts, done.attempts, [each.id for each in done.refused]) == (30, 30, ["at-x-1"])
    for number in range(30):
        assert required(await store.get_latest_attempt(f"ro-{number}")).attempt_id == f"at-{number}-1"
    again = await store.import_history(**whole_history)
    assert (again.present, again.rollouts, len(again.refused)) == (60, 0, 1)


async def test_a_store_in_memory_serves_others_while_a_long_history_is_taken_in() -> None:
    store, count = InMemoryLightningStore(), 3 * history.PIECE
    taking, totals = asyncio.create_task(store.import_history(**long_history(count))), set[int]()
    while not taking.done():
        total = (await store.query_rollouts(limit=0)).total
        totals.add(total)
        if total:
            last = await store.get_rollout_by_id(f"ro-{total - 1}")
            assert isinstance(last, AttemptedRollout), "it is there without its attempt"
        await asyncio.sleep(0)
    await taking
    assert totals - {0, count}, "it was taken in all at once"
