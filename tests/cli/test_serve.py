"""`agl serve` as a user runs it: a process with a trained model, any client of OpenAI's API, a store with its calls."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'agl-framework[grpo]'")

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.cli import main
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import LLM
from tests.algorithm.parts import ask, save_untrained_model, say


@pytest.mark.heavy
def test_a_model_is_served_and_its_calls_are_recorded_with_their_tokens(tmp_path: Path) -> None:
    model = save_untrained_model(tmp_path / "model")
    command = [sys.executable, "-m", "agentlightning.cli", "serve", str(model), "--store", str(tmp_path / "agl.db")]
    environment = {name: value for name, value in os.environ.items() if name != "AGL_TOKEN"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        variables: dict[str, str] = {}
        while "OPENAI_BASE_URL" not in variables:
            line = process.stdout.readline()
            assert line, process.wait()
            variables |= dict([line.strip().split("=", 1)]) if "=" in line else {}
        url = variables["OPENAI_BASE_URL"]
        assert url.startswith("http://127.0.0.1:")
        llm = LLM(endpoint=url, model="policy", sampling_parameters={"max_tokens": 3})
        assert ask(llm, [say("one")])["role"] == "assistant"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(llm.model_copy(update={"model": "another"}), [say("one")])
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert time.monotonic() - began < 60

    async def calls() -> list[int]:
        store = SQLiteLightningStore(tmp_path / "agl.db")
        [rollout] = await store.query_rollouts()
        recorded_calls = model_calls(list(await store.query_spans(rollout.rollout_id)))
        await store.close()
        assert rollout.status == "succeeded"
        return [len(call.completion_token_ids) for call in recorded_calls if call.state == "ok"]

    assert asyncio.run(calls()) == [3]


def test_beyond_loopback_a_token_is_needed_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    assert main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 1
    assert "AGL_TOKEN" in capsys.readouterr().err
