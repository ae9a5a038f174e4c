"""`FlightRecorderAdapter` on entries as `FlightRecorder.get_log()` of agent-os-kernel 3.7.0 gives them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.contrib.adapter.agentos import FlightRecorderAdapter
from tests.contrib.kernels import (
    SQLPolicy,
    execute,
    kernel_of,
    living_agent,
    needs_agent_os,
    recorder_at,
    unknown_agent,
)

ADAPTER = FlightRecorderAdapter(rollout_id="ro-1", attempt_id="at-1")


def entry(number: int, tool: str, arguments: Any, verdict: str = "pending", **more: Any) -> dict[str, Any]:
    tool_args = json.dumps(arguments) if arguments else None
    return {
        **{"id": number, "trace_id": f"e-{number}", "timestamp": f"2026-11-24T03:54:5{number % 10}.5+00:00"},
        **{"agent_id": "analyst", "tool_name": tool, "tool_args": tool_args, "input_prompt": None},
        **{"policy_verdict": verdict, "violation_reason": None, "result": None, "execution_time_ms": None, **more},
    }


def call(tool: str, **args: Any) -> dict[str, Any]:
    return {"tool": tool, "args": args}


def refused(number: int, tool: str, syscall: str, arguments: dict[str, Any]) -> dict[str, Any]:
    marked = {**arguments, "_syscall": syscall, "_ring": "RING_3_USER"}
    return entry(number, tool, marked, "blocked", violation_reason=f"no {tool}")


def test_one_system_call_is_one_span() -> None:
    log = [
        entry(1, "syscall_SYS_EXEC", call("query", q="a")),
        entry(2, "query", {"q": "a"}, "allowed", result="rows", execution_time_ms=250.0),
        entry(3, "syscall_SYS_EXEC", call("rm", path="x")),
        refused(4, "rm", "SYS_EXEC", call("rm", path="x")),
        entry(5, "syscall_SYS_WRITE", {"path": "/mem/a", "data": "b"}),
        refused(6, "file_write", "SYS_WRITE", {"path": "/mem/a", "data": "b"}),
        entry(7, "syscall_SYS_READ", {"path": "/mem/a"}),
        entry(8, "syscall_SYS_EXEC", call("query")),
        entry(9, "query", None, "error", violation_reason="TypeError: no q"),
    ]
    spans = ADAPTER.adapt(reversed(log))
    assert [(span.name, span.attributes["agent_os.verdict"], span.status.status_code) for span in spans] == [
        ("query", "allowed", "OK"),
        ("rm", "blocked", "ERROR"),
        ("file_write", "blocked", "ERROR"),
        ("syscall_SYS_READ", "pending", "UNSET"),
        ("query", "error", "ERROR"),
    ]
    assert [span.attributes["agent_os.syscall"] for span in spans] == ["SYS_EXEC"] * 2 + [
        "SYS_WRITE",
        "SYS_READ",
        "SYS_EXEC",
    ]
    first = spans[0]
    assert (first.rollout_id, first.attempt_id, first.sequence_id) == ("ro-1", "at-1", -1)
    assert first.start_time is not None
    assert first.end_time is not None
    assert first.end_time - first.start_time == pytest.approx(1.25)
    assert first.attributes["agent_os.result"] == "rows"
    assert spans[1].status.description == "no rm"


def test_equal_calls_stay_apart_and_those_of_an_ended_agent_are_pending() -> None:
    same = call("query", q="a")
    log = [
        entry(1, "syscall_SYS_EXEC", same),  # of an agent that had been ended
        entry(2, "syscall_SYS_EXEC", same),
        entry(3, "query", {"q": "a"}, "allowed"),
        entry(4, "syscall_SYS_EXEC", same),
        entry(5, "query", {"q": "a"}, "allowed"),
        entry(6, "query", {"q": "other"}, "allowed"),  # written by no kernel
    ]
    spans = ADAPTER.adapt(log)
    assert [span.attributes["agent_os.verdict"] for span in spans] == ["pending", "allowed", "allowed", "allowed"]
    assert "agent_os.syscall" not in spans[-1].attributes


def test_secrets_in_entries_are_hidden() -> None:
    log = [
        entry(1, "login", {"password": "hunter2-hunter2"}, "allowed", result="password=hunter3-hunter3"),
        entry(2, "login", {}, "blocked", violation_reason="internal://user:hunter4-hunter4@host refused"),
    ]
    text = str(ADAPTER.adapt(log))
    assert [number for number in (2, 3, 4) if f"hunter{number}" in text] == []


@pytest.mark.parametrize(
    ("entry_value", "message"),
    [
        ("text", "entry 0 must be a dictionary, as get_log\\(\\)"),
        ({"trace_id": "a"}, "entry 0 is not an entry of a flight recorder: it has no timestamp, agent_id, tool_name"),
        (entry(1, "a", {}, timestamp="yesterday"), "entry 0 \\(e-1\\): timestamp must be ISO 8601, .* got 'yesterday'"),
    ],
)
def test_what_is_no_entry_is_refused(entry_value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ADAPTER.adapt([entry_value])


def test_an_empty_log_has_no_spans() -> None:
    assert ADAPTER.adapt([]) == []


@needs_agent_os
async def test_the_log_of_a_real_recorder_goes_into_a_store_once(tmp_path: Path) -> None:
    recorder = recorder_at(tmp_path)
    kernel = kernel_of(SQLPolicy(), recorder)
    await living_agent(kernel)(["SELECT 1", "DROP a"])
    await asyncio.gather(*(execute(unknown_agent(kernel), f"SELECT {n}", password="hunter2-x") for n in range(3)))
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout(input="imported")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await store.update_attempt(*ids.values(), status="succeeded", outcome="unscored")
    adapter = FlightRecorderAdapter(**ids)
    for _ in range(2):
        await store.add_many_spans(adapter(recorder.get_log()))
    spans = list(await store.query_spans(rollout.rollout_id))
    assert [span.attributes["agent_os.verdict"] for span in spans] == ["allowed", "blocked", *["allowed"] * 3]
    assert "hunter2" not in str(spans)
