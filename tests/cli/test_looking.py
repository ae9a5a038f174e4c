"""Show and change the content of a store by hand: rollouts, resources, workers, statistics; as text and as JSON."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm.fast import BaselineResult
from agentlightning.cli import main
from agentlightning.evaluation.gate import judge_promotion
from agentlightning.evaluation.paired import Stopping
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.execution.run_state import stop_note, stop_run
from agentlightning.store import SQLiteLightningStore
from agentlightning.training.result import Evaluation, GRPOResult
from agentlightning.types import (
    LLM,
    AttemptError,
    CustomResource,
    PromptTemplate,
    RolloutConfig,
    RunRecord,
    Span,
    TraceStatus,
)
from tests.cli.test_rollouts import store_a_rollout
from tests.stubs.running import run_through_gateway
from tests.test_one_rollout import agent as asks_twice

SECRET = "sk-planted-key"


@pytest.fixture
async def store_file(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A file with a scored, a failed and a queued rollout, a worker, and two versions of a set of resources."""
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    ids = {"scored": await store_a_rollout(store), "failed": await store_a_rollout(store, failed=True)}
    queued = await store.enqueue_rollout("later", run_id="run-1", config=RolloutConfig(max_attempts=2))
    resources = await store.add_resources({"llm": LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key=SECRET)})
    await store.update_resources(
        resources.resources_id, {"prompt": PromptTemplate(template="Hello, {name}!", engine="f-string")}
    )
    await store.update_worker("worker-1", {"cpu": 1}, run_id="run-1")
    await stop_run(store, "run-0")  # leaves a row of its own among the workers
    await store.close()
    return str(tmp_path / "agl.db"), {**ids, "queued": queued.rollout_id, "resources": resources.resources_id}


@pytest.fixture
def place(store_file: tuple[str, dict[str, str]]) -> str:
    return store_file[0]


async def test_a_rollout_is_shown_with_what_agent_and_model_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL")
    [rollout] = await run_through_gateway(store, asks_twice, "hello")
    await store.close()
    assert await asyncio.to_thread(main, ["rollouts", "show", rollout.rollout_id, "--store", str(tmp_path)]) == 0
    first, attempt, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"rollout {rollout.rollout_id}: succeeded, mode train, reward ")
    assert attempt.endswith(": succeeded scored")
    assert lines[0] == "task: hello"
    assert [line for line in lines if line.startswith("---")] == ["--- model call 1", "--- model call 2"]
    assert sum(line.startswith("user: ") for line in lines) == 2
    assert sum(line.startswith("assistant: ") for line in lines) == 2
    command = ["rollouts", "export", "--format", "messages", "--store", str(tmp_path)]
    assert await asyncio.to_thread(main, command) == 0
    chats = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[message["role"] for message in chat["messages"]] for chat in chats] == [
        ["user", "assistant"], ["user", "assistant", "user", "assistant"],
    ]  # fmt: skip


async def test_a_rollout_as_json_has_attempts_messages_and_spans(agl: Any, store_file: Any) -> None:
    code, out, _ = await agl("rollouts", "show", store_file[1]["scored"], "--spans", "--json")
    report = json.loads(out)
    assert (code, report["reward"], report["rollout"]["status"]) == (0, 0.5, "succeeded")
    assert [attempt["outcome"] for attempt in report["attempts"]] == ["scored"]
    assert len(report["spans"]) == 6
    assert report["messages"]


async def test_what_the_agent_raised_is_shown_with_its_traceback(agl: Any, store_file: Any) -> None:
    store = SQLiteLightningStore(store_file[0], synchronous="NORMAL")
    made = await store.start_rollout("x")
    error = AttemptError(type="KeyError", message="'x'", traceback="Traceback ...\n  in agent\nKeyError: 'x'\n")
    await store.update_attempt(made.rollout_id, made.attempt.attempt_id, status="failed", error=error)
    await store.close()
    out = (await agl("rollouts", "show", made.rollout_id))[1]
    assert "failed infrastructure_fault exception, KeyError: 'x'" in out
    assert f"--- {made.attempt.attempt_id}: traceback\n  Traceback ...\n    in agent\n  KeyError: 'x'\n" in out


async def test_an_attempt_that_is_not_there_is_told_which_are(agl: Any, store_file: Any) -> None:
    code, _, err = await agl("rollouts", "show", store_file[1]["scored"], "--attempt", "at-none")
    assert (code, "has no attempt 'at-none'; it has: at-" in err) == (2, True)


@pytest.mark.parametrize(
    "command", [("rollouts", "list"), ("rollouts", "explain"), ("workers",), ("resources", "list")]
)
async def test_data_is_printed_as_one_json_document(agl: Any, store_file: Any, command: tuple[str, ...]) -> None:
    words = (*command, store_file[1]["scored"]) if command[-1] == "explain" else command
    code, out, _ = await agl(*words, "--json")
    assert code == 0
    assert json.loads(out)
    assert SECRET not in out


async def test_rollouts_that_have_ended_are_tried_again_and_others_are_left_alone(agl: Any, store_file: Any) -> None:
    path, ids = store_file
    code, out, err = await agl("rollouts", "retry", ids["failed"], ids["queued"])
    assert (code, out) == (1, f"{ids['failed']}: failed -> requeuing\n")
    assert f"{ids['queued']}: queuing, unchanged: it has not ended. Cancel it first" in err
    code, out, err = await agl("rollouts", "cancel", ids["failed"], ids["scored"])
    assert (code, out) == (1, f"{ids['failed']}: requeuing -> cancelled\n")
    assert "it has already ended" in err
    store = SQLiteLightningStore(path)
    assert [(await store.get_rollout_by_id(ids[name])).status for name in ("failed", "scored", "queued")] == [
        "cancelled", "succeeded", "queuing",
    ]  # fmt: skip
    await store.close()


async def test_all_open_rollouts_of_a_run_are_cancelled_at_once(agl: Any, store_file: Any) -> None:
    code, out, _ = await agl("rollouts", "cancel", "--run", "run-1")
    assert (code, out) == (0, f"{store_file[1]['queued']}: queuing -> cancelled\n")
    assert (await agl("rollouts", "cancel", "--run", "run-1"))[:2] == (0, "")
    for wrong in ([], ["ro-1", "--run", "run-1"]):
        code, _, err = await agl("rollouts", "cancel", *wrong)
        assert (code, "Name either rollout ids" in err) == (2, True)


async def test_an_export_holds_a_rollout_in_each_line(agl: Any, store_file: Any, tmp_path: Path) -> None:
    out_file = tmp_path / "export.jsonl"
    code, _, err = await agl("rollouts", "export", "--out", str(out_file))
    records = [json.loads(line) for line in out_file.read_text().splitlines()]
    assert (code, err) == (0, "3 lines\n")
    assert [len(record["spans"]) for record in records] == [6, 5, 0]
    assert (await agl("rollouts", "export", "--status", "succeeded"))[1].count("\n") == 1


async def test_each_version_of_resources_is_shown_without_its_key(agl: Any, store_file: Any) -> None:
    resources_id = store_file[1]["resources"]
    _, out, _ = await agl("resources", "list")
    assert "f-string 'Hello, {name}!'" in out
    code, out, _ = await agl("resources", "show", resources_id, "--version", "1")
    assert (code, json.loads(out)["resources"]["llm"]["api_key"]) == (0, None)
    code, _, err = await agl("resources", "show", resources_id, "--version", "9")
    assert (code, f"Resources '{resources_id}' not found in version 9" in err) == (2, True)


async def test_workers_are_listed_and_notes_among_them_are_not(agl: Any) -> None:
    code, out, _ = await agl("workers", "--json")
    assert (code, [worker["worker_id"] for worker in json.loads(out)]) == (0, ["worker-1"])
    assert (await agl("workers", "--run", "run-2"))[1].splitlines()[-1] == "0 workers"


async def test_statistics_are_numbers_for_programs_too(
    store_file: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["stats", store_file[0], "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert (stats["total_rollouts"], stats["rollouts"]["queuing"], stats["rollouts"]["failed"]) == (3, 1, 1)


async def test_a_run_is_told_to_stop(agl: Any, store_file: tuple[str, Any]) -> None:
    assert (await agl("run", "stop", "run-7", "--reason", "enough"))[0] == 0
    store = SQLiteLightningStore(store_file[0])
    note = await stop_note(store, "run-7")
    assert note is not None
    assert note.reason == "enough"
    await store.close()
    assert (await agl("run", "stop"))[0] == 2


async def test_no_command_that_looks_shows_a_secret_of_a_task_a_worker_an_error_or_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free: dict[str, Any] = {"api_key": SECRET, "url": f"http://user:{SECRET}@host/v1?api_key={SECRET}"}
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    await store.start_run("r", config=free, metadata=free)
    await store.add_run_records("r", [RunRecord(kind="step", step=1, data=free | {"mean_reward": 1.0})])
    llm = LLM(endpoint=free["url"], model="m", api_key=SECRET, sampling_parameters=free)
    resources = await store.add_resources({"llm": llm, "own": CustomResource(values=free)})
    started = await store.start_rollout(free, metadata=free, run_id="r", worker_id="w")
    rollout_id, attempt_id = started.rollout_id, started.attempt.attempt_id
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": 1}
    status = TraceStatus(status_code="ERROR", description=free["url"])
    await store.add_span(Span.from_attributes(attributes=free, name=free["url"], status=status, **ids))
    await store.update_worker("w", free, run_id="r")
    error = AttemptError(type="E", message=free["url"], traceback=f"api_key={SECRET}")
    failed: dict[str, Any] = {"status": "failed", "outcome": "infrastructure_fault", "outcome_reason": free["url"]}
    await store.update_attempt(rollout_id, attempt_id, error=error, metadata=free, **failed)
    await store.update_run("r", state="failed", error=error)
    await store.close()
    for command in (
        ("rollouts", "list"),
        ("rollouts", "show", rollout_id),
        ("rollouts", "show", rollout_id, "--spans"),
        ("rollouts", "explain", rollout_id),
        ("rollouts", "export"),
        ("resources", "list"),
        ("resources", "show", resources.resources_id),
        ("workers",),
        ("runs", "list"),
        ("runs", "show", "r"),
        ("runs", "show", "r", "--figure", "url", "--figure", "api_key"),
        ("runs", "ledger", "r"),
    ):
        always_json = command[:2] in (("rollouts", "export"), ("resources", "show"))
        for form in ((),) if always_json else ((), ("--json",)):
            code = await asyncio.to_thread(main, [*command, *form, "--store", str(tmp_path / "agl.db")])
            output = capsys.readouterr()
            assert code == 0, (command, output.err)
            assert SECRET not in output.out + output.err, (command, output.out)


async def test_a_count_of_one_has_its_noun_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    rollout_id = await store_a_rollout(store)
    await store.add_resources({"prompt": PromptTemplate(template="Hello", engine="f-string")})
    await store.update_worker("worker-1", {"cpu": 1})
    await store.start_run("r", algorithm="Mine")
    await store.add_run_records("r", [RunRecord(kind="step", step=1, data={"mean_reward": 1.0})])
    await store.add_run_records("r", [RunRecord(kind="evaluation", step=1, name="e", data={"rewards": [1.0]})])
    await store.close()
    words = ("rollouts list", f"rollouts explain {rollout_id}", "rollouts export", "resources list", "workers")
    words += ("runs list", "runs show r", "runs ledger r", "runs ledger r --check", "store check")
    for command in words:
        place = (
            ["--db", str(tmp_path / "agl.db")] if command == "store check" else ["--store", str(tmp_path / "agl.db")]
        )
        await asyncio.to_thread(main, [*command.split(), *place])
    task = EvaluatedTask("a", (EvaluatedRollout("ro-1", "scored", 1.0, 0.1),))
    evaluation = EvaluationResult((task,), stopping=Stopping("no evidence", 1.0, 1, 1, "baseline"))
    result = GRPOResult(tmp_path, 1, [Evaluation(0, "greedy", [1.0], ["ro-1"], 0.1)], late_calls={"stale": 1})
    texts = [evaluation, evaluation.compare(evaluation), judge_promotion(evaluation, evaluation), result]
    texts += [result.evaluations[0], BaselineResult([1.0], {"scored": 1})]
    shown = capsys.readouterr()
    text = "\n".join([shown.out, shown.err, *map(str, texts)])
    assert text.count("1 rollout") + text.count("1 task") >= 8
    assert (
        re.findall(r"\b1 (?:[a-z-]+ )?(?:task|rollout|call|token|pair|worker|run|step|line|span|sample|value)s\b", text)
        == []
    )
