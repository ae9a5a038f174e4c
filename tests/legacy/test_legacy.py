"""The v0.1 protocol from end to end, over a socket, and the warning of each of its names."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.legacy.runner import as_rollout
from agentlightning.types import LLM, RolloutLegacy, Span, Task, Triplet
from tests.stubs.processes import run_program

pytestmark = pytest.mark.filterwarnings("ignore:.* uses the deprecated v0.1 protocol:DeprecationWarning")
RESOURCES = {"main_llm": LLM(endpoint="http://127.0.0.1:1/v1", model="m")}


class Doubles(agl.LitAgent[int]):
    """An agent of v0.1: its method knows the rollout's id."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_rollout(self, task: int, rollout_id: str, resources: Any) -> Any:
        self.seen.append(("train", task, resources["main_llm"].model))
        return float(task * 2)

    def validation_rollout(self, task: int, resources: Any, rollout: Any) -> Any:
        self.seen.append(("val", task, rollout.status))
        raise LookupError("the agent broke")

    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        self.seen.append("start")

    def on_rollout_end(self, task: Any, rollout: Any, runner: Any, tracer: Any) -> None:
        self.seen.append(("end", rollout.final_reward))


@pytest.fixture
async def server() -> AsyncIterator[agl.AgentLightningServer]:
    served = agl.AgentLightningServer(port=0)
    await served.start()
    yield served
    await served.stop()


async def test_a_task_goes_to_a_runner_and_its_result_comes_back(
    server: agl.AgentLightningServer, caplog: pytest.LogCaptureFixture
) -> None:
    await server.update_resources(RESOURCES)
    good = await server.queue_task(21, mode="train", metadata={"a": 1})
    bad = await server.queue_task(3, mode="val")
    agent, client = Doubles(), agl.AgentLightningClient(server.endpoint, poll_interval=0.01)
    tracer = agl.OtelTracer()
    with tracer.lifespan():
        runner = agl.LegacyAgentRunner(agent, client, tracer, agl.TracerTraceToTriplet(), max_tasks=2)
        assert await runner.iter_async() == 2
    result = await server.poll_completed_rollout(good, timeout=10)
    assert result is not None
    assert result.task is not None
    assert (result.final_reward, result.task.input, result.task.num_claims) == (42.0, 21, 1)
    assert await server.get_completed_rollout(good) is None
    [failed] = await server.retrieve_completed_rollouts()
    assert (failed.rollout_id, failed.final_reward) == (bad, None)
    assert agent.seen == ["start", ("train", 21, "m"), ("end", 42.0), "start", ("val", 3, "running")]
    assert "LookupError: the agent broke" in caplog.text
    assert client.task_count == 2


async def test_a_program_waits_for_a_result_that_is_posted_meanwhile(server: agl.AgentLightningServer) -> None:
    rollout_id = await server.queue_task("x")
    client = agl.AgentLightningClient(server.endpoint)
    waiting = asyncio.create_task(server.poll_completed_rollout(rollout_id, timeout=30))
    task = await client.poll_next_task_async()
    assert task is not None
    answer = await client.post_rollout_async(RolloutLegacy(rollout_id=task.rollout_id, final_reward=1.0))
    assert answer is not None
    assert answer["status"] == "ok"
    assert (await waiting) == RolloutLegacy(rollout_id=rollout_id, final_reward=1.0)
    assert await server.poll_completed_rollout("rollout-none", timeout=0.01) is None


async def test_resources_are_found_by_id_and_as_the_latest(
    server: agl.AgentLightningServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = agl.AgentLightningClient(server.endpoint)
    assert await client.get_latest_resources_async() is None
    assert "404" in caplog.text
    first = await server.update_resources(RESOURCES)
    second = await server.update_resources({})
    latest = await client.get_latest_resources_async()
    resources = await client.get_resources_by_id_async(first)
    assert latest is not None
    assert resources is not None
    assert (latest.resources_id, resources.resources["main_llm"].model) == (second, "m")
    assert await client.get_resources_by_id_async("res-none") is None


async def test_the_server_answers_in_the_words_of_the_protocol(server: agl.AgentLightningServer) -> None:
    def get(path: str, body: bytes | None = None) -> tuple[int, Any]:
        request = urllib.request.Request(server.endpoint + path, body)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    ask = asyncio.to_thread
    assert await ask(get, "/task") == (200, {"is_available": False, "task": None})
    assert await ask(get, "/resources/latest") == (404, {"detail": "No resources have been set on the server."})
    assert await ask(get, "/resources/x") == (404, {"detail": "Resources 'x' not found."})
    assert (await ask(get, "/rollout", b'{"rollout_id": 3}'))[0] == 422


async def test_a_server_or_client_without_the_other_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match=r"is not running; await start\(\) first"):
        await agl.AgentLightningServer(port=0).queue_task("x")
    client = agl.AgentLightningClient("http://127.0.0.1:1", timeout=1)
    assert await client.get_latest_resources_async() is None
    assert client.post_rollout(RolloutLegacy(rollout_id="r")) is None
    assert "did not respond" in caplog.text


@pytest.mark.parametrize(("seconds", "claims"), [(0.0, 2), (300.0, 1)])
async def test_a_claim_without_a_result_goes_back_into_the_queue(seconds: float, claims: int) -> None:
    server = agl.AgentLightningServer(port=0, task_timeout_seconds=seconds)
    await server.start()
    try:
        rollout_id = await server.queue_task("x")
        client = agl.AgentLightningClient(server.endpoint)
        first = await client.poll_next_task_async()
        again = await asyncio.to_thread(client._ask_for_task)
    finally:
        await server.stop()
    assert first is not None
    assert [(task.rollout_id, task.num_claims) for task in (first, again) if task] == [
        (rollout_id, number) for number in range(1, claims + 1)
    ]


# --- without a server ------------------------------------------------------------------------------------------------


def test_tasks_of_a_loader_come_in_turn_for_ever_and_results_are_kept() -> None:
    loader = agl.DevTaskLoader(["a", "b"], RESOURCES)
    tasks = [loader.poll_next_task() for _ in range(3)]
    assert [task.rollout_id for task in tasks if task] == ["local_task_001", "local_task_002", "local_task_001"]
    assert loader.post_rollout(RolloutLegacy(rollout_id="r")) == {"status": "received", "rollout_id": "r"}
    assert [rollout.rollout_id for rollout in loader.rollouts] == ["r"]
    assert repr(loader) == "DevTaskLoader(num_tasks=2, resources='local')"
    with pytest.raises(ValueError, match="this loader has 'local'"):
        loader.get_resources_by_id("other")


@pytest.mark.parametrize(
    ("tasks", "text"),
    [([], "at least one task"), ([Task(rollout_id="r", input=1), 2], "either Task objects or inputs")],
)
def test_wrong_tasks_of_a_loader_are_refused(tasks: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        agl.DevTaskLoader(tasks, RESOURCES)


# --- results ---------------------------------------------------------------------------------------------------------


class Exporter(agl.TraceAdapter[list[Triplet]]):
    def adapt(self, source: Any, /) -> list[Triplet]:
        return [Triplet(prompt="p", response=span.name, reward=0.5) for span in source]


SPAN = Span.from_attributes(attributes={}, rollout_id="r", attempt_id="a", sequence_id=1, name="call")


@pytest.mark.parametrize(
    ("output", "reward", "triplets", "traced"),
    [
        (None, 0.5, 1, 1),
        (1, 1.0, 1, 1),
        ([Triplet(prompt=1, response=2, reward=0.1)], 0.1, 1, 1),
        ([{"name": "mine"}, {"name": "mine too"}], 0.5, 1, 2),
        ([SPAN, SPAN], 0.5, 1, 2),
        (RolloutLegacy(rollout_id="r", final_reward=0.9, triplets=[]), 0.9, 0, 1),
    ],
)
def test_what_the_agent_does_not_say_comes_from_the_trace(
    output: Any, reward: float, triplets: int, traced: int
) -> None:
    made = as_rollout(output, Task(rollout_id="r", input=1), [SPAN], Exporter())
    assert made.triplets is not None
    assert made.trace is not None
    assert (made.final_reward, len(made.triplets), len(made.trace)) == (reward, triplets, traced)


@pytest.mark.parametrize("output", ["text", ["text"], [1.0, {}]])
def test_a_result_of_no_known_kind_is_refused(output: Any) -> None:
    with pytest.raises(TypeError, match=r"v0\.1 agent must"):
        as_rollout(output, Task(rollout_id="r", input=1), [], Exporter())


# --- deprecation -----------------------------------------------------------------------------------------------------


def test_each_name_warns_once_and_blames_the_line_that_used_it() -> None:
    program = """
import warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import agentlightning as agl
    from agentlightning.client import DevTaskLoader
    from agentlightning.server import AgentLightningServer
    for _ in range(2):
        agl.AgentLightningClient("http://127.0.0.1:1")
        DevTaskLoader([1], {})
        AgentLightningServer(port=0)
        agl.LegacyAgentRunner(None, None, None, None)
ours = [each for each in caught if "v0.1" in str(each.message)]
print([(str(each.message).split()[0], each.filename, each.category.__name__) for each in ours])
"""
    done = run_program("python", "-c", program)
    names = ["AgentLightningClient", "DevTaskLoader", "AgentLightningServer", "LegacyAgentRunner"]
    assert done.stdout.strip() == str([(name, "<string>", "DeprecationWarning") for name in names])
