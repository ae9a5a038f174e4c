"""WeaveTracer on the real package: its calls are spans of ours, nothing leaves the machine, no account."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from agentlightning.errors import MissingExtraError
from agentlightning.instrumentation.weave import uninstrument_weave
from agentlightning.tracer.weave import WeaveTracer

from .offline import run_offline

needs_weave = pytest.mark.skipif(
    importlib.util.find_spec("weave") is None or importlib.util.find_spec("openai") is None,
    reason="needs the packages weave and openai",
)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.tracer.weave.WEAVE_INSTALLED", False)
    with pytest.raises(MissingExtraError, match=r"pip install 'agl-framework\[weave\]'"):
        WeaveTracer()


def test_what_was_not_instrumented_cannot_be_taken_back() -> None:
    with pytest.raises(RuntimeError, match="call instrument_weave first"):
        uninstrument_weave()


PROGRAM = """
import asyncio, threading, warnings
warnings.simplefilter("ignore")
import weave
from agentlightning.emitter import emit_message, emit_reward, operation
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.weave import WeaveTracer
from tests.stubs.model_server import ModelServer

@weave.op
def leaf(x):
    emit_message(f"leaf {x}")
    return {"doubled": 2 * x}

@weave.op
async def branch(x):
    with operation(name="middle"):
        return await asyncio.to_thread(leaf, x)

@weave.op
def failing():
    raise ValueError()

@weave.op
def counting():
    yield 1
    yield 2

@weave.op
def rude(value):
    return value

class Rude:
    def __str__(self):
        raise RuntimeError("no text")

async def agent(model, number):
    import openai
    weave.init("the project of the program")
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key="k")
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "extra_body": {"return_token_ids": True}}
    await client.chat.completions.create(**asked)
    async for _ in await client.chat.completions.create(**asked, stream=True):
        pass
    await asyncio.gather(branch(number), branch(number + 1))
    try:
        failing()
    except ValueError:
        pass
    list(counting())
    thing = Rude()
    assert rude(thing) is thing
    weave.finish()
    emit_reward(1.0)

async def run_rollout(tracer, store, model, number):
    rollout = await store.start_rollout(input="x")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    async with tracer.trace_context("trace", **ids) as root:
        await agent(model, number)
        name = root.func_name
    return [ids, name, [span.model_dump() for span in await store.query_spans(rollout.rollout_id)]]

async def main():
    store, one, two = InMemoryLightningStore(), WeaveTracer(project_name="mine/project"), WeaveTracer()
    with ModelServer() as model, one.lifespan(store), two.lifespan(store):
        project = weave.get_client().project
        traces = await asyncio.gather(*(run_rollout((one, two)[n % 2], store, model, 10 * n) for n in range(4)))
        try:
            async with one.trace_context("broken"):
                raise KeyError("x")
        except KeyError:
            broken = [(span.name, span.status.status_code) for span in one.get_last_trace()]
        threads = [t.name for t in threading.enumerate() if "weave" in t.name.lower()]
    left_over = weave.get_client()
    untraced = rude(3)
    await store.close()
    print(json.dumps({
        "traces": traces, "project": project, "threads": threads, "left_over": left_over is not None,
        "untraced": untraced, "broken": broken,
    }))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_offline(PROGRAM)


def named(trace: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [span for span in trace if span["name"] == name]


@needs_weave
def test_calls_operations_and_emitters_stand_in_one_tree_per_rollout(report: dict[str, Any]) -> None:
    for number, (ids, root_name, trace) in enumerate(report["traces"]):
        (root,) = named(trace, "trace")
        assert root_name == "trace"
        assert root["parent_id"] is None
        assert root["attributes"]["agentlightning.operation.input.agentlightning.rollout_id"] == ids["rollout_id"]
        assert {span["trace_id"] for span in trace} == {root["trace_id"]}
        parents = {span["span_id"]: span for span in trace}
        for leaf in named(trace, "leaf"):
            middle = parents[leaf["parent_id"]]
            branch = parents[middle["parent_id"]]
            assert (middle["name"], branch["name"]) == ("agentlightning.operation", "branch")
            assert branch["parent_id"] == root["span_id"]
        bodies = {span["attributes"]["agentlightning.message.body"] for span in named(trace, "agentlightning.message")}
        assert bodies == {f"leaf {10 * number}", f"leaf {10 * number + 1}"}


@needs_weave
def test_a_call_is_a_span_with_inputs_output_and_status(report: dict[str, Any]) -> None:
    _, _, trace = report["traces"][0]
    leaf = min(named(trace, "leaf"), key=lambda span: span["attributes"]["agentlightning.operation.input.x"])
    assert leaf["status"]["status_code"] == "OK"
    assert leaf["attributes"] == {
        "agentlightning.operation.name": "leaf",
        "agentlightning.operation.input.x": 0,
        "agentlightning.operation.output.doubled": 0,
        "status_counts.success": 1,
        "status_counts.error": 0,
    }
    assert leaf["resource"]["attributes"]["agentlightning.tracer.name"] == "weave"
    (failed,) = named(trace, "failing")
    assert failed["status"] == {"status_code": "ERROR", "description": "ValueError: "}
    assert failed["attributes"]["exception.message"] == ""
    assert named(trace, "counting")[0]["status"]["status_code"] == "OK"
    assert "RuntimeError in __str__" in str(named(trace, "rude")[0]["attributes"])


@needs_weave
def test_a_model_call_is_found_by_its_name_and_has_its_reply(report: dict[str, Any]) -> None:
    for _, _, trace in report["traces"]:
        plain, streamed = (span["attributes"] for span in named(trace, "openai.chat.completions.create"))
        assert plain["agentlightning.operation.input.messages.0.content"] == "hi"
        assert plain["agentlightning.operation.output.choices.0.message.content"] == "you said hi"
        assert plain["agentlightning.operation.output.prompt_token_ids"]
        assert plain["agentlightning.operation.output.choices.0.token_ids"]
        assert streamed["agentlightning.operation.output.choices.0.message.content"] == "you said hi"


@needs_weave
def test_one_client_serves_all_tracers_and_leaves_with_the_last(report: dict[str, Any]) -> None:
    assert report["project"] == "project"
    assert report["threads"] == []
    assert report["left_over"] is False
    assert report["untraced"] == 3
    assert report["broken"] == [["broken", "ERROR"]]
