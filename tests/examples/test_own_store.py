"""examples/own_store: a store in a real Redis, alone, behind the framework's wrappers, and under a Trainer."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import agentlightning as agl
from agentlightning.store import LightningStoreClient
from agentlightning.store.wrappers import complete
from agentlightning.types import Span
from tests.examples.shown import EXAMPLES, run, same, shown
from tests.stubs.running import serving


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """The address of a real Redis server, on a unix socket in a temporary folder."""
    pytest.importorskip("redis", reason="the package redis is not installed (examples/own_store/requirements.txt)")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no Redis server is installed (apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="agl-redis-") as folder:
        socket = Path(folder) / "redis.sock"
        settings = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        with subprocess.Popen([program, *settings], stdout=subprocess.DEVNULL) as server:
            try:
                for _ in range(500):
                    if socket.exists():
                        break
                    assert server.poll() is None, "redis-server ended"
                    time.sleep(0.02)
                yield f"unix://{socket}"
            finally:
                server.terminate()


@pytest.fixture
def make(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes stores that see the same data."""
    monkeypatch.syspath_prepend(EXAMPLES / "own_store")
    from redis_store import RedisLightningStore  # type: ignore[import-not-found]

    prefix = f"{uuid4().hex}:"
    return lambda: RedisLightningStore(redis_url, prefix=prefix)


@pytest.fixture
async def store(make: Any) -> AsyncIterator[Any]:
    made = make()
    yield made
    await made.close()


def test_the_program_prints_what_its_readme_shows(redis_url: str) -> None:
    [one] = shown("own_store")
    printed = run(f"{one.command.rsplit(' ', 1)[0]} {redis_url}")
    assert same(printed, one.output), printed


async def test_every_rollout_is_claimed_once_however_many_claim(make: Any, store: Any) -> None:
    made = [(await store.enqueue_rollout({"n": n})).rollout_id for n in range(40)]
    others = [make() for _ in range(8)]

    async def claim_all(other: Any) -> list[str]:
        claimed: list[str] = []
        while (claim := await other.dequeue_rollout("w")) is not None:
            claimed.append(claim.rollout_id)
        await other.close()
        return claimed

    claimed = await asyncio.gather(*map(claim_all, others))
    assert sorted(each for some in claimed for each in some) == sorted(made)
    for rollout_id in made:
        assert [attempt.sequence_id for attempt in await store.query_attempts(rollout_id)] == [1]


async def test_what_was_cancelled_in_the_queue_is_not_run(store: Any) -> None:
    first, second = await store.enqueue_rollout("a"), await store.enqueue_rollout("b")
    await store.update_rollout(first.rollout_id, status="cancelled")
    claimed = await complete(store).dequeue_rollout("w", timeout=5)
    assert claimed is not None
    assert claimed.rollout_id == second.rollout_id
    with pytest.raises(agl.ConflictError):
        await store.update_rollout(first.rollout_id, status="running")


async def test_a_failed_attempt_is_tried_again_as_the_config_says(store: Any) -> None:
    config = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.enqueue_rollout("a", config=config)
    for number, after in ((1, "requeuing"), (2, "failed")):
        claimed = await store.dequeue_rollout("w")
        assert claimed.attempt.sequence_id == number
        await store.update_attempt(rollout.rollout_id, "latest", status="failed")
        stored_rollout = await store.get_rollout_by_id(rollout.rollout_id)
        assert (stored_rollout.status, stored_rollout.end_time is None) == (after, after == "requeuing")
    assert await store.dequeue_rollout("w") is None


async def test_late_news_of_an_attempt_that_was_replaced_does_not_end_the_rollout(store: Any) -> None:
    rollout = await store.enqueue_rollout("a")
    first = await store.dequeue_rollout("w")
    await store.start_attempt(rollout.rollout_id)
    await store.update_attempt(rollout.rollout_id, first.attempt.attempt_id, status="succeeded")
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "preparing"


async def test_spans_are_kept_once_and_in_their_order_and_resources_have_versions(store: Any) -> None:
    await store.enqueue_rollout("a")
    claimed = await store.dequeue_rollout("w")
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    spans = [Span.from_attributes(attributes={"n": n}, sequence_id=n, **ids) for n in (2, 1, 3)]
    assert [await store.add_span(span) for span in [*spans, spans[0]]] == [*spans, None]
    assert [span.sequence_id for span in await store.query_spans(claimed.rollout_id, "latest")] == [1, 2, 3]
    prompt = agl.PromptTemplate(template="é {x}", engine="f-string")
    for version in (1, 2):
        assert (await store.update_resources("rs-1", {"prompt": prompt})).version == version
    assert (await store.get_latest_resources()).resources["prompt"] == prompt


async def test_through_the_framework_s_server_it_is_a_whole_store(store: Any) -> None:
    async with serving(store) as server:
        client = LightningStoreClient(server.endpoint, deadline=5.0)
        waiting = asyncio.create_task(client.dequeue_rollout("w", timeout=20))
        rollouts = await client.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=n) for n in range(3)])
        assert await asyncio.wait_for(waiting, 20) is not None
        await client.finish_rollout(rollouts[0].rollout_id)
        ended = await client.wait_for_rollouts(rollout_ids=[rollouts[0].rollout_id], timeout=5)
        assert [each.status for each in ended] == ["succeeded"]
        await client.close()


async def test_a_copy_in_another_process_has_its_own_connections(store: Any) -> None:
    rollout = await store.enqueue_rollout("a")
    copy = pickle.loads(pickle.dumps(store))
    assert (await copy.get_rollout_by_id(rollout.rollout_id)).input == "a"
    await copy.close()


async def test_a_server_that_is_away_is_an_outage_and_not_an_empty_store(make: Any, tmp_path: Path) -> None:
    away = type(make())(f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(agl.StoreUnreachableError, match="does not respond"):
        await away.get_rollout_by_id("ro-1")
    with pytest.raises(agl.StoreUnreachableError):
        await away.dequeue_rollout("w")
    await away.close()
