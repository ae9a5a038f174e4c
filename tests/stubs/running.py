"""Real parts that tests run: stores, their servers, runners, and a gateway before a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner
from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, Hook, RolloutConfig
from tests.stubs.model_server import Json, ModelServer


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


@asynccontextmanager
async def serving(store: LightningStore | None = None, **settings: Any) -> AsyncIterator[LightningStoreServer]:
    """Serve a store, one in memory if none is given, at a free port."""
    server = LightningStoreServer(InMemoryLightningStore() if store is None else store, port=0, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def server() -> AsyncIterator[LightningStoreServer]:
    """A server of a store in memory."""
    async with serving() as server:
        yield server


@pytest.fixture
async def client(server: LightningStoreServer) -> AsyncIterator[LightningStoreClient]:
    """A client of that server."""
    client = LightningStoreClient(server.endpoint)
    yield client
    await client.close()


def runner_of(**settings: Any) -> LitAgentRunner[Any]:
    return LitAgentRunner(OtelTracer(), **settings)


async def run_tasks(
    store: LightningStore,
    agent: Any,
    *tasks: Any,
    config: RolloutConfig | None = None,
    hooks: Sequence[Hook] | None = None,
    metadata: dict[str, Any] | None = None,
    **settings: Any,
) -> list[AttemptedRollout]:
    """Enqueue the tasks, run them all with an agent in this process, and return their rollouts in order."""
    made = [await store.enqueue_rollout(task, config=config, mode="train", metadata=metadata) for task in tasks]
    runner = runner_of(**{"max_rollouts": len(made), **settings})
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        await runner.iter()
    finished = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in made]
    return [rollout for rollout in finished if isinstance(rollout, AttemptedRollout)]


async def run_through_gateway(
    store: LightningStore, agent: Any, *tasks: Any, answer: Callable[[Json], Any] | None = None, **settings: Any
) -> list[AttemptedRollout]:
    """`run_tasks` for agents whose model is a scripted one behind a gateway."""
    with ModelServer() if answer is None else ModelServer(answer) as model:
        proxy = LLMProxy(store=store, model_list=[model.entry("m")])
        await proxy.start()
        await store.add_resources({"main_llm": proxy.as_resource()})
        finished = await run_tasks(store, agent, *tasks, **settings)
        await proxy.stop()
    return finished
