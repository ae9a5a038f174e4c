"""Real parts that tests run: stores, their servers, runners, and a gateway before a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import agentlightning as agl  # gives its names when they are asked for: every session of tests reads this module
from tests.stubs.model_server import Json, ModelServer


@pytest.fixture
async def store() -> AsyncIterator[agl.InMemoryLightningStore]:
    store = agl.InMemoryLightningStore()
    yield store
    await store.close()


@asynccontextmanager
async def serving(store: agl.LightningStore | None = None, **settings: Any) -> AsyncIterator[agl.LightningStoreServer]:
    """Serve a store, one in memory if none is given, at a free port."""
    server = agl.LightningStoreServer(agl.InMemoryLightningStore() if store is None else store, port=0, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def server() -> AsyncIterator[agl.LightningStoreServer]:
    """A server of a store in memory."""
    async with serving() as server:
        yield server


@pytest.fixture
async def client(server: agl.LightningStoreServer) -> AsyncIterator[agl.LightningStoreClient]:
    """A client of that server."""
    client = agl.LightningStoreClient(server.endpoint)
    yield client
    await client.close()


def runner_of(**settings: Any) -> agl.LitAgentRunner[Any]:
    return agl.LitAgentRunner(agl.OtelTracer(), **settings)


async def run_tasks(
    store: agl.LightningStore,
    agent: Any,
    *tasks: Any,
    config: agl.RolloutConfig | None = None,
    hooks: Sequence[agl.Hook] | None = None,
    metadata: dict[str, Any] | None = None,
    **settings: Any,
) -> list[agl.AttemptedRollout]:
    """Enqueue the tasks, run them all with an agent in this process, and return their rollouts in order."""
    made = [await store.enqueue_rollout(task, config=config, mode="train", metadata=metadata) for task in tasks]
    runner = runner_of(**{"max_rollouts": len(made), **settings})
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        await runner.iter()
    finished = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in made]
    return [rollout for rollout in finished if isinstance(rollout, agl.AttemptedRollout)]


async def run_through_gateway(
    store: agl.LightningStore,
    agent: Any,
    *tasks: Any,
    answer: Callable[[Json], Any] | None = None,
    sampling: Json | None = None,
    **settings: Any,
) -> list[agl.AttemptedRollout]:
    """`run_tasks` for agents whose model is a scripted one behind a gateway; `sampling` are its parameters."""
    with ModelServer() if answer is None else ModelServer(answer) as model:
        proxy = agl.LLMProxy(store=store, model_list=[model.entry("m")])
        await proxy.start()
        await store.add_resources({"main_llm": proxy.as_resource(sampling_parameters=sampling)})
        finished = await run_tasks(store, agent, *tasks, **settings)
        await proxy.stop()
    return finished
