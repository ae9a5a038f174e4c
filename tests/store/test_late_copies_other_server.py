"""The copy of a request arrives at another server than the first one, or at the same one after a restart, over HTTP."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer
from tests.chaos.stores import Place, fresh_place
from tests.store.conformance.test_late_copies import STORIES, Story, check_late_copy, world
from tests.store.parts import serving


@pytest.fixture(params=["sqlite", "postgres", "mongo"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return fresh_place(request.param, request, tmp_path)


async def serve(place: Place, stack: AsyncExitStack) -> tuple[LightningStoreServer, LightningStoreClient]:
    """Start one more server over the data of a test, with a client."""
    store = await stack.enter_async_context(place.opened(synchronous="NORMAL"))
    return await stack.enter_async_context(serving(store))


@pytest.mark.heavy
@pytest.mark.parametrize("story", STORIES, ids=str)
async def test_a_copy_at_a_second_server_changes_nothing(place: Place, stack: AsyncExitStack, story: Story) -> None:
    (_, first), (_, second) = await serve(place, stack), await serve(place, stack)

    async def open_other() -> LightningStore:
        return second

    await check_late_copy(story, first, open_other)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
@pytest.mark.parametrize("story", STORIES, ids=str)
async def test_a_copy_after_a_restart_changes_nothing(place: Place, story: Story) -> None:
    async with AsyncExitStack() as first, AsyncExitStack() as again:

        async def open_other() -> LightningStore:
            await first.aclose()
            return (await serve(place, again))[1]

        await check_late_copy(story, (await serve(place, first))[1], open_other)


async def test_the_short_form_of_finishing_is_done_once_over_http_too(place: Place, stack: AsyncExitStack) -> None:
    (first, client), (second, _) = await serve(place, stack), await serve(place, stack)
    rollout = await client.start_rollout("x", worker_id="w")

    async def finish(server: LightningStoreServer, response: str) -> tuple[int, Any]:
        url = f"{server.endpoint}/v1/agl/rollouts/{rollout.rollout_id}/finish"
        headers = {"idempotency-key": "the token"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"response": response}, headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    status, ended = await finish(first, "a")
    assert (status, ended["status"]) == (200, "succeeded")
    await client.start_attempt(rollout.rollout_id, worker_id="w2")
    before = await world(client)
    status, again = await finish(second, "a")
    assert (status, again["rollout_id"]) == (200, rollout.rollout_id)
    status, other = await finish(second, "b")
    assert (status, other["error_type"]) == (422, "TokenReusedError")
    assert "metadata" in other["detail"]
    assert await world(second) == before
