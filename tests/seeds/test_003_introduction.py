"""The long manual, introduction to architecture: its snippets word for word, and what its tables name."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

import agentlightning as agl
from agentlightning import InMemoryLightningStore, LightningStoreClient, LitAgentRunner, OtelTracer
from agentlightning.types import Hook
from tests.seeds.parts import agent, claimed, traced
from tests.seeds.shown import Shown
from tests.stubs.ports import free_port
from tests.stubs.processes import Terminal


@pytest.mark.snippet("003/runner-context")
async def test_a_runner_as_a_context(shown: Shown) -> None:
    store, runner = InMemoryLightningStore(), LitAgentRunner[Any](tracer=OtelTracer())
    await store.add_resources({})
    await shown.start(runner=runner, agent=agent, hooks=[Hook()], store=store)
    with pytest.raises(ValueError, match=r"Call init\(\) first"):
        runner.get_agent()
    assert runner.worker_id is None


@pytest.mark.snippet("003/write-traces")
async def test_the_parts_that_write_traces(shown: Shown) -> None:
    module = await shown.start(InMemoryLightningStore=InMemoryLightningStore)
    ids = await claimed(module.store)
    await traced(lambda: agl.emit_reward(0.5), module.tracer, **ids)
    assert agl.find_final_reward((await module.store.query_spans(ids["rollout_id"])).items) == 0.5
    again = LightningStoreClient(base_url="http://localhost:45993")
    assert module.client.server_address_root == again.server_address_root
    await module.client.close()
    await again.close()


class KernelSpace:
    """The few methods that are called on a kernel."""

    def on_violation(self, callback: Any) -> None:
        self.refuse = callback


@pytest.mark.snippet("003/agent-os")
def test_a_runner_and_a_reward_by_a_policy_kernel(shown: Shown) -> None:
    kernel = KernelSpace()
    module = shown.run(kernel=kernel)

    def governed(task: str) -> dict[str, str]:
        if "DROP" in task:
            kernel.refuse("DROP is denied")
        return {"done": task}

    trainer = agl.Trainer(runner=module.runner, reward_fn=module.reward_fn, strategy="shm")
    trainer.dev(governed, ["SELECT 1", "DROP TABLE a"])
    assert trainer.result.rewards == [1.0, 0.0]


@pytest.mark.heavy
@pytest.mark.snippet("003/store-command", differs="the test uses a free port")
def test_a_store_server_from_the_command_line(shown: Shown, terminal: Terminal) -> None:
    [words] = shown.commands
    assert words[0] == "agl"
    words[words.index("45993")] = str(port := free_port())
    server = terminal(words)
    server.until(str(port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
        assert json.load(answer)
    server.interrupted()
    assert "[INFO]" in server.said


@pytest.mark.snippet("003/heartbeat")
async def test_a_heartbeat_with_the_state_of_a_gpu(shown: Shown) -> None:
    module, store = await shown.start(), InMemoryLightningStore()
    await store.update_worker("worker-1", heartbeat_stats=module.heartbeat_stats)
    worker = await store.get_worker_by_id("worker-1")
    assert worker is not None
    assert worker.heartbeat_stats == {"queue_depth": 2, "gpu_utilization": 0.82}


# --- what the prose says -----------------------------------------------------------------------------------------
