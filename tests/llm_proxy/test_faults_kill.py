"""The gateway's process is killed with `kill -9` in the middle of calls and started again; its store is a file.

What an agent has been answered is on file. What it has not been answered is recorded as an error by the next gateway.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.recording.journal import Journal
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import Span
from tests.llm_proxy.harness import GatewayHarness, GatewayProcess
from tests.stubs.model_server import ModelServer, encode

STATE = "agentlightning.call.state"
IDS = "agentlightning.call.completion_token_ids"


@asynccontextmanager
async def clients(url: str) -> AsyncGenerator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """Give the two libraries, which try nothing again."""
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as by_openai,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as by_anthropic,
    ):
        yield by_openai, by_anthropic


async def records(path: Path, url: str) -> list[Span]:
    """Return the spans of an attempt."""
    store = SQLiteLightningStore(path)
    spans = list(await store.query_spans(url.split("/")[4], url.split("/")[6]))
    await store.close()
    return spans


def states(spans: Sequence[Span]) -> list[Any]:
    raw = [span for span in spans if span.name == "raw_gen_ai_request"]
    return [span.attributes[STATE] for span in sorted(raw, key=lambda span: span.sequence_id)]


@pytest.mark.slow
async def test_calls_that_a_killed_gateway_had_in_hand_fail_for_the_agent_and_are_recorded_as_failed(
    tmp_path: Path,
) -> None:
    messages: Any = [{"role": "user", "content": "go"}]
    with ModelServer(answer=lambda request: "one two three") as model:
        gateway = GatewayProcess(tmp_path, model.base_url, store="sqlite:///calls.db")
        url = await gateway.start()
        async with clients(url) as (by_openai, by_anthropic):

            async def stream() -> None:
                async for _ in await by_openai.chat.completions.create(model="policy", messages=messages, stream=True):
                    begun.set()

            await by_openai.chat.completions.create(model="policy", messages=messages)
            begun = asyncio.Event()
            model.hold_frames(2)
            streamed = asyncio.create_task(stream())
            await begun.wait()
            model.hold()
            waiting: list[asyncio.Task[Any]] = [
                asyncio.create_task(by_openai.chat.completions.create(model="policy", messages=messages)),
                asyncio.create_task(by_anthropic.messages.create(model="policy", max_tokens=9, messages=messages)),
            ]
            await model.until(lambda calls: len(calls) >= 4)
            await gateway.end(signal.SIGKILL)
            outcomes = await asyncio.gather(*waiting, streamed, return_exceptions=True)
            assert isinstance(outcomes[0], openai.APIConnectionError)
            assert isinstance(outcomes[1], anthropic.APIConnectionError)
            assert isinstance(outcomes[2], Exception), "a stream that broke off must not look like one that ended"
        model.release()
        await gateway.start()
        async with clients(url) as (by_openai, _):
            assert (await by_openai.chat.completions.create(model="policy", messages=messages)).choices
        await gateway.end()
    spans = await records(tmp_path / "calls.db", url)
    assert states(spans) == ["ok", "upstream_error", "upstream_error", "upstream_error", "ok"]
    assert all("process ended" in str(span.status.description) for span in spans if span.status.status_code == "ERROR")
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        triplets = adapter.read(spans).triplets
        assert [triplet.response["token_ids"] for triplet in triplets] == [encode("one two three")] * 2


@pytest.mark.heavy
async def test_every_answer_that_an_agent_got_is_on_file_however_the_gateway_died(tmp_path: Path) -> None:
    got: list[str] = []
    with ModelServer() as model:
        gateway = GatewayProcess(tmp_path, model.base_url, store="sqlite:///calls.db")
        url = await gateway.start()
        async with clients(url) as (by_openai, _):

            async def ask_on(agent: int) -> None:
                for number in range(10_000):
                    messages: Any = [{"role": "user", "content": f"{agent} {number}"}]
                    reply = await by_openai.chat.completions.create(model="policy", messages=messages)
                    got.append(reply.id)
                    enough.set() if len(got) > 60 else None

            enough = asyncio.Event()
            agents = [asyncio.create_task(ask_on(agent)) for agent in range(8)]
            await enough.wait()
            await gateway.end(signal.SIGKILL)
            ends = await asyncio.gather(*agents, return_exceptions=True)
            assert {type(end) for end in ends} == {openai.APIConnectionError}
        await gateway.start()
        await gateway.end()
        sent = {call.reply["id"]: call.reply for call in model.calls if call.reply is not None}
    spans = await records(tmp_path / "calls.db", url)
    answered = {str(s.attributes["llm.hosted_vllm.id"]): s for s in spans if s.attributes.get(STATE) == "ok"}
    assert set(got) <= set(answered)
    assert set(states(spans)) <= {"ok", "upstream_error"}
    numbers = [span.sequence_id for span in spans if span.name == "raw_gen_ai_request"]
    assert len(set(numbers)) == len(numbers)
    for reply_id, span in answered.items():
        assert span.attributes[IDS] == sent[reply_id]["choices"][0]["token_ids"]
    unheard = [span for span in spans if span.attributes.get(STATE) == "upstream_error"]
    assert all(IDS not in span.attributes for span in unheard)


# --- the file of the calls in hand ----------------------------------------------------------------------------------


async def test_a_call_that_was_recorded_before_the_kill_is_not_recorded_again(tmp_path: Path) -> None:
    async with GatewayHarness(journal=tmp_path / "calls") as harness:
        harness.model.hold()
        call = asyncio.create_task(harness.ask())
        await harness.model.until(lambda calls: len(calls) == 1)
        begun = (tmp_path / "calls").read_bytes()  # what is on file if the kill comes just after the spans are stored
        harness.model.release()
        assert (await call)[0] == 200
        await harness.proxy.stop()
        assert not (tmp_path / "calls").exists()
        (tmp_path / "calls").write_bytes(begun)
        await harness.proxy.start()
        assert await harness.states() == ["ok"]
        assert len(await harness.spans()) == 2
        assert b"ended" in (tmp_path / "calls").read_bytes()


async def test_a_journal_of_a_living_gateway_is_refused_to_another(tmp_path: Path) -> None:
    async with GatewayHarness(journal=tmp_path / "calls"):
        with pytest.raises(ValueError, match="is used by a running gateway"):
            Journal(tmp_path / "calls").open()


def test_a_journal_with_broken_lines_tells_of_the_calls_that_can_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "calls")
    assert journal.open() == []
    open_call, ended = GatewayCall("ro-1", "at-1", 7), GatewayCall("ro-1", "at-1", 8)
    for call in (open_call, ended):
        journal.begun(call)
    journal.ended(ended)
    journal.close()
    with (tmp_path / "calls").open("ab") as file:
        file.write(b'[1]\n{"call_id": "x"}\n{"call_id": "call-9", "rollout_')
    assert [(call.call_id, call.sequence_id) for call in journal.open()] == [(open_call.call_id, 7)]
    after = GatewayCall("ro-1", "at-1", 9)
    journal.begun(after)
    journal.close()
    assert [call.sequence_id for call in journal.open()] == [7, 9]
    journal.close()


async def test_a_full_disk_ends_the_journal_and_not_the_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with GatewayHarness(journal=tmp_path / "calls") as harness:
        assert (await harness.ask())[0] == 200
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # no file of this process may grow beyond it
            assert [(await harness.ask())[0] for _ in range(2)] == [200, 200]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await harness.states() == ["ok"] * 3
    assert caplog.text.count("cannot be written") == 1


def test_a_journal_does_not_grow_without_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "calls")
    journal.open()
    call = GatewayCall("ro-1", "at-1", 7)
    sizes: list[int] = []
    for _ in range(8000):
        journal.begun(call)
        journal.ended(call)
        sizes.append((tmp_path / "calls").stat().st_size)
    journal.close()
    assert max(sizes) < 1024 * 1024 + 1000
    assert not (tmp_path / "calls").exists()
