"""AgentOpsTracer on the real package: nothing leaves the machine, no account, and token ids even of streams."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest

from agentlightning.errors import MissingExtraError
from agentlightning.tracer.agentops import AgentOpsTracer

from .offline import run_offline

needs_agentops = pytest.mark.skipif(
    importlib.util.find_spec("agentops") is None or importlib.util.find_spec("openai") is None,
    reason="needs the packages agentops and openai",
)
needs_langchain = pytest.mark.skipif(
    importlib.util.find_spec("agentops") is None or importlib.util.find_spec("langchain_core") is None,
    reason="needs the packages agentops and langchain-core",
)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.tracer.agentops.AGENTOPS_INSTALLED", False)
    with pytest.raises(MissingExtraError, match=r"pip install 'agl-framework\[agentops\]'"):
        AgentOpsTracer()


def test_settings_that_leave_work_to_the_program_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentlightning.tracer.agentops.AGENTOPS_INSTALLED", True)
    with caplog.at_level(logging.WARNING):
        tracer = AgentOpsTracer(agentops_managed=False, instrument_managed=False, daemon=False)
    assert (tracer.agentops_managed, tracer.instrument_managed, tracer.daemon) == (False, False, False)
    assert len(caplog.records) == 3


PROGRAM = """
import asyncio, builtins, threading
from agentlightning.emitter import emit_message, emit_reward
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.agentops import AgentOpsTracer
from tests.stubs.model_server import ModelServer

async def agent(model):
    import openai
    from agentops.sdk.decorators import operation
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key="k")
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "extra_body": {"return_token_ids": True}}
    await client.chat.completions.create(**asked, logprobs=True)
    async for _ in await client.chat.completions.create(**asked, stream=True):
        pass
    (await client.chat.completions.with_raw_response.create(**asked)).parse()

    @operation
    def tool(x):
        emit_message("inside")
        return x

    tool(1)
    emit_reward(1.0)

async def run_rollout(tracer, store, model):
    rollout = await store.start_rollout(input="x")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    async with tracer.trace_context("trace", **ids):
        await agent(model)
    return [span.model_dump() for span in await store.query_spans(rollout.rollout_id)]

async def main():
    original = print
    store, tracer = InMemoryLightningStore(), AgentOpsTracer()
    with ModelServer() as model, tracer.lifespan(store):
        traces = await asyncio.gather(*(run_rollout(tracer, store, model) for _ in range(3)))
        threads = [t.name for t in threading.enumerate() if "Otel" in t.name or "agentops" in t.name.lower()]
    for _ in range(2):  # a second life of a tracer in the same process
        with tracer.lifespan(store):
            async with tracer.trace_context("again"):
                emit_message("x")
    again = [span.name for span in tracer.get_last_trace()]
    failed = None
    with tracer.lifespan(store):
        try:
            async with tracer.trace_context("failing"):
                raise KeyError("x")
        except KeyError:
            failed = [(span.name, span.status.status_code) for span in tracer.get_last_trace()]
    await store.close()
    print(json.dumps({
        "traces": traces, "threads": threads, "again": again, "failed": failed, "print": builtins.print is original,
    }))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_offline(PROGRAM)


@needs_agentops
def test_calls_of_several_rollouts_stand_below_their_own_sessions(report: dict[str, Any]) -> None:
    for trace in report["traces"]:
        (session,) = [span for span in trace if span["name"] == "trace.session"]
        assert session["parent_id"] is None
        assert session["attributes"] == {"agentops.span.kind": "session", "operation.name": "trace"}
        others = [span for span in trace if span is not session]
        assert sorted(span["name"] for span in others) == [
            "agentlightning.annotation",
            "agentlightning.message",
            *["openai.chat.completion"] * 3,
            "tool.task",
        ]
        tool = next(span for span in others if span["name"] == "tool.task")
        for span in others:
            expected = tool["span_id"] if span["name"] == "agentlightning.message" else session["span_id"]
            assert (span["parent_id"], span["trace_id"]) == (expected, session["trace_id"])


@needs_agentops
def test_token_ids_are_kept_plain_streamed_and_raw(report: dict[str, Any]) -> None:
    for trace in report["traces"]:
        calls = [span["attributes"] for span in trace if span["name"] == "openai.chat.completion"]
        assert all(call["prompt_token_ids"] == calls[0]["prompt_token_ids"] != [] for call in calls)
        assert all(call["response_token_ids"] == calls[0]["response_token_ids"] != [] for call in calls)
        plain = next(call for call in calls if "logprobs.content" in call)
        assert len(json_list(plain["logprobs.content"])) == len(plain["response_token_ids"])


OWN_STORE = """
import asyncio
from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.emitter import emit_reward
from tests.stubs.redis_like_store import KeyValueServer, RedisLikeStore

async def main():
    with KeyValueServer() as server:
        store, tracer = RedisLikeStore(server.url), AgentOpsTracer()
        rollout = await store.start_rollout("x")
        with tracer.lifespan(store):
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            async with tracer.trace_context("own", **ids):
                emit_reward(1.0)
        spans = await store.query_spans(rollout.rollout_id)
        print(json.dumps(sorted((span.sequence_id, span.name) for span in spans)))

asyncio.run(main())
"""


@needs_agentops
def test_a_store_of_ones_own_with_the_single_forms_alone_gets_its_spans() -> None:
    assert run_offline(OWN_STORE) == [[1, "agentlightning.annotation"], [2, "own.session"]]


def json_list(text: str) -> list[Any]:
    import json

    return json.loads(text)


@needs_agentops
def test_nothing_of_agentops_runs_beside_the_program(report: dict[str, Any]) -> None:
    assert report["threads"] == []
    assert report["print"] is True


@needs_agentops
def test_a_tracer_may_live_again_and_a_failure_is_on_its_session(report: dict[str, Any]) -> None:
    assert report["again"] == ["agentlightning.message", "again.session"]
    assert report["failed"] == [["failing.session", "ERROR"]]


LANGCHAIN = """
import asyncio
from agentlightning.tracer.agentops import AgentOpsTracer
from langchain_core.runnables import RunnableLambda

async def main():
    tracer = AgentOpsTracer()
    with tracer.lifespan():
        async with tracer.trace_context("trace"):
            handler = tracer.get_langchain_handler(tags=["t"])
            chain = RunnableLambda(lambda x: x + 1).with_config(run_name="planner")
            chain.invoke(1, config={"callbacks": [handler]})
        spans = [span.model_dump() for span in tracer.get_last_trace()]
    print(json.dumps(spans))

asyncio.run(main())
"""


@needs_langchain
def test_chains_keep_their_names_and_stand_below_the_session() -> None:
    chain, session = run_offline(LANGCHAIN)
    assert chain["attributes"]["langchain.chain.type"] == "planner"
    assert chain["parent_id"] == session["span_id"]  # type: ignore[index] -- a list of spans


SERVICE = """
from agentlightning.instrumentation import agentops as patches
import agentops.sdk.core as core, agentops.instrumentation.providers.openai.stream_wrapper as streams
before = core.setup_telemetry, streams.handle_chat_attributes
first, second = patches.instrument_agentops(), patches.instrument_agentops()
during = core.setup_telemetry is not before[0] and streams.handle_chat_attributes is not before[1]
patches.uninstrument_agentops()
still = core.setup_telemetry is not before[0]
patches.uninstrument_agentops()
patches.uninstrument_agentops()
after = (core.setup_telemetry, streams.handle_chat_attributes) == before
patches.enable_agentops_service()
on = patches.agentops_service_enabled()
patches.enable_agentops_service(False)
del streams.OpenaiStreamWrapper._process_chunk
broken = patches.instrument_agentops()
print(json.dumps({
    "twice": [first, second], "during": during, "still": still, "after": after, "on": on, "broken": broken,
    "untouched": core.setup_telemetry is before[0],
}))
"""


@needs_agentops
def test_patches_are_counted_and_an_agentops_that_lacks_their_place_is_left_alone() -> None:
    assert run_offline(SERVICE) == {
        "twice": [True, True],
        "during": True,
        "still": True,
        "after": True,
        "on": True,
        "broken": False,
        "untouched": True,
    }
