"""Work on every store: creating, queueing, claiming, waiting."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import time
from typing import Any

import pytest
from pydantic import BaseModel

from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    AttemptError,
    CustomResource,
    EnqueueRolloutRequest,
    FilterField,
    FilterOptions,
    PromptTemplate,
    Resource,
    Rollout,
    RolloutConfig,
    RolloutMode,
    SamplingParameters,
    SortOptions,
    SystemPrompt,
    Worker,
)
from tests.store.parts import required


async def test_the_first_program_of_a_newcomer_runs(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout(input={"prompt": "Solve this"}, mode="train")
    task: Any = await store.dequeue_rollout(worker_id="worker-1")
    assert (task.rollout.rollout_id, task.id) == (rollout.rollout_id, rollout.id)
    done = await store.finish_rollout(
        rollout_id=task.rollout.rollout_id, attempt_id=task.attempt.attempt_id, response={"answer": "42"}
    )
    assert done.status == "succeeded"
    other = await store.start_rollout("x")
    assert (await store.fail_rollout(other.id, reason="no luck")).status == "failed"
    assert (await store.finish_attempt((await store.start_attempt(other.id)).id)).status == "succeeded"
    assert {each.status for each in await store.list_rollouts(status_in=["succeeded"])} == {"succeeded"}
    first, *others = await store.query_attempts(rollout.id)
    assert (first.metadata, others) == ({"response": {"answer": "42"}}, [])


async def test_what_is_not_given_has_its_default(store: LightningStore) -> None:
    before = time.time()
    made = await store.enqueue_rollout(None)
    assert (made.input, made.mode, made.metadata, made.config) == (None, None, {}, RolloutConfig())
    assert (made.status, made.resources_id, made.end_time, made.priority) == ("queuing", None, None, 0)
    stored = await store.get_rollout_by_id(made.rollout_id)
    assert (type(stored), stored) == (Rollout, made)
    claimed = required(await store.dequeue_rollout())
    assert (claimed.attempt.worker_id, claimed.attempt.metadata, claimed.attempt.end_time) == (None, None, None)
    for moment in (made.start_time, claimed.attempt.start_time):
        assert before - 1 <= moment <= time.time() + 1
    assert re.fullmatch(r"ro-[0-9a-f]{12}", made.rollout_id)
    assert re.fullmatch(r"at-[0-9a-f]{8}", claimed.attempt.attempt_id)


async def test_requests_and_resources_may_be_given_as_their_fields(store: LightningStore) -> None:
    requests: Any = [{"input": 1, "mode": "val"}]
    assert [made.mode for made in await store.enqueue_many_rollouts(requests)] == ["val"]
    fields: Any = {"p": {"resource_type": "prompt_template", "template": "t", "engine": "jinja"}}
    assert (await store.add_resources(fields)).resources == {"p": PromptTemplate(template="t", engine="jinja")}
    for wrong in ({"p": 3}, {"p": {"template": "t", "engine": "jinja"}}):
        with pytest.raises(ValueError, match=r"resource_type|dict|object"):
            await store.add_resources(wrong)  # type: ignore[arg-type]


async def test_an_empty_batch_is_legal(store: LightningStore) -> None:
    assert await store.enqueue_many_rollouts([]) == await store.add_many_spans([]) == []
    assert await store.wait_for_rollouts(rollout_ids=[], timeout=None) == []
    for limit in (0, -3):
        assert await store.dequeue_many_rollouts(limit=limit, worker_id="w") == []
    assert await store.get_worker_by_id("w") is None


async def test_an_unknown_id_gives_nothing_and_who_acts_on_it_is_told_its_name(store: LightningStore) -> None:
    for get in (store.get_rollout_by_id, store.get_latest_attempt, store.get_worker_by_id, store.get_resources_by_id):
        assert await get("no") is None
    assert await store.get_latest_resources() is None
    assert (await store.query_attempts("no")).total == (await store.query_spans("no", "latest")).total == 0
    queued, started = await store.enqueue_rollout("x"), await store.start_rollout("y")
    cases: list[tuple[Any, str]] = [
        (store.update_rollout("ro-no"), r"Item.*does not exist"),
        (store.start_attempt("ro-no"), "Rollout ro-no not found"),
        (store.update_attempt("ro-no", "latest"), "Rollout ro-no not found"),
        (store.update_attempt(queued.rollout_id, "latest"), f"No attempts found for rollout {queued.rollout_id}"),
        (
            store.update_attempt(started.rollout_id, "at-no"),
            f"Attempt at-no not found for rollout {started.rollout_id}",
        ),
        (store.get_next_span_sequence_id("ro-no", "at-no"), "Rollout ro-no not found"),
        (store.finish_rollout("ro-no"), "Rollout ro-no not found"),
    ]
    for call, text in cases:
        with pytest.raises(NotFoundError, match=text):
            await call


async def test_claims_come_oldest_first_and_each_once(store: LightningStore) -> None:
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(5)])
    claims = [await store.dequeue_rollout(worker_id="w") for _ in range(6)]
    assert [c.rollout_id if c else None for c in claims] == [r.rollout_id for r in made] + [None]
    first = required(claims[0])
    assert (first.status, first.attempt.status, first.attempt.sequence_id) == ("preparing", "preparing", 1)
    assert first.attempt.worker_id == "w"
    assert first.rollout.rollout_id == first.rollout_id


async def test_many_claims_at_once_take_up_to_the_limit(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(3)])
    assert [c.input for c in await store.dequeue_many_rollouts(limit=2)] == [0, 1]
    assert [c.input for c in await store.dequeue_many_rollouts(limit=5)] == [2]


async def test_concurrent_claims_never_get_the_same_rollout(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(20)])
    claims = await asyncio.gather(*[store.dequeue_rollout(worker_id=f"w{i}") for i in range(30)])
    ids = [c.rollout_id for c in claims if c is not None]
    assert len(ids) == len(set(ids)) == 20
    assert claims.count(None) == 10


async def test_a_waiting_claim_is_answered_when_work_arrives(store: LightningStore) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout(worker_id="w", timeout=20))
    await asyncio.sleep(0.05)
    made = await store.enqueue_rollout("late")
    assert required(await asyncio.wait_for(waiting, 10)).rollout_id == made.rollout_id


async def test_runs_on_one_store_do_not_see_each_others_work(store: LightningStore) -> None:
    mine = await store.enqueue_rollout("mine", run_id="a")
    other = await store.enqueue_rollout("none")
    assert await store.dequeue_rollout(run_id="b") is None
    claim = required(await store.dequeue_rollout(run_id="a"))
    assert claim.rollout_id == mine.rollout_id
    claim = required(await store.dequeue_rollout())
    assert claim.rollout_id == other.rollout_id
    assert [r.rollout_id for r in await store.query_rollouts(run_id="a")] == [mine.rollout_id]


async def test_what_was_finished_or_begun_by_hand_is_claimed_by_nobody(store: LightningStore) -> None:
    cancelled, begun, waiting = [await store.enqueue_rollout(i) for i in range(3)]
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    await store.start_attempt(begun.rollout_id)
    started = await store.start_rollout("at once", worker_id="w")
    assert (type(started), started.status) == (AttemptedRollout, "preparing")
    assert required(await store.dequeue_rollout()).rollout_id == waiting.rollout_id
    assert await store.dequeue_rollout() is None


class _Model(BaseModel):
    a: int


@dataclasses.dataclass
class _Data:
    b: str


async def test_what_is_given_becomes_json_one_by_one_and_in_a_batch(store: LightningStore) -> None:
    values = {
        **{"model": _Model(a=1), "data": _Data(b="x"), "worker": Worker(worker_id="w"), "pair": (1, 2.5)},
        **{"none": math.nan, "many": [math.inf, 1.5, -math.inf]},
    }
    one = await store.enqueue_rollout(values, metadata=values)
    [of_many] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=values, metadata=values)])
    expected = {
        **{"model": {"a": 1}, "data": {"b": "x"}, "worker": Worker(worker_id="w").model_dump(), "pair": [1, 2.5]},
        **{"none": None, "many": [None, 1.5, None]},
    }
    for rollout in (one, of_many, await store.get_rollout_by_id(one.rollout_id)):
        assert required(rollout).input == required(rollout).metadata == expected
    with pytest.raises(TypeError, match="string keys"):
        await store.enqueue_rollout({1: "x"})


async def test_nothing_that_a_caller_holds_is_the_stores(store: LightningStore) -> None:
    task: dict[str, Any] = {"q": [1]}
    made = await store.enqueue_rollout(task)
    started = await store.start_rollout("x")
    error, config = AttemptError(type="t", message="m"), RolloutConfig(retry_condition=["failed"])
    stats: dict[str, Any] = {"gpus": [1]}
    await store.update_attempt(started.rollout_id, "latest", error=error)
    await store.update_rollout(started.rollout_id, config=config)
    await store.update_worker("w", stats)
    await store.update_resources("r", {"p": PromptTemplate(template="t", engine="jinja")})
    task["q"].append(2)
    made.input["q"].append(3)
    made.status = "failed"
    error.message, stats["gpus"] = "changed", []
    config.retry_condition.append("timeout")
    for _ in range(2):
        queued = required(await store.get_rollout_by_id(made.rollout_id))
        attempt = required(await store.get_latest_attempt(started.rollout_id))
        rollout = required(await store.get_rollout_by_id(started.rollout_id))
        worker = (await store.query_workers())[0]
        assert (queued.input, queued.status) == ({"q": [1]}, "queuing")
        assert (required(attempt.error).message, rollout.config.retry_condition) == ("m", ["failed"])
        assert worker.heartbeat_stats == {"gpus": [1]}
        for update in ((await store.query_resources())[0], required(await store.get_resources_by_id("r"))):
            prompt: Any = update.resources["p"]
            assert prompt == PromptTemplate(template="t", engine="jinja")
            prompt.template = "changed"
            update.resources.clear()
        queued.input["q"].append(4)
        required(attempt.error).message = "changed"
        rollout.config.retry_condition.clear()
        required(worker.heartbeat_stats)["gpus"].append(2)


async def test_waiting_returns_the_finished_in_the_order_asked(store: LightningStore) -> None:
    a, b, c = [await store.start_rollout(i) for i in range(3)]

    async def finish() -> None:
        for rollout in (c, a):
            await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")

    waiting = asyncio.create_task(
        store.wait_for_rollouts(rollout_ids=[a.rollout_id, "unknown", c.rollout_id, a.rollout_id], timeout=20)
    )
    await asyncio.sleep(0.05)
    await finish()
    assert [r.rollout_id for r in await asyncio.wait_for(waiting, 10)] == [*(a.rollout_id, c.rollout_id, a.rollout_id)]
    assert await store.wait_for_rollouts(rollout_ids=[b.rollout_id], timeout=0.05) == []
    assert await store.wait_for_rollouts(rollout_ids=[b.rollout_id], timeout=0) == []
    assert [type(r) for r in await store.wait_for_rollouts(rollout_ids=[a.rollout_id], timeout=0)] == [Rollout]
    assert await store.wait_for_rollout(b.rollout_id, timeout=0) is None


async def test_waiting_on_a_restarted_rollout_waits_for_its_new_end(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    await store.update_attempt(started.rollout_id, "latest", status="succeeded")
    await store.start_attempt(started.rollout_id)
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[started.rollout_id], timeout=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.update_attempt(started.rollout_id, "latest", status="failed")
    assert [r.status for r in await asyncio.wait_for(waiting, 10)] == ["failed"]


# --- forms that programs use beside the arguments -----------------------------------------------------------------


async def test_a_request_may_name_its_task_and_say_the_mode_in_its_config(store: LightningStore) -> None:
    request = EnqueueRolloutRequest.model_validate(
        {"task_id": "task-001", "config": RolloutConfig(mode=RolloutMode.TRAINING, max_attempts=2), "priority": 1}
    )
    named = EnqueueRolloutRequest(input={"q": 1}, task_id="task-002", metadata={"a": 1})
    made = await store.enqueue_many_rollouts([named, request])
    assert [(each.input, each.metadata, each.mode) for each in made] == [
        ({"q": 1}, {"a": 1, "task_id": "task-002"}, None),
        ("task-001", {"task_id": "task-001"}, "train"),
    ]
    assert (made[1].config.max_attempts, made[1].config.mode) == (2, None)
    assert required(await store.dequeue_rollout()).rollout_id == made[1].rollout_id


async def test_a_mode_in_the_config_becomes_that_of_the_rollout_wherever_a_config_is_given(
    store: LightningStore,
) -> None:
    validation = RolloutConfig(mode=RolloutMode.VALIDATION)
    started = await store.start_rollout("x", config=validation)
    queued = await store.enqueue_rollout("x", "val", config=validation)
    plain = await store.enqueue_rollout("x", "train")
    changed = await store.update_rollout(plain.rollout_id, config=RolloutConfig(mode="test", max_attempts=3))
    assert [each.mode for each in (started, queued, changed)] == ["val", "val", "test"]
    assert [each.config.mode for each in (started, queued, changed)] == [None] * 3
    assert changed.config.max_attempts == 3
    assert validation.mode == "val"
    for call in (
        lambda: store.start_rollout("x", "train", config=validation),
        lambda: store.enqueue_rollout("x", "train", config=validation),
        lambda: store.update_rollout(plain.rollout_id, mode="train", config=validation),
    ):
        with pytest.raises(ValueError, match=r"mode='train' and config\.mode='val' differ; a rollout has one mode"):
            await call()


async def test_filter_options_unpack_into_the_arguments_of_a_query(store: LightningStore) -> None:
    ended = [await store.start_rollout(number) for number in range(3)]
    for rollout in ended:
        await store.finish_rollout(rollout.rollout_id)
    await store.enqueue_rollout("queued")
    filters = FilterOptions(
        fields=[FilterField(name="status", operator="eq", value="succeeded")],
        sort=SortOptions.model_validate({"field": "start_time", "direction": "desc"}),
        offset=0,
        limit=2,
    )
    page = await store.query_rollouts(**filters)
    assert [rollout.input for rollout in page] == [2, 1]
    assert (page.limit, page.offset, page.total) == (2, 0, 3)
    assert [rollout.input for rollout in await store.list_rollouts(filters)] == [2, 1]
    either = FilterOptions(
        fields=[
            FilterField(name="status", operator="in", value=["queuing", "cancelled"]),
            FilterField(name="rollout_id", value=ended[0].rollout_id),
        ],
        filter_logic="or",
        sort=SortOptions(name="start_time"),
    )
    assert [rollout.input for rollout in await store.query_rollouts(**either)] == [0, "queued"]
    with pytest.raises(BadRequestError, match="'made': field does not exist on Rollout"):
        await store.query_rollouts(**FilterOptions(sort=SortOptions(name="made")))
    with pytest.raises(TypeError, match="worker_id_contains"):
        await store.query_rollouts(
            **FilterOptions(fields=[FilterField(name="worker_id", operator="contains", value="w")])
        )
    assert len(await store.query_workers(**FilterOptions(fields=[FilterField(name="status", value="busy")]))) == 0


async def test_aliases_of_statuses_modes_and_times_mean_what_the_store_has(store: Any) -> None:
    later = time.time() + 60
    done = await store.start_rollout("done", mode="eval")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="next", mode="inference")])  # type: ignore[arg-type]
    held = await store.enqueue_rollout("held", not_before=later)
    ended = await store.update_attempt(done.rollout_id, "latest", status="completed")
    changed = await store.update_rollout(held.rollout_id, status="pending", mode="eval")
    assert (ended.status, changed.status, changed.mode) == ("succeeded", "queuing", "val")
    lists: dict[str, Any] = {
        "completed": await store.query_rollouts(status_in=["completed"]),
        "pending": await store.query_rollouts(status_in=["pending", "running"], sort_by="create_time"),
        "summaries": await store.query_rollout_summaries(
            filter={"mode_in": ["eval", "inference"], "status_in": ["pending", "completed"]}, sort_by="create_time"
        ),
    }
    assert [row.rollout_id for row in lists["completed"]] == [done.rollout_id]
    assert [row.input for row in lists["pending"]] == ["next", "held"]
    assert [row.mode for row in lists["summaries"]] == ["val", "test", "val"]
    newest_first = await store.query_rollouts(sort_by="create_time", sort_order="desc")
    assert [row.input for row in newest_first] == ["held", "next", "done"]
    assert [row.sequence_id for row in await store.query_attempts(done.rollout_id, sort_by="create_time")] == [1]
    late = await store.start_rollout("late", worker_id="gone")
    await store.start_rollout("running", worker_id="here")
    await store.update_attempt(late.rollout_id, "latest", status="timeout")
    assert [row.worker_id for row in await store.query_workers(status_in=["offline"])] == ["gone"]
    with pytest.raises(BadRequestError, match="succeeded"):
        await store.update_rollout(held.rollout_id, status="succeed")


async def test_prompts_of_the_system_and_sampling_parameters_come_back_as_they_are(store: LightningStore) -> None:
    sampling = SamplingParameters(temperature=0.2, max_tokens=64, stop=["\n"])  # type: ignore[call-arg]  # pyright: ignore
    resources: Any = {
        "system": SystemPrompt(template="Answer in {language}."),
        "sampling": sampling,
        "llm": LLM(endpoint="http://127.0.0.1:1/v1", model="m", sampling_parameters=sampling),  # type: ignore[arg-type]  # pyright: ignore
    }
    made = await store.add_resources(resources)
    stored_resources = required(await store.get_resources_by_id(made.resources_id))
    assert stored_resources.resources == resources
    system, read, llm = (stored_resources.resources[name] for name in ("system", "sampling", "llm"))
    assert isinstance(system, SystemPrompt)
    assert (system.format(language="Dutch"), system.engine) == ("Answer in Dutch.", "f-string")
    assert isinstance(read, SamplingParameters)
    assert isinstance(llm, LLM)
    assert dict(**read) == llm.sampling_parameters == {"temperature": 0.2, "max_tokens": 64, "stop": ["\n"]}


class FaissIndex(Resource):
    """A resource of a program's own."""

    index: str


async def test_resources_of_ones_own_are_kept_as_custom_ones(store: LightningStore) -> None:
    own: Any = {"retriever": FaissIndex(index="faiss"), "settings": {"top_p": 0.5, "more": (1, {"a": None})}}
    made = await store.add_resources(own)
    resources = await store.get_resources_by_id(made.resources_id)
    assert resources == made
    assert resources is not None
    assert resources.resources == {
        "retriever": CustomResource(kind="FaissIndex", values={"index": "faiss"}),
        "settings": CustomResource(values={"top_p": 0.5, "more": [1, {"a": None}]}),
    }
    with pytest.raises((TypeError, BadRequestError), match="object"):
        await store.update_resources("x", {"settings": CustomResource(values={"a": {"b": object()}})})
    with pytest.raises(ValueError, match=r"Use agl\.LLM"):
        await store.add_resources({"llm": {"endpoint": "e", "model": "m"}})  # type: ignore[dict-item]  # pyright: ignore
