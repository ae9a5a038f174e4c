"""`agl gateway` as a user runs it: a process, a base URL, an unaware program, a file with its calls."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.store.sqlite import SQLiteLightningStore
from tests.stubs.model_server import Fault, ModelServer, encode
from tests.stubs.processes import Process


@pytest.fixture
def start(serve: Any) -> Any:
    """Starts the gateway; returns its process and the addresses that it names."""

    def started(*arguments: str) -> tuple[Process, dict[str, str]]:
        process, lines = serve("gateway", *arguments, lines=4)
        return process, dict(line.split("=", 1) for line in lines if "=" in line)

    return started


def _ask(base_url: str, content: str, model: str = "tiny") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _end(process: Process) -> dict[str, Any]:
    assert process.interrupted() == 0
    return json.loads(process.said.splitlines()[-1])


def test_a_program_is_recorded_without_a_trainer_and_run_without_a_model(start: Any, tmp_path: Path) -> None:
    with ModelServer() as model:
        upstream = ("--upstream", model.base_url, "--model", "tiny", "--record", "calls.jsonl")
        process, urls = start(*upstream)
        content = _ask(urls["OPENAI_BASE_URL"], "hello")["choices"][0]["message"]["content"]
        stats = _end(process)
    assert stats["calls"] == {"ok": 1}

    async def recorded() -> tuple[str, Any]:
        store = SQLiteLightningStore(tmp_path / "agl.db")
        rollout = await store.get_rollout_by_id(stats["rollout"])
        spans = await store.query_spans(stats["rollout"], name="raw_gen_ai_request")
        await store.close()
        assert rollout is not None
        return rollout.status, spans[0].attributes["agentlightning.call.completion_token_ids"]

    assert asyncio.run(recorded()) == ("succeeded", encode("you said hello"))
    process, urls = start("--replay", "calls.jsonl", "--store", "memory")
    assert _ask(urls["OPENAI_BASE_URL"], "hello")["choices"][0]["message"]["content"] == content
    _end(process)


def test_a_file_names_models_limits_and_policies(start: Any, tmp_path: Path) -> None:
    with ModelServer() as model:
        entry = {"model_name": "tiny", "litellm_params": {"model": "tiny", "api_base": model.base_url}}
        config = {
            "model_list": [entry],
            "limits": {"tokens_per_rollout": 1},
            "keep": "tokens",
            "health": {"interval_seconds": 1.0},
            "policies": {"main": {"kind": "trained", "roles": ["solver"]}, "rest": {"kind": "external"}},
        }
        (tmp_path / "gateway.json").write_text(json.dumps(config))
        process, urls = start("--config", "gateway.json", "--store", "memory")
        _ask(urls["role solver: OPENAI_BASE_URL"], "hello")
        with pytest.raises(urllib.error.HTTPError, match="429"):
            _ask(urls["OPENAI_BASE_URL"], "hello")
        assert _end(process)["calls"] == {"ok": 1, "refused": 1}


def test_a_file_names_fallbacks_and_aliases_as_litellm_does(start: Any, tmp_path: Path) -> None:
    with ModelServer() as model, ModelServer(lambda request: "the backup") as backup:
        model.faults = [Fault(500)]
        router = {"fallbacks": [{"tiny": ["backup"]}], "model_group_alias": {"gpt-4o": "tiny"}}
        config = {"model_list": [model.entry("tiny"), backup.entry("backup")], "router_settings": router}
        (tmp_path / "gateway.json").write_text(json.dumps({"litellm_config": config}))
        process, urls = start("--config", "gateway.json", "--store", "memory")
        replies = (_ask(urls["OPENAI_BASE_URL"], "hello", name) for name in ("tiny", "gpt-4o"))
        answers = [answer["choices"][0]["message"]["content"] for answer in replies]
        assert answers == ["the backup", "you said hello"]
        assert _end(process)["calls"] == {"ok": 2}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "No model is set"),
        (["--upstream", "http://127.0.0.1:1/v1"], "--upstream and --model must be used together"),
        (["--api-key", "KEY", "--replay", "x"], "--api-key requires --upstream"),
        (["--upstream", "nowhere", "--model", "m"], "api_base must be a URL"),
        (["--config", "none.yaml"], "No such file"),
        (["--replay", "none.jsonl"], "cannot be read"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["gateway", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[1]", "must contain a mapping"),
        ("modles: []", "unknown keys modles"),
        ("limits: {speed: 3}", "limits: "),
        ("health: {speed: 3}", "health: "),
        (
            "{model_list: [{model_name: m, litellm_params: {model: m, api_base: 'http://127.0.0.1:1/v1'}}], "
            "policies: {main: {kind: learning}}}",
            "must be one of trained, frozen, external",
        ),
        ("a: [", "neither"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, text: str
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(content)
    assert main(["gateway", "--config", str(path)]) == 2
    assert text in capsys.readouterr().err
