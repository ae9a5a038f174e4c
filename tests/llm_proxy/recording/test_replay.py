"""Calls in a file: recorded with their tokens, replayed without a model server, strictly or by similarity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.llm_proxy import LLMProxy
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import ModelServer


async def _record(path: Path, *contents: str) -> None:
    async with GatewayHarness(record=path) as harness:
        for content in contents:
            assert (await harness.ask(content))[0] == 200


async def test_a_stream_is_replayed_from_a_call_that_was_none_and_back(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    async with GatewayHarness(record=path) as harness:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with harness.session.post(harness.url(), json=body) as streamed:
            await streamed.read()
    async with GatewayHarness(replay=path) as harness:
        assert (await harness.ask("hi"))[1]["choices"][0]["message"]["content"] == "you said hi"


async def test_the_same_request_is_replayed_in_the_order_of_its_recording(tmp_path: Path) -> None:
    answers = iter(["one", "two", "three"])
    path = tmp_path / "calls.jsonl"
    async with GatewayHarness(ModelServer(answer=lambda request: next(answers)), record=path) as harness:
        for _ in range(3):
            await harness.ask()
    async with GatewayHarness(replay=path) as harness:
        replies = [(await harness.ask())[1]["choices"][0]["message"]["content"] for _ in range(4)]
    assert replies == ["one", "two", "three", "three"]


async def test_a_call_that_is_not_on_file_is_refused_and_shows_the_one_most_like_it(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    await _record(path, "what is six times seven", "tell a joke")
    async with GatewayHarness(replay=path) as harness:
        status, body = await harness.ask("what is six times eight")
        assert status == 404
        assert body["error"]["code"] == "replay_miss"
        assert "six times seven" in body["error"]["message"]
        assert await harness.states() == ["upstream_error"]
        assert harness.model.calls == []


@pytest.mark.parametrize("reply_text", ["one\u2028two\u0085three\x1c", "half \ud83d", "wörter 中文"])
async def test_every_text_comes_back_from_the_file(tmp_path: Path, reply_text: str) -> None:
    path = tmp_path / "calls.jsonl"
    async with GatewayHarness(ModelServer(answer=lambda request: reply_text), record=path) as harness:
        status, made = await harness.ask(reply_text)
        assert status == 200
    async with GatewayHarness(replay=path, model_list=[]) as harness:
        status, reply = await harness.ask(reply_text)
        assert (status, reply["choices"][0]["message"]) == (200, made["choices"][0]["message"])


async def test_the_nearest_call_can_be_replayed_instead(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    await _record(path, "what is six times seven", "tell a joke")
    async with GatewayHarness(replay=path, replay_match="nearest") as harness:
        _, reply = await harness.ask("what is six times eight")
        assert reply["choices"][0]["message"]["content"] == "you said what is six times seven"


async def test_one_file_for_both_asks_only_what_it_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    for _ in range(2):
        async with GatewayHarness(record=path, replay=path) as harness:
            for content in ("a", "b"):
                assert (await harness.ask(content))[0] == 200
            count = len(harness.model.calls)
    assert count == 0
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("line", ["no json", "[]", '{"route": "chat/completions"}'])
def test_a_file_that_is_no_recording_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps({"route": "r", "request": {}, "reply": {}}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        LLMProxy(replay=path)


def test_an_empty_file_holds_no_calls(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").touch()
    LLMProxy(replay=tmp_path / "calls.jsonl")


def test_a_file_that_is_not_there_and_a_wrong_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        LLMProxy(replay=tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="strict, nearest"):
        LLMProxy(record=tmp_path / "x.jsonl", replay_match="fuzzy")  # type: ignore[arg-type]
