"""`agl serve` as a user runs it: a process with a trained model, any client of OpenAI's API, a store with its calls."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
from pathlib import Path

import openai
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'agl-framework[grpo]'")

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.cli import main
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import LLM
from tests.algorithm.parts import ask, save_untrained_model, say
from tests.pages import blocks
from tests.stubs.processes import Process, Terminal


def addresses(process: Process) -> dict[str, str]:
    """Return what a server that has started says of itself, by the word before it."""
    lines = process.until(r"(?m)^example: .*\n").splitlines()
    return dict(re.split("=|: ", line, maxsplit=1) for line in lines if re.match(r"\w+(=|: )", line))


@pytest.mark.heavy
async def test_a_model_is_served_at_the_plain_url_and_its_calls_are_recorded_with_their_tokens(
    tmp_path: Path, terminal: Terminal
) -> None:
    model = save_untrained_model(tmp_path / "model")
    process = terminal(["agl", "serve", model, "--store", "agl.db", "--name", "mine"], apart=True)
    printed = await asyncio.to_thread(addresses, process)
    url = printed["OPENAI_BASE_URL"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)
    assert printed["model"] == "mine"
    llm = LLM(endpoint=url, model="mine", sampling_parameters={"max_tokens": 3})
    assert (await asyncio.to_thread(ask, llm, [say("one")]))["role"] == "assistant"
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match=r"'gpt-4o' does not exist\. Models of this gateway: mine"):
            await client.responses.create(model="gpt-4o", input="one")
        assert [each.id async for each in client.models.list()] == ["mine"]
    example = await asyncio.to_thread(subprocess.run, shlex.split(printed["example"]), capture_output=True, check=True)
    assert json.loads(example.stdout)["object"] == "chat.completion"
    assert await asyncio.to_thread(process.interrupted) == 0
    store = SQLiteLightningStore(tmp_path / "agl.db")
    [rollout] = await store.query_rollouts()
    recorded_calls = model_calls(list(await store.query_spans(rollout.rollout_id)))
    await store.close()
    assert rollout.status == "succeeded"
    assert f"recording calls for rollout {rollout.rollout_id}\n" in process.said
    assert [len(call.completion_token_ids) for call in recorded_calls if call.state == "ok"][:1] == [3]


@pytest.mark.heavy
def test_the_program_of_the_page_runs_an_agent_with_a_served_model(tmp_path: Path, terminal: Terminal) -> None:
    [program] = [block for block in blocks("how-to/resume.md") if "http://127.0.0.1:8000/v1" in block]
    process = terminal(["agl", "serve", save_untrained_model(tmp_path / "model")], apart=True)
    url = addresses(process)["OPENAI_BASE_URL"]
    assert "calls are not recorded" in process.said
    (tmp_path / "program.py").write_text(program.replace("http://127.0.0.1:8000/v1", url))
    assert "2 of 2 tasks" in terminal(["python", "program.py"], apart=True).succeeded()
    assert process.interrupted() == 0
    end = json.loads(process.said.splitlines()[-1])
    assert (end["calls"], "rollout" in end) == ({"ok": 2}, False)
    assert not list(tmp_path.glob("*.db"))


def test_a_name_that_is_neither_a_folder_nor_a_run_is_refused_with_what_to_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asyncio.run(SQLiteLightningStore(tmp_path / "other.db").close())
    for more, reason in (([], "'agl.db' not found"), (["--store", "other.db"], "has no checkpoint of run 'nope'")):
        assert main(["serve", "nope", *more]) == 2
        error = capsys.readouterr().err
        assert "'nope' is neither the folder of a checkpoint, run or model nor the id of a run" in error
        assert reason in error
        assert "Or pass an existing folder, such as runs/20260101-120000" in error


def test_beyond_loopback_a_token_is_needed_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    assert main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 1
    assert "AGL_TOKEN" in capsys.readouterr().err
