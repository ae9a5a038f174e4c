"""A store full of hostile names, shown by every command: no control sequence of a terminal is printed."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentlightning.cli import main
from agentlightning.store import SQLiteLightningStore
from agentlightning.trainer.follow import RunReport
from agentlightning.training.progress import Plain
from agentlightning.types import LLM, AttemptError, OtelResource, PromptTemplate, RolloutEvent, Span, TraceStatus

NAME = "\x1b[31mred\x1b]0;title\x07\x1b]8;;http://x\x1b\\\x9b2J\r\x7f\u202egnp\u2066\u200b\ufeff\u2028\U000e0041\x08[red]m[/red][link=http://x]y[/link]"
LINES = NAME + "\nagl: forged\n" + NAME
OBEYED = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)


def _span(rollout_id: str, attempt_id: str, name: str, attributes: dict[str, Any], number: int) -> Span:
    span = Span.from_attributes(
        attributes=attributes, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=number, name=name
    )
    status = TraceStatus(status_code="ERROR", description=LINES)
    return span.model_copy(update={"status": status, "resource": OtelResource(attributes={NAME: LINES})})


@pytest.fixture
async def place(tmp_path: Path) -> tuple[str, str, str]:
    store = SQLiteLightningStore(tmp_path / "a.db", synchronous="NORMAL")
    resources = {
        NAME: PromptTemplate(template=LINES, engine="jinja"),
        "llm" + NAME: LLM(endpoint=f"http://{NAME}", model=LINES, sampling_parameters={NAME: LINES}),
    }
    update = await store.update_resources(NAME, resources)
    rollout = await store.enqueue_rollout(
        {NAME: LINES}, run_id=NAME, resources_id=update.resources_id, metadata={NAME: LINES}
    )
    await store.update_worker(NAME, {NAME: LINES}, run_id=NAME)
    claimed = await store.dequeue_rollout(NAME, run_id=NAME)
    assert claimed is not None
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    call = {
        "gen_ai.prompt.0.role": NAME,
        "gen_ai.prompt.0.content": LINES,
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": LINES,
        "gen_ai.request.model": NAME,
        "gen_ai.response.id": NAME,
        "llm.request.functions.0.name": NAME,
    }
    await store.add_many_spans([_span(*ids, NAME, {NAME: LINES}, 1), _span(*ids, "openai.chat.completion", call, 2)])
    error = AttemptError(type=NAME, message=LINES, traceback=LINES)
    await store.update_attempt(*ids, status="failed", outcome="infrastructure_fault", outcome_reason=LINES, error=error)
    await store.close()
    return str(tmp_path / "a.db"), rollout.rollout_id, claimed.attempt.attempt_id


COMMANDS = [
    ["rollouts", "list"],
    ["rollouts", "list", "--json"],
    ["rollouts", "list", "--contains", NAME],
    ["rollouts", "show", "ID", "--spans"],
    ["rollouts", "show", "ID", "--spans", "--json"],
    ["rollouts", "show", "ID", "--attempt", NAME],
    ["rollouts", "show", NAME],
    ["rollouts", "explain", "ID"],
    ["rollouts", "explain", "ID", "--json"],
    ["rollouts", "explain", LINES],
    ["rollouts", "cancel", "ID"],
    ["rollouts", "cancel", NAME],
    ["rollouts", "retry", NAME],
    ["rollouts", "export"],
    ["rollouts", "export", "--format", "messages"],
    ["resources", "list"],
    ["resources", "list", "--json"],
    ["resources", "show", NAME],
    ["resources", "show", LINES],
    ["workers"],
    ["workers", "--json"],
    ["workers", "--run", NAME],
    ["run", "stop", NAME],
]  # fmt: skip


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
async def test_no_command_says_what_a_terminal_obeys(
    place: tuple[str, str, str], capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    for command in COMMANDS:
        arguments = [place[1] if word == "ID" else word for word in command]
        capsys.readouterr()
        await asyncio.to_thread(main, [*(["--debug"] if debug else []), *arguments, "--store", place[0]])
        output = capsys.readouterr()
        assert output.out or output.err, command
        for text in (output.out, output.err):
            match = OBEYED.search(text)
            assert match is None, (command, ascii(text[max(0, match.start() - 60) : match.end() + 20]))
            assert "\nagl: forged" not in text, command


@pytest.mark.parametrize("arguments", [["stats"], ["stats", "--json"], ["store", "stats"], ["store", "check", "--db"]])
async def test_no_command_about_a_file_either(
    place: tuple[str, str, str], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    await asyncio.to_thread(main, [*arguments, place[0]])
    await asyncio.to_thread(main, [*arguments, place[0] + NAME])
    output = capsys.readouterr()
    assert OBEYED.search(output.out + output.err) is None


async def test_json_of_a_command_means_what_the_store_holds(
    place: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(main, ["rollouts", "list", "--json", "--store", place[0]])
    (rollout,) = json.loads(capsys.readouterr().out)
    assert (rollout["input"], rollout["run_id"]) == ({NAME: LINES}, NAME)


def test_the_display_of_a_run_shows_reasons_and_places_as_they_are() -> None:
    report = RunReport(name=NAME, place=NAME)
    nothing = dict.fromkeys(("run_id", "mode", "attempt_id", "attempt_status", "worker_id"))
    times = {"start_time": 1.0, "end_time": 2.0, "spans": 0}
    event = RolloutEvent.model_validate(
        {**nothing, **times, "rollout_id": "r", "status": "failed", "outcome": "cancelled"}
    )
    report.note(event, None)
    console = Console(file=io.StringIO(), width=300)
    console.print(report.table(1.0))
    Plain(console.file).note(LINES)  # type: ignore[arg-type] -- a text stream
    written = console.file.getvalue()  # type: ignore[attr-defined] -- a StringIO
    assert OBEYED.search(written) is None
    assert "[red]m[/red]" in written
