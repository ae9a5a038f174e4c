"""`agl serve` as a user runs it: a process with a trained model, any client of OpenAI's API, a store with its calls."""

from __future__ import annotations

import asyncio
import re
import urllib.error
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'agl-framework[grpo]'")

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.cli import main
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import LLM
from tests.algorithm.parts import ask, save_untrained_model, say
from tests.stubs.processes import Terminal


@pytest.mark.heavy
async def test_a_model_is_served_and_its_calls_are_recorded_with_their_tokens(
    tmp_path: Path, terminal: Terminal
) -> None:
    model = save_untrained_model(tmp_path / "model")
    process = terminal(["agl", "serve", model, "--store", "agl.db"], apart=True)
    variable = re.compile(r"^OPENAI_BASE_URL=(\S+)\n", re.MULTILINE)
    [url] = variable.findall(await asyncio.to_thread(process.until, f"(?m){variable.pattern}"))
    assert url.startswith("http://127.0.0.1:")
    llm = LLM(endpoint=url, model="policy", sampling_parameters={"max_tokens": 3})
    assert (await asyncio.to_thread(ask, llm, [say("one")]))["role"] == "assistant"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        await asyncio.to_thread(ask, llm.model_copy(update={"model": "another"}), [say("one")])
    assert await asyncio.to_thread(process.interrupted) == 0
    store = SQLiteLightningStore(tmp_path / "agl.db")
    [rollout] = await store.query_rollouts()
    recorded_calls = model_calls(list(await store.query_spans(rollout.rollout_id)))
    await store.close()
    assert rollout.status == "succeeded"
    assert [len(call.completion_token_ids) for call in recorded_calls if call.state == "ok"] == [3]


def test_beyond_loopback_a_token_is_needed_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    assert main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 1
    assert "AGL_TOKEN" in capsys.readouterr().err
