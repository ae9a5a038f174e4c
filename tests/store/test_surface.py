"""The store as users meet it, row by row: the class, the rules of its operations, the rules of its lists.

What every backend must do is in `conformance/`; the values are in `tests/types`, the wire forms in `test_wire.py`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from agentlightning.errors import NotFoundError
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    SQLiteLightningStore,
)
from agentlightning.store.base import UNSET, request_token
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.operations import names_of
from agentlightning.store.wrappers import CompletedStore, LightningStoreScoped
from agentlightning.types import (
    AttemptedRollout,
    AttemptError,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    Span,
)

NEEDED: Any = object()
"""Stands for "no default"."""


# --- the contract as a class -------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "statistics": {},
    "start_rollout": {
        **{"input": NEEDED, "mode": None, "resources_id": None, "config": None, "metadata": None, "worker_id": None}
    },
    "enqueue_rollout": {"input": NEEDED, "mode": None, "resources_id": None, "config": None, "metadata": None},
    "enqueue_many_rollouts": {"rollouts": NEEDED},
    "dequeue_rollout": {"worker_id": None},
    "dequeue_many_rollouts": {"limit": 1, "worker_id": None},
    "start_attempt": {"rollout_id": NEEDED, "worker_id": None},
    "add_span": {"span": NEEDED},
    "add_many_spans": {"spans": NEEDED},
    "add_otel_span": {"rollout_id": NEEDED, "attempt_id": NEEDED, "readable_span": NEEDED, "sequence_id": None},
    "query_rollouts": {
        **{"status_in": None, "rollout_id_in": None, "rollout_id_contains": None, "filter_logic": "and"},
        **{"sort_by": None, "sort_order": "asc", "limit": -1, "offset": 0, "status": None, "rollout_ids": None},
    },
    "query_attempts": {
        **{"rollout_id": NEEDED, "sort_by": "sequence_id", "sort_order": "asc", "limit": -1, "offset": 0}
    },
    "get_rollout_by_id": {"rollout_id": NEEDED},
    "get_latest_attempt": {"rollout_id": NEEDED},
    "query_resources": {
        **{"resources_id": None, "resources_id_contains": None, "sort_by": None, "sort_order": "asc"},
        **{"limit": -1, "offset": 0},
    },
    "get_resources_by_id": {"resources_id": NEEDED},
    "get_latest_resources": {},
    "add_resources": {"resources": NEEDED},
    "update_resources": {"resources_id": NEEDED, "resources": NEEDED},
    "get_next_span_sequence_id": {"rollout_id": NEEDED, "attempt_id": NEEDED},
    "get_many_span_sequence_ids": {"rollout_attempt_ids": NEEDED},
    "wait_for_rollouts": {"rollout_ids": NEEDED, "timeout": None},
    "query_spans": {
        **{"rollout_id": NEEDED, "attempt_id": None, "trace_id": None, "trace_id_contains": None, "span_id": None},
        **{"span_id_contains": None, "parent_id": None, "parent_id_contains": None, "name": None},
        **{"name_contains": None, "filter_logic": "and", "limit": -1, "offset": 0, "sort_by": "sequence_id"},
        "sort_order": "asc",
    },
    "update_rollout": {
        **{"rollout_id": NEEDED, "input": UNSET, "mode": UNSET, "resources_id": UNSET, "status": UNSET},
        **{"config": UNSET, "metadata": UNSET},
    },
    "update_attempt": {
        **{"rollout_id": NEEDED, "attempt_id": NEEDED, "status": UNSET, "worker_id": UNSET},
        **{"last_heartbeat_time": UNSET, "metadata": UNSET},
    },
    "query_workers": {
        **{"status_in": None, "worker_id_contains": None, "filter_logic": "and", "sort_by": None},
        **{"sort_order": "asc", "limit": -1, "offset": 0},
    },
    "get_worker_by_id": {"worker_id": NEEDED},
    "update_worker": {"worker_id": NEEDED, "heartbeat_stats": UNSET},
    "register_worker": {"worker_id": NEEDED, "heartbeat_stats": UNSET},
    "wait_for_rollout": {"rollout_id": NEEDED, "timeout": None},
    "finish_rollout": {"rollout_id": NEEDED, "attempt_id": "latest", "response": None},
    "fail_rollout": {"rollout_id": NEEDED, "attempt_id": "latest", "reason": None},
    "finish_attempt": {"rollout_id": NEEDED, "attempt_id": "latest", "status": "succeeded"},
}
BY_NAME_ONLY = ("dequeue_many_rollouts", "query_rollouts", "query_resources", "query_workers", "wait_for_rollouts")


@pytest.mark.parametrize("operation", DEFAULTS)
def test_an_operation_takes_its_arguments_with_their_defaults(operation: str) -> None:
    parameters = dict(inspect.signature(getattr(LightningStore, operation)).parameters)
    del parameters["self"]
    written = DEFAULTS[operation]
    missing = inspect.Parameter.empty
    defaults = {name: NEEDED if p.default is missing else p.default for name, p in parameters.items()}
    assert {name: defaults[name] for name in written} == written
    assert [name for name in defaults if name not in written and defaults[name] is NEEDED] == []
    by_name = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    if operation in BY_NAME_ONLY:
        assert set(written) <= by_name
    elif not operation.startswith("query"):
        assert not set(written) & by_name - {"reason", "status"}


def test_every_operation_of_the_contract_is_written_down_above_or_was_added() -> None:
    added = {"delete_rollouts", "query_events", *names_of("run", "default")} - {"add_otel_span"}
    assert set(names_of()) - set(DEFAULTS) == added


@pytest.mark.parametrize(
    "kind", [LightningStoreClient, LightningStoreServer, LightningStoreThreaded, LightningStoreScoped, CompletedStore]
)
def test_a_wrapper_has_the_signatures_of_the_contract(kind: type[LightningStore]) -> None:
    for operation in names_of():
        contract, wrapper = (inspect.signature(getattr(cls, operation)) for cls in (LightningStore, kind))
        shown = [(p.name, p.kind, p.default) for p in wrapper.parameters.values()]
        assert shown == [(p.name, p.kind, p.default) for p in contract.parameters.values()], operation


@pytest.mark.parametrize(
    "kind", [EngineStore, LightningStoreClient, LightningStoreServer, LightningStoreThreaded, CompletedStore]
)
def test_an_operation_of_a_store_has_the_types_of_the_contract(kind: type[LightningStore]) -> None:
    for operation in names_of():
        contract, hints = (get_type_hints(getattr(cls, operation)) for cls in (LightningStore, kind))
        assert hints == contract, operation


@pytest.mark.parametrize(
    "operation", [name for name in names_of() if name not in ("statistics", "observe_metric", "add_otel_span")]
)
async def test_the_contract_alone_does_nothing(operation: str) -> None:
    parameters = inspect.signature(getattr(LightningStore, operation)).parameters.values()
    needed = {p.name: "x" for p in parameters if p.default is p.empty and p.name != "self"}
    with pytest.raises(NotImplementedError):
        await getattr(LightningStore(), operation)(**needed)


async def test_the_contract_alone_can_do_nothing_and_has_a_name() -> None:
    bare = LightningStore()
    assert bare.capabilities == {"async_safe": False, "thread_safe": False, "zero_copy": False, "otlp_traces": False}
    assert await bare.statistics() == {"name": "LightningStore"}
    with pytest.raises(NotImplementedError, match="add_many_spans"):
        bare.otlp_traces_endpoint()


async def test_capabilities_are_what_the_store_can_do(tmp_path: Path) -> None:
    def able(store: LightningStore) -> set[str]:
        return {name for name, can in store.capabilities.items() if can} - {"otlp_traces", "persistence"}

    memory, file = InMemoryLightningStore(), SQLiteLightningStore(tmp_path / "x.db")
    served, client = LightningStoreServer(memory, port=0), LightningStoreClient("http://127.0.0.1:1")
    assert able(memory) == {"async_safe", "thread_safe"}
    assert able(file) == {"async_safe", "thread_safe", "distributed", "persistent"}
    assert able(served) == able(client) == {"async_safe", "thread_safe", "zero_copy", "distributed"}
    assert able(LightningStoreServer(file, port=0)) == able(served) | {"persistent"}
    assert able(LightningStoreThreaded(LightningStore())) == {"async_safe", "thread_safe"}
    assert able(LightningStoreThreaded(file)) == able(file)
    for store in (memory, file, served, LightningStoreServer(file, port=0)):
        assert store.capabilities.get("persistence") == store.capabilities.get("persistent")
    await file.close()


async def test_statistics_carry_name_and_age_and_wrappers_change_nothing() -> None:
    memory = InMemoryLightningStore()
    first = await memory.statistics()
    assert {"name", "uptime", "total_rollouts", "total_attempts", "total_spans", "total_resources"} <= set(first)
    assert {"total_workers", "total_span_bytes", "eviction_threshold_bytes", "safe_threshold_bytes"} <= set(first)
    assert first["memory_capacity_bytes"] >= first["eviction_threshold_bytes"] > first["safe_threshold_bytes"]
    assert first["name"] == "InMemoryLightningStore"
    second = await LightningStoreThreaded(memory).statistics()
    assert second["uptime"] > first["uptime"] > 0
    assert {**second, "uptime": 0} == {**first, "uptime": 0}


# --- rules of the operations, where users meet them --------------------------------------------------------------


def make_span(claimed: AttemptedRollout, **fields: Any) -> Span:
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id, "sequence_id": -1}
    return Span.from_attributes(**{"attributes": {}, **ids, **fields})


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


WRONG_TYPES: dict[str, Callable[[LightningStore, str], Any]] = {
    "mode": lambda store, i: store.update_rollout(i, mode="training"),  # type: ignore[arg-type]
    "metadata": lambda store, i: store.update_rollout(i, metadata=[1]),  # type: ignore[arg-type]
    "resources_id": lambda store, i: store.update_rollout(i, resources_id=5),  # type: ignore[arg-type]
    "status": lambda store, i: store.update_rollout(i, status=None),  # type: ignore[arg-type]
    "config": lambda store, i: store.update_rollout(i, config=None),  # type: ignore[arg-type]
    "max_attempts": lambda store, i: store.update_rollout(i, config={"max_attempts": 0}),  # type: ignore[arg-type]
    "worker_id": lambda store, i: store.update_attempt(i, "latest", worker_id=5),  # type: ignore[arg-type]
    "outcome": lambda store, i: store.update_attempt(i, "latest", outcome="bad"),  # type: ignore[arg-type]
    "outcome_reason": lambda store, i: store.update_attempt(i, "latest", outcome_reason=3),  # type: ignore[arg-type]
    "error": lambda store, i: store.update_attempt(i, "latest", error="boom"),  # type: ignore[arg-type]
    "last_heartbeat_time": lambda store, i: store.update_attempt(i, "latest", last_heartbeat_time="noon"),  # type: ignore[arg-type]
    "no heartbeat": lambda store, i: store.update_attempt(i, "latest", last_heartbeat_time=None),  # type: ignore[arg-type]
    "attempt's status": lambda store, i: store.update_attempt(i, "latest", status=None),  # type: ignore[arg-type]
    "attempt's metadata": lambda store, i: store.update_attempt(i, "latest", metadata=[2]),  # type: ignore[arg-type]
    "heartbeat_stats": lambda store, i: store.update_worker("w", [1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrong", WRONG_TYPES)
async def test_a_value_of_the_wrong_type_is_refused_and_changes_nothing(store: LightningStore, wrong: str) -> None:
    started = await store.start_rollout({"q": 1}, mode="train", metadata={"k": 1}, worker_id="w")
    with pytest.raises(ValueError, match=r"input|status|cannot be a null|Input"):
        await WRONG_TYPES[wrong](store, started.rollout_id)
    rollout = await store.get_rollout_by_id(started.rollout_id)
    assert rollout == started
    assert (await store.query_workers()).total == 1


async def test_an_error_may_be_given_as_its_fields(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    fields: Any = {"type": "builtins.KeyError", "message": "'x'"}
    changed = await store.update_attempt(started.rollout_id, "latest", error=fields)
    assert changed.error == AttemptError(**fields)


async def test_numbers_that_json_does_not_know_come_back_as_null(store: LightningStore) -> None:
    made = await store.enqueue_rollout({"a": math.nan, "b": [math.inf, 1.5]}, metadata={"c": -math.inf})
    for rollout in (made, await store.get_rollout_by_id(made.rollout_id)):
        assert rollout is not None
        assert (rollout.input, rollout.metadata) == ({"a": None, "b": [None, 1.5]}, {"c": None})


async def test_text_that_is_no_unicode_is_refused(store: LightningStore) -> None:
    for task in ("\ud800", {"deep": ["\ud800"]}, {"\ud800": 1}):
        with pytest.raises((TypeError, ValueError)):
            await store.enqueue_rollout(task)
    assert (await store.query_rollouts()).total == 0


async def test_requests_and_resources_may_be_given_as_their_fields(store: LightningStore) -> None:
    requests: Any = [{"input": 1, "mode": "val"}]
    assert [made.mode for made in await store.enqueue_many_rollouts(requests)] == ["val"]
    fields: Any = {"p": {"resource_type": "prompt_template", "template": "t", "engine": "jinja"}}
    made = await store.add_resources(fields)
    assert made.resources == {"p": PromptTemplate(template="t", engine="jinja")}
    for wrong in ({"p": 3}, {"p": {"template": "t", "engine": "jinja"}}):
        with pytest.raises(ValueError, match=r"resource_type|dict|object"):
            await store.add_resources(wrong)  # type: ignore[arg-type]


async def test_an_empty_batch_is_legal(store: LightningStore) -> None:
    assert await store.enqueue_many_rollouts([]) == []
    assert await store.add_many_spans([]) == []
    assert await store.wait_for_rollouts(rollout_ids=[], timeout=None) == []
    assert await store.dequeue_many_rollouts(limit=0, worker_id="w") == []
    assert await store.dequeue_many_rollouts(limit=-3, worker_id="w") == []
    assert await store.get_worker_by_id("w") is None


async def test_what_is_not_given_has_its_default(store: LightningStore) -> None:
    made = await store.enqueue_rollout(None)
    assert (made.input, made.mode, made.metadata, made.config) == (None, None, {}, RolloutConfig())
    assert (made.status, made.resources_id, made.end_time, made.priority) == ("queuing", None, None, 0)
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert (claimed.attempt.worker_id, claimed.attempt.metadata, claimed.attempt.end_time) == (None, None, None)
    assert re.fullmatch(r"ro-[0-9a-f]{12}", made.rollout_id)
    assert re.fullmatch(r"at-[0-9a-f]{8}", claimed.attempt.attempt_id)


async def test_acting_on_an_unknown_id_names_it(store: LightningStore) -> None:
    queued = await store.enqueue_rollout("x")
    cases: list[tuple[Any, str]] = [
        (store.update_rollout("ro-no"), r"Item.*does not exist"),
        (store.start_attempt("ro-no"), "Rollout ro-no not found"),
        (store.update_attempt("ro-no", "latest"), "Rollout ro-no not found"),
        (store.update_attempt(queued.rollout_id, "latest"), f"No attempts found for rollout {queued.rollout_id}"),
        (store.get_next_span_sequence_id("ro-no", "at-no"), "Rollout ro-no not found"),
        (store.finish_rollout("ro-no"), "Rollout ro-no not found"),
    ]
    for call, text in cases:
        with pytest.raises(NotFoundError, match=text):
            await call
    started = await store.start_rollout("y")
    with pytest.raises(NotFoundError, match=f"Attempt at-no not found for rollout {started.rollout_id}"):
        await store.update_attempt(started.rollout_id, "at-no", status="failed")


async def test_asking_for_an_unknown_id_gives_nothing(store: LightningStore) -> None:
    assert await store.get_rollout_by_id("no") is None
    assert await store.get_latest_attempt("no") is None
    assert await store.get_worker_by_id("no") is None
    assert await store.get_resources_by_id("no") is None
    assert await store.get_latest_resources() is None
    assert (await store.query_attempts("no")).total == 0
    assert (await store.query_spans("no", "latest")).total == 0


async def test_an_update_without_fields_returns_what_is_there(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    changed = await store.update_rollout(started.rollout_id)
    assert type(changed) is Rollout
    assert dict(changed) == {name: value for name, value in dict(started).items() if name != "attempt"}
    assert await store.update_attempt(started.rollout_id, "latest") == started.attempt


async def test_an_attempt_belongs_to_no_worker_when_its_id_is_empty(store: LightningStore) -> None:
    started = await store.start_rollout("x", worker_id="")
    assert started.attempt.worker_id == ""
    assert (await store.query_workers()).total == 0
    cleared = await store.update_attempt(started.rollout_id, "latest", worker_id=None)
    assert cleared.worker_id is None


async def test_a_worker_keeps_its_heartbeat_when_its_work_changes(store: LightningStore) -> None:
    beaten = await store.update_worker("w", {"gpu": 0.5})
    started = await store.start_rollout("x", worker_id="w")
    busy = await store.get_worker_by_id("w")
    assert busy is not None
    assert (busy.status, busy.current_attempt_id) == ("busy", started.attempt.attempt_id)
    await store.update_attempt(started.rollout_id, "latest", status="succeeded")
    idle = await store.get_worker_by_id("w")
    assert idle is not None
    assert (idle.status, idle.current_rollout_id, idle.current_attempt_id) == ("idle", None, None)
    assert idle.last_idle_time is not None
    assert (idle.heartbeat_stats, idle.last_heartbeat_time) == ({"gpu": 0.5}, beaten.last_heartbeat_time)


async def test_an_empty_claim_makes_its_worker_idle(store: LightningStore) -> None:
    assert await store.dequeue_rollout("w") is None
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.status, worker.last_heartbeat_time) == ("idle", None)
    assert worker.last_dequeue_time == worker.last_idle_time is not None


@pytest.mark.parametrize(
    ("status", "worker"), [("timeout", "unknown"), ("unresponsive", "unknown"), ("failed", "idle")]
)
async def test_a_worker_is_unknown_when_its_attempt_was_lost(store: LightningStore, status: Any, worker: str) -> None:
    started = await store.start_rollout("x", worker_id="w")
    await store.update_attempt(started.rollout_id, "latest", status=status)
    stored_worker = await store.get_worker_by_id("w")
    assert stored_worker is not None
    assert (stored_worker.status, stored_worker.current_rollout_id) == (worker, None)


async def test_what_was_finished_or_begun_by_hand_is_claimed_by_nobody(store: LightningStore) -> None:
    cancelled, begun, waiting = [await store.enqueue_rollout(i) for i in range(3)]
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    await store.start_attempt(begun.rollout_id)
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == waiting.rollout_id
    assert await store.dequeue_rollout() is None


async def test_a_span_does_not_undo_what_was_written_meanwhile(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    await store.update_attempt(started.rollout_id, "latest", metadata={"k": 1}, worker_id="w")
    await store.add_span(make_span(started))
    attempt = await store.get_latest_attempt(started.rollout_id)
    assert attempt is not None
    assert (attempt.metadata, attempt.worker_id, attempt.status) == ({"k": 1}, "w", "running")


async def test_waiting_for_one_rollout_twice_gives_it_twice(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    await store.finish_rollout(started.rollout_id)
    ids = [started.rollout_id, "no", started.rollout_id]
    assert [each.rollout_id for each in await store.wait_for_rollouts(rollout_ids=ids)] == [started.rollout_id] * 2


async def test_nothing_that_a_caller_holds_is_the_stores(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    error, config = AttemptError(type="t", message="m"), RolloutConfig(retry_condition=["failed"])
    stats: dict[str, Any] = {"gpus": [1]}
    await store.update_attempt(started.rollout_id, "latest", error=error)
    await store.update_rollout(started.rollout_id, config=config)
    await store.update_worker("w", stats)
    await store.update_resources("r", {"p": PromptTemplate(template="t", engine="jinja")})
    error.message, stats["gpus"] = "changed", []
    config.retry_condition.append("timeout")
    for _ in range(2):
        attempt, rollout = await store.get_latest_attempt(started.rollout_id), (await store.query_rollouts())[0]
        worker, listed = (await store.query_workers())[0], (await store.query_resources())[0]
        fetched = await store.get_resources_by_id("r")
        assert attempt is not None
        assert attempt.error is not None
        assert fetched is not None
        assert (attempt.error.message, rollout.config.retry_condition) == ("m", ["failed"])
        assert worker.heartbeat_stats == {"gpus": [1]}
        for update in (listed, fetched):
            assert update.resources["p"] == PromptTemplate(template="t", engine="jinja")
            update.resources["p"] = PromptTemplate(template="changed", engine="jinja")
            update.resources.clear()
        attempt.error.message = "changed"
        rollout.config.retry_condition.clear()
        worker.heartbeat_stats["gpus"].append(2)


async def test_a_template_out_of_a_list_of_resources_is_a_copy(store: LightningStore) -> None:
    await store.update_resources("r", {"p": PromptTemplate(template="t", engine="jinja")})
    listed: Any = (await store.query_resources())[0].resources["p"]
    listed.template = "changed"
    resources: Any = await store.get_latest_resources()
    assert resources.resources["p"].template == "t"


async def test_a_claim_that_is_repeated_after_its_rollout_was_deleted_is_empty(store: LightningStore) -> None:
    made = await store.enqueue_rollout("x")
    token = request_token.set("one claim")
    try:
        assert (await store.dequeue_rollout("w")) is not None
        await store.delete_rollouts(rollout_ids=[made.rollout_id], force=True)
        assert await store.dequeue_rollout("w") is None
    finally:
        request_token.reset(token)


# --- the table of promises ---------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PROMISES = re.findall(
    r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs/deep-dive/store-promises.md").read_text(), re.MULTILINE
)


def test_the_table_of_promises_has_every_point_once_in_order() -> None:
    assert [int(number) for number, *_ in PROMISES] == list(range(1, 64))


@pytest.mark.parametrize("shown", [row[3] for row in PROMISES], ids=[row[0] for row in PROMISES])
def test_a_promise_is_shown_by_a_test_that_exists(shown: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
    assert named, "a promise needs a test; say in the third column what was decided"
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
