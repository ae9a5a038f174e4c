"""`agl rollouts` as a shell runs it: the outcome of the calls of a rollout, and one line for an unknown one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentlightning.emitter import emit_annotation, emit_object, emit_reward
from agentlightning.store import LightningStoreServer, SQLiteLightningStore
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, Span
from tests.adapter.span_maker import chat, gateway_call
from tests.cli.terminal import on_terminal, shell

agl = partial(shell, "rollouts", COLUMNS="60")


async def store_a_rollout(
    store: LightningStore, *, failed: bool = False, mode: Any = "train", run_id: str | None = None
) -> str:
    """Store a rollout with two calls through the gateway and one past it, and return its id."""
    rollout = await store.start_rollout(input={"question": "six times seven"}, mode=mode, run_id=run_id)
    attempt_id = rollout.attempt.attempt_id
    made = [*gateway_call("a", 1, [1], [2]), *gateway_call("b", 2, [1, 2, 3], [4])]
    made.append(chat("t", None, 5, 6, sequence_id=3))
    for span in made:
        owner = {"rollout_id": rollout.rollout_id, "attempt_id": attempt_id, "span_id": f"{span.span_id}-{attempt_id}"}
        parent = {"parent_id": f"{span.parent_id}-{attempt_id}"} if span.parent_id else {}
        await store.add_span(span.model_copy(update={**owner, **parent}))
    if failed:
        await store.update_attempt(rollout.rollout_id, attempt_id, status="failed", outcome="infrastructure_fault")
    else:
        reward = emit_reward(0.5, propagate=False)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt_id, "sequence_id": 9}
        await store.add_span(Span.from_core_fields(reward, **ids))
        await store.update_attempt(rollout.rollout_id, attempt_id, status="succeeded", outcome="scored")
    return rollout.rollout_id


@pytest.fixture
async def run_folder(tmp_path: Path) -> tuple[Path, str]:
    """A run's folder with its database, and the id of the rollout in it."""
    store = SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL")
    rollout_id = await store_a_rollout(store)
    await store.close()
    return tmp_path, rollout_id


async def test_a_rollout_is_explained_call_by_call_out_of_a_runs_folder(run_folder: tuple[Path, str]) -> None:
    folder, rollout_id = run_folder
    done = agl("explain", rollout_id, "--store", str(folder))
    assert done.returncode == 0, done.stderr
    first, attempt, header, *calls, counts = done.stdout.splitlines()
    assert first == f"rollout {rollout_id}: succeeded, mode train, reward 0.5"
    assert attempt.endswith("succeeded scored")
    assert header.split() == ["call", "agent", "model", "state", "in", "out", "ids", "seen", "by", "row", "why"]
    assert [line.split()[-1] for line in calls] == ["first_call", "row", "no_tokens"]
    assert counts == "2 of 3 model calls in rows; excluded: 1 no_tokens"


async def test_a_rollout_that_failed_says_why_nothing_of_it_is_trained(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    rollout_id = await store_a_rollout(store, failed=True)
    await store.close()
    done = agl("explain", rollout_id, cwd=tmp_path)
    assert "excluded: 3 infrastructure_fault" in done.stdout
    assert "- 2 model calls infrastructure_fault: the attempt failed" in done.stdout


@pytest.mark.parametrize(
    ("mode", "algorithm", "text"),
    [
        ("val", "GRPO", "3 model calls; nothing of the rollout is trained: it is for evaluation (mode val)"),
        (
            "train",
            "Baseline",
            "nothing of the rollout is trained: Baseline trains no weights\n"
            "  2 of 3 model calls in rows if it were; excluded: 1 no_tokens",
        ),
    ],
)
async def test_where_nothing_trains_no_advice_for_training_is_given(
    tmp_path: Path, mode: str, algorithm: str, text: str
) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    await store.start_run("r", algorithm=algorithm)
    rollout_id = await store_a_rollout(store, mode=mode, run_id="r")
    await store.close()
    done = agl("explain", rollout_id, cwd=tmp_path)
    assert (done.returncode, done.stdout.rstrip().endswith(f"\n{text}")) == (0, True), done.stdout


async def test_advice_stands_line_by_line_on_a_terminal(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    rollout_id = await store_a_rollout(store, failed=True)
    rollout = await store.enqueue_rollout("first\nsecond")
    await store.close()
    code, lines = on_terminal("rollouts", "explain", rollout_id, "--store", tmp_path / "agl.db")
    assert code == 0
    assert "\\n" not in "\n".join(lines)
    assert lines[lines.index("  To try:") + 1].startswith("  - ")
    code, lines = on_terminal("rollouts", "show", rollout.rollout_id, "--store", tmp_path / "agl.db")
    assert lines[lines.index("task: first") + 1] == "  second"


async def test_a_server_may_be_asked(run_folder: tuple[Path, str], server: LightningStoreServer) -> None:
    rollout_id = await store_a_rollout(server)
    done = agl("explain", rollout_id, "--store", server.endpoint)
    assert done.stdout.startswith(f"rollout {rollout_id}: succeeded")


@pytest.mark.parametrize("arguments", [["explain", "ro-nobody"], ["explain", "ro-nobody", "--store", "nowhere.db"]])
async def test_what_is_not_there_is_one_line_and_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    await SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL").close()
    done = agl(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert " not found" in done.stderr
    assert "Traceback" not in done.stdout


async def test_the_list_is_filtered_and_says_how_many_there_are(run_folder: tuple[Path, str]) -> None:
    folder, rollout_id = run_folder
    done = agl("list", "--store", str(folder / "store.db"), "--status", "succeeded")
    assert rollout_id in done.stdout
    assert "succeeded scored" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 rollout"
    assert agl("list", "--store", str(folder), "--status", "failed").stdout.splitlines()[-1] == "0 rollouts"
    assert agl("list", "--store", str(folder), "--status", "faild").returncode == 2


async def test_the_list_is_newest_first_also_for_rollouts_that_were_enqueued_together(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(4)])
    assert len({rollout.start_time for rollout in rollouts}) == 1
    await store.close()
    newest = [rollout.rollout_id for rollout in reversed(rollouts)]
    for limit, status in ((3, "queuing"), (9, "pending")):
        *_, count = lines = agl("list", "--limit", str(limit), "--status", status, cwd=tmp_path).stdout.splitlines()
        assert [line.split()[0] for line in lines[1:-1]] == newest[:limit]
        assert count == f"{min(limit, 4)} rollouts"
        listed = json.loads(agl("list", "--limit", str(limit), "--json", cwd=tmp_path).stdout)
        assert [rollout["rollout_id"] for rollout in listed] == newest[:limit]


async def test_the_list_has_the_reward_that_show_has(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    scored = await store_a_rollout(store)
    failed = await store_a_rollout(store, failed=True)
    waiting = (await store.enqueue_rollout("x")).rollout_id
    await store.close()
    header, *lines, _ = on_terminal("rollouts", "list", "--store", tmp_path / "agl.db", columns=200)[1][:5]
    at = header.index("reward")
    rewards = {line.split()[0]: line[at:].split()[0] for line in lines}
    assert rewards == {scored: "0.5", failed: "-", waiting: "-"}
    for rollout_id, reward in rewards.items():
        done = agl("show", rollout_id, cwd=tmp_path)
        assert done.stdout.splitlines()[0].endswith(f", reward {reward}")


async def test_spans_are_shown_with_what_the_agent_emitted(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db", synchronous="NORMAL")
    rollout = await store.start_rollout(input="a book")
    emitted: list[tuple[str, dict[str, Any], str]] = [
        ("message", {"agentlightning.message.body": "first\n\x1b[31mred", "turn": 2}, r"first\n\x1b[31mred, turn=2"),
        (
            "annotation",
            dict(emit_annotation({"grade": {"style": "dull"}}, propagate=False).attributes),
            "grade.style=dull",
        ),
        ("object", dict(emit_object({"pages": 31}, propagate=False).attributes), '{"pages": 31}'),
        ("object", dict(emit_object("a text", propagate=False).attributes), "a text"),
        ("annotation", dict(emit_reward(0.5, propagate=False).attributes), "reward primary=0.5"),
        (
            "exception",
            {"exception.type": "LookupError", "exception.message": "no page 32", "exception.stacktrace": "Traceback"},
            "LookupError: no page 32",
        ),
        ("operation", {"agentlightning.operation.name": "print"}, ""),
        ("message", {"agentlightning.message.body": "x" * 5000}, "x" * 20),
    ]
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    for number, (kind, attributes, _) in enumerate(emitted, 1):
        name = f"agentlightning.{kind}"
        await store.add_span(Span.from_attributes(attributes=attributes, sequence_id=number, name=name, **ids))
    await store.close()
    done = agl("show", rollout.rollout_id, "--spans", cwd=tmp_path)
    lines = done.stdout.splitlines()
    header = next(line for line in lines if line.startswith("span "))
    rows = lines[lines.index(header) + 1 :]
    assert len(rows) == len(emitted), done.stdout
    contents = [row[header.index("content") :].rstrip() for row in rows]
    assert contents[:-1] == [content for *_, content in emitted[:-1]]
    assert contents[-1].startswith("x" * 20)
    _, shown = on_terminal("rollouts", "show", rollout.rollout_id, "--spans", "--store", tmp_path / "agl.db")
    assert next(line for line in shown if line.startswith("8 ")).endswith("x…")
    assert all(len(line) <= 80 for line in shown)
    assert len([line for line in shown if line[:1].isdigit()]) == len(emitted), "no line is folded"
