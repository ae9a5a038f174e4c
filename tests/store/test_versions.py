"""Clients and servers of different minor versions: they work together, or say what is missing and on which side."""

from __future__ import annotations

import copy
from contextlib import AsyncExitStack
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter

from agentlightning.errors import BadRequestError, ConflictError, NotFoundError
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.http import client
from agentlightning.store.http import endpoints as server_endpoints
from agentlightning.store.http.operations import OPERATIONS, WireOperation
from agentlightning.utils.version import VERSION
from tests.store.conftest import Serve
from tests.store.parts import required

MAJOR, MINOR, _ = VERSION.split(".")
NEWER, OLDER, FOREIGN = f"{MAJOR}.{int(MINOR) + 1}.0", f"{MAJOR}.0.0", f"{int(MAJOR) + 1}.0.0"


def _without(operation: str, argument: str) -> WireOperation:
    """The row of a server that does not know one of the arguments."""
    entry = copy.copy(OPERATIONS[operation])
    entry.parameters = tuple(name for name in entry.parameters if name != argument)
    entry.in_body = [name for name in entry.in_body if name != argument]
    hints = get_type_hints(getattr(server_endpoints.LightningStore, operation), include_extras=True)
    entry.body_type = TypeAdapter[Any](entry._object_type(hints))
    entry.query_type = entry.body_type
    return entry


@pytest.fixture
async def older_server(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> LightningStoreServer:
    """A server whose table lacks two operations and two arguments."""
    operations = {name: row for name, row in OPERATIONS.items() if name not in ("query_events", "statistics")}
    operations["update_worker"] = _without("update_worker", "run_id")
    operations["query_resources"] = _without("query_resources", "resources_id_contains")
    monkeypatch.setattr(server_endpoints, "OPERATIONS", operations)
    return (await serve())[0]


@pytest.fixture
async def server(serve: Serve) -> LightningStoreServer:
    return (await serve())[0]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack) -> Any:
    def connect(server: LightningStoreServer, version: str) -> LightningStoreClient:
        monkeypatch.setattr(client, "VERSION", version)
        made = LightningStoreClient(server.endpoint)
        stack.push_async_callback(made.close)
        return made

    return connect


async def _runs_a_rollout(store: LightningStoreClient) -> None:
    made = await store.enqueue_rollout(input={"task": 1}, mode="train")
    claim = required(await store.dequeue_rollout(worker_id="w"))
    await store.update_worker("w", {"load": 1.0})
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
    (done,) = await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=10)
    assert done.status == "succeeded"


@pytest.mark.parametrize("operation", ["query_events", "statistics"])
async def test_an_operation_that_the_server_lacks_is_named_with_both_versions(
    older_server: LightningStoreServer, connect: Any, operation: str
) -> None:
    store = connect(older_server, NEWER)
    with pytest.raises(NotImplementedError, match=operation) as caught:
        await getattr(store, operation)()
    assert VERSION in str(caught.value)
    assert NEWER in str(caught.value)
    await _runs_a_rollout(store)


async def test_an_argument_that_the_server_lacks_is_refused_before_anything_is_done(
    older_server: LightningStoreServer, connect: Any
) -> None:
    store = connect(older_server, NEWER)
    for call, name in (
        (lambda: store.update_worker("late", {"load": 1.0}, run_id="r"), "'run_id'"),
        (lambda: store.query_resources(resources_id_contains="x"), "'resources_id_contains'"),
    ):
        with pytest.raises(BadRequestError, match=name) as caught:
            await call()
        assert VERSION in str(caught.value)
        assert NEWER in str(caught.value)
    assert await store.get_worker_by_id("late") is None
    await _runs_a_rollout(store)


async def test_what_is_unknown_but_not_missing_is_told_as_ever(
    older_server: LightningStoreServer, connect: Any
) -> None:
    store = connect(older_server, NEWER)
    with pytest.raises(NotFoundError, match="ro-nothing"):
        await store.update_rollout("ro-nothing", status="cancelled")


@pytest.mark.parametrize("version", [OLDER, NEWER, VERSION])
async def test_a_server_that_knows_all_that_a_client_asks_for_serves_it(
    server: LightningStoreServer, connect: Any, version: str
) -> None:
    await _runs_a_rollout(connect(server, version))


async def test_another_major_version_is_refused(server: LightningStoreServer, connect: Any) -> None:
    with pytest.raises(ConflictError, match=FOREIGN):
        await connect(server, FOREIGN).query_rollouts()
