"""The contract as a class: its signatures, defaults and types, in every store; the table of promises.

What every store does is in `conformance/`; the values are in `tests/types`, the wire forms in `test_wire.py`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    SQLiteLightningStore,
)
from agentlightning.store.base import UNSET
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.operations import names_of
from agentlightning.store.wrappers import CompletedStore, LightningStoreScoped

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


STORES = (EngineStore, LightningStoreClient, LightningStoreServer, LightningStoreThreaded, CompletedStore)


@pytest.mark.parametrize("kind", [*STORES, LightningStoreScoped])
def test_a_store_has_the_signatures_and_types_of_the_contract(kind: type[LightningStore]) -> None:
    for operation in names_of():
        contract, own = (inspect.signature(getattr(cls, operation)) for cls in (LightningStore, kind))
        shown = [(p.name, p.kind, p.default) for p in own.parameters.values()]
        assert shown == [(p.name, p.kind, p.default) for p in contract.parameters.values()], operation
        if kind in STORES:
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


# --- the table of promises: `tests/test_documents.py` checks that the tests exist


def test_the_table_of_promises_has_every_point_once_in_order_with_its_tests() -> None:
    page = (Path(__file__).parents[2] / "docs/deep-dive/store-promises.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .+ \| .+ \| (.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 64))
    assert [number for number, shown in rows if not re.search(r"`tests/[\w/]+\.py::\w+`", shown)] == []
