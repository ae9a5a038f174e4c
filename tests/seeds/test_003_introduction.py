"""The long manual, introduction to architecture: its snippets word for word, and what its tables name."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import pytest

import agentlightning as agl
from agentlightning import InMemoryLightningStore, LightningStoreClient, LitAgentRunner, OtelTracer
from agentlightning.semconv import LightningResourceAttributes, LightningSpanAttributes
from agentlightning.types import Hook
from tests.seeds.parts import TASKS, agent
from tests.seeds.shown import Shown
from tests.stubs.ports import free_port


@pytest.mark.snippet("003/runner-context")
async def test_a_runner_as_a_context(shown: Shown) -> None:
    store, runner = InMemoryLightningStore(), LitAgentRunner[Any](tracer=OtelTracer())
    await store.add_resources({})
    await shown.start(runner=runner, agent=agent, hooks=[Hook()], store=store)
    with pytest.raises(ValueError, match=r"Call init\(\) first"):
        runner.get_agent()
    assert runner.worker_id is None
    async with runner:
        """Nothing was initialised, so nothing is torn down."""
    async with runner:
        runner.init(agent=agent)
        runner.init_worker(worker_id=1, store=store)
        assert (await runner.step(TASKS[0])).status == "succeeded"
        with pytest.raises(LookupError):
            raise LookupError("inside of the block")
    assert runner.worker_id is None


@pytest.mark.snippet("003/write-traces")
async def test_the_parts_that_write_traces(shown: Shown) -> None:
    found = await shown.start(InMemoryLightningStore=InMemoryLightningStore)
    rollout = await found.store.start_rollout(input="task")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    with found.tracer.lifespan():
        async with found.tracer.trace_context("written", **ids):
            agl.emit_reward(0.5)
    assert agl.find_final_reward((await found.store.query_spans(rollout.rollout_id)).items) == 0.5
    again = LightningStoreClient(base_url="http://localhost:45993")
    assert found.client.server_address_root == again.server_address_root
    await found.client.close()
    await again.close()


class KernelSpace:
    """The little that is asked of a kernel."""

    def on_violation(self, callback: Any) -> None:
        self.refuse = callback


@pytest.mark.snippet("003/agent-os")
def test_a_runner_and_a_reward_by_a_policy_kernel(shown: Shown) -> None:
    kernel = KernelSpace()
    found = shown.run(kernel=kernel)

    def governed(task: str) -> dict[str, str]:
        if "DROP" in task:
            kernel.refuse("DROP is denied")
        return {"done": task}

    trainer = agl.Trainer(runner=found.runner, reward_fn=found.reward_fn, strategy="shm")
    trainer.dev(governed, ["SELECT 1", "DROP TABLE a"])
    assert trainer.result.rewards == [1.0, 0.0]
    spans = [span for span in asyncio.run(_spans(trainer.store)) if "violation" in span.attributes]
    assert [span.attributes["violation"] for span in spans] == ["DROP is denied"]


async def _spans(store: agl.LightningStore) -> list[agl.Span]:
    return [span for rollout in await store.query_rollouts() for span in await store.query_spans(rollout.rollout_id)]


@pytest.mark.heavy
@pytest.mark.snippet("003/store-command", differs="the test serves on a free port")
def test_a_store_server_from_the_command_line(shown: Shown, tmp_path: Any) -> None:
    [[program, *arguments]] = shown.commands
    assert program == "agl"
    arguments[arguments.index("45993")] = str(port := free_port())
    server = subprocess.Popen(
        [sys.executable, "-m", "agentlightning.cli", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    assert server.stdout is not None
    serving = threading.Event()

    def listen() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            said.append(line)
            if str(port) in line:
                serving.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert serving.wait(60), "".join(said)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
            assert json.load(answer)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        listener.join(60)
        server.stdout.close()
    assert any("[INFO]" in line for line in said), "".join(said)


@pytest.mark.snippet("003/heartbeat")
async def test_a_heartbeat_with_the_state_of_a_gpu(shown: Shown) -> None:
    found, store = await shown.start(), InMemoryLightningStore()
    await store.update_worker("worker-1", heartbeat_stats=found.heartbeat_stats)
    worker = await store.get_worker_by_id("worker-1")
    assert worker is not None
    assert worker.heartbeat_stats == {"queue_depth": 2, "gpu_utilization": 0.82}


# --- what the prose says -----------------------------------------------------------------------------------------


async def test_with_a_runner_as_context_rollouts_are_run_until_there_are_none() -> None:
    store, runner = InMemoryLightningStore(), LitAgentRunner[Any](tracer=OtelTracer(), poll_interval=0.05)
    await store.add_resources({})
    queued = [await store.enqueue_rollout(input=task, mode="train") for task in TASKS]
    async with runner.run_context(agent=agent, store=store, hooks=[Hook()]) as runner:
        assert (runner.agent, runner.store, runner.worker_id) == (agent, store, 0)
        await runner.iter(exit_when_idle=0.1)
    ended = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in queued], timeout=0)
    assert [rollout.status for rollout in ended] == ["succeeded"] * 2


async def test_the_life_of_a_runner_by_hand() -> None:
    store, runner = InMemoryLightningStore(), LitAgentRunner[Any](tracer=OtelTracer())
    runner.init(agent=agent, hooks=[])
    runner.init_worker(worker_id=0, store=store)
    done = await runner.step(TASKS[0], resources={})
    assert done.status == "succeeded"
    assert runner._log_prefix(done.rollout_id) == f"[Worker-0] [{done.rollout_id}]"
    runner.teardown_worker(0)
    runner.teardown()
    with pytest.raises(ValueError, match=r"Call init_worker\(\) first"):
        runner.get_store()
    assert runner.get_worker_id() == "Worker-Unknown"


def test_run_says_what_drives_a_runner() -> None:
    with pytest.raises(RuntimeError, match=r"await iter\(\) to serve the queue, or step\(input\)"):
        LitAgentRunner[Any](tracer=OtelTracer()).run()


def test_semantic_conventions() -> None:
    assert LightningSpanAttributes.REWARD.value == "agentlightning.reward"
    names = ("ROLLOUT_ID", "ATTEMPT_ID", "SPAN_SEQUENCE_ID", "TRACER_NAME")
    assert all(LightningResourceAttributes[name].value.startswith("agentlightning.") for name in names)
    assert LightningSpanAttributes.LINK.value != LightningSpanAttributes.TAG.value


def test_a_template_of_each_engine() -> None:
    assert agl.PromptTemplate(template="Classify: {ticket}", engine="f-string").format(ticket="a") == "Classify: a"
    loop = agl.PromptTemplate(template="{% for r in results %}{{ r }};{% endfor %}", engine="jinja")
    assert loop.format(results=["a", "b"]) == "a;b;"
