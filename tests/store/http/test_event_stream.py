"""Server-sent events: each change is sent once, and none is missed, whatever breaks in between."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import GoneError
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.http.event_stream import EVENTS_PATH, EventStreams, ListWatch
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM, EnqueueRolloutRequest, EventPage, RunRecord
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from tests.chaos.stores import fresh_place
from tests.store.conftest import Serve
from tests.store.parts import required, serving
from tests.stubs.raw_http import exchange, read_answer, request


class Stream:
    """A client of one stream."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self._text = b""
        self.last_id = ""

    async def block(self) -> dict[str, str]:
        """Return the fields of the next message; a comment has the field "" only."""
        while b"\n\n" not in self._text:
            piece = await asyncio.wait_for(self.answer.content.readany(), 20)
            if not piece:
                raise EOFError
            self._text += piece
        block, self._text = self._text.split(b"\n\n", 1)
        fields = dict(line.split(": ", 1) for line in block.decode().split("\n"))
        self.last_id = fields.get("id", self.last_id)
        return fields

    async def next(self) -> tuple[str, dict[str, Any]]:
        """Return kind and data of the next message, without comments."""
        while "event" not in (fields := await self.block()):
            pass
        return fields["event"], json.loads(fields["data"])

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Return the changes up to the first one that `condition` accepts."""
        events: list[dict[str, Any]] = []
        while not events or not condition(events[-1]):
            kind, data = await self.next()
            if kind == "rollout":
                events.append(data)
        return events


@asynccontextmanager
async def follow(server: Any, query: str = "", **headers: str) -> AsyncIterator[Stream]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(server.endpoint + EVENTS_PATH + query, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        yield Stream(answer)


@pytest.fixture
async def server(serve: Serve) -> LightningStoreServer:
    return (await serve())[0]


@asynccontextmanager
async def streams_of(store: LightningStore, **settings: Any) -> AsyncIterator[PythonServerLauncher]:
    """Serve the streams alone, with settings of their own."""
    launcher = PythonServerLauncher(EventStreams(lambda: store, **settings), PythonServerLauncherArgs())
    await launcher.start()
    yield launcher
    await launcher.stop()


async def test_a_stream_begins_with_its_cursor_and_tells_of_what_comes_after(server: LightningStoreServer) -> None:
    before = await server.enqueue_rollout("before")
    async with follow(server) as stream:
        assert stream.answer.content_type == "text/event-stream"
        kind, data = await stream.next()
        assert (kind, data) == ("cursor", {"cursor": stream.last_id})
        rollout = await server.enqueue_rollout("after", mode="val", run_id="r")
        (event,) = await stream.until(lambda event: True)
    assert event["rollout_id"] == rollout.rollout_id != before.rollout_id
    assert (event["status"], event["mode"], event["run_id"], event["spans"]) == ("queuing", "val", "r", 0)
    assert event["attempt_id"] is None


async def test_a_page_that_loads_its_lists_after_the_cursor_loses_nothing(server: LightningStoreServer) -> None:
    async with follow(server) as stream:
        await stream.next()
        ids = [(await server.enqueue_rollout(number)).rollout_id for number in range(20)]
        listed = {rollout.rollout_id for rollout in await server.query_rollouts(limit=10)}
        sent = {event["rollout_id"] for event in await stream.until(lambda event: event["rollout_id"] == ids[-1])}
    assert set(ids) <= sent | listed
    assert set(ids) == sent


@pytest.mark.parametrize("by", ["header", "query", "header wins"])
async def test_who_comes_back_with_the_last_id_goes_on_from_there(server: LightningStoreServer, by: str) -> None:
    async with follow(server) as stream:
        first = await server.enqueue_rollout("first")
        await stream.until(lambda event: event["rollout_id"] == first.rollout_id)
    missed = await server.enqueue_rollout("while away")
    query = {"query": f"?after={stream.last_id}", "header wins": "?after=0"}.get(by, "")
    headers = {} if by == "query" else {"Last-Event-ID": stream.last_id}
    async with follow(server, query, **headers) as back:
        assert await back.next() == ("cursor", {"cursor": stream.last_id})
        (event,) = await back.until(lambda event: True)
    assert event["rollout_id"] == missed.rollout_id


async def test_a_restart_of_a_durable_server_loses_no_change(tmp_path: Path) -> None:
    place = fresh_place("sqlite", None, tmp_path)
    async with place.opened() as store:
        async with serving(store) as (server, _), follow(server) as stream:
            await server.enqueue_rollout("told")
            await stream.until(lambda event: True)
            unread = [(await server.enqueue_rollout(number)).rollout_id for number in range(5)]
        unread += [(await store.enqueue_rollout(number)).rollout_id for number in range(5)]
    headers = {"Last-Event-ID": stream.last_id}
    async with place.opened() as store, serving(store) as (server, _), follow(server, **headers) as back:
        events = await back.until(lambda event: event["rollout_id"] == unread[-1])
    assert [event["rollout_id"] for event in events] == unread


async def test_a_run_is_followed_by_itself_and_the_cursor_moves_with_the_others() -> None:
    store = InMemoryLightningStore()
    async with streams_of(store, keep_alive_seconds=0.2) as launcher, follow(launcher, "?run_id=mine") as stream:
        _, begin = await stream.next()
        await store.enqueue_rollout("theirs", run_id="theirs")
        kind, moved = await stream.next()
        assert (kind, moved["cursor"] != begin["cursor"]) == ("cursor", True)
        mine = await store.enqueue_rollout("mine", run_id="mine")
        (event,) = await stream.until(lambda event: True)
    assert event["rollout_id"] == mine.rollout_id


async def test_changes_in_short_order_are_told_together(serve: Serve) -> None:
    server, client = await serve()
    async with follow(server) as stream:
        await stream.next()
        rollout = await client.start_rollout("x")
        for number in range(200):
            await client.update_rollout(rollout.rollout_id, metadata={"number": number})
        await client.update_rollout(rollout.rollout_id, status="cancelled")
        events = await stream.until(lambda event: event["status"] == "cancelled")
    assert len(events) < 100


async def test_only_the_last_message_of_a_group_moves_the_cursor(server: LightningStoreServer) -> None:
    made = [(await server.enqueue_rollout(number)).rollout_id for number in range(3)]
    async with follow(server, "?after=0") as stream:
        blocks = [await stream.block() for _ in range(4)]
    ids = [block["id"] for block in blocks]
    assert ids[:3] == ["0", "0", "0"]
    assert [json.loads(block["data"])["rollout_id"] for block in blocks[1:]] == made
    async with follow(server, **{"Last-Event-ID": ids[3]}) as back:
        new = await server.enqueue_rollout("new")
        (event,) = await back.until(lambda event: True)
    assert event["rollout_id"] == new.rollout_id


async def test_a_quiet_stream_is_kept_alive_by_comments() -> None:
    async with streams_of(InMemoryLightningStore(), keep_alive_seconds=0.1) as launcher, follow(launcher) as stream:
        await stream.next()
        assert [await stream.block() for _ in range(2)] == [{"": "keep-alive"}] * 2


async def test_a_stop_ends_open_streams_at_once_and_cleanly(
    server: LightningStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with follow(server) as one, follow(server) as other:
        await asyncio.gather(one.next(), other.next())
        await asyncio.wait_for(server.stop(), 1.5)  # less than its patience with requests
        for stream in (one, other):
            with pytest.raises(EOFError):  # an orderly end of the body
                await stream.next()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_client_that_leaves_makes_room_for_another() -> None:
    store = InMemoryLightningStore()
    async with streams_of(store, limit=1) as launcher:
        async with follow(launcher) as stream:
            await stream.next()
            refused = await exchange(launcher.port, request("GET", EVENTS_PATH))
            assert (refused.status, refused.json["error_type"]) == (429, "BusyError")
            assert int(refused.headers["retry-after"]) >= 1
        for _ in range(500):
            reader, writer = await asyncio.open_connection("127.0.0.1", launcher.port)
            writer.write(request("GET", EVENTS_PATH))
            status = (await read_answer(reader, to_head=True)).status
            writer.close()
            if status == 200:
                return
            await asyncio.sleep(0.01)  # the server has yet to notice
    pytest.fail("the stream of a client that left was never given back")


async def test_a_wrong_cursor_is_400_in_our_form(server: LightningStoreServer) -> None:
    for cursor in ("zzz", "1%0Aevent:%20x", "9" * 300, "%00"):
        answer = await exchange(server.server_launcher.port, request("GET", f"{EVENTS_PATH}?after={cursor}"))
        assert (answer.status, answer.json["error_type"]) == (400, "BadRequestError"), cursor


async def test_a_head_request_is_answered_and_ends(server: LightningStoreServer) -> None:
    request_bytes = request("HEAD", EVENTS_PATH)
    answer = await exchange(server.server_launcher.port, request_bytes, to_head=True)
    assert answer.headers["content-type"].startswith("text/event-stream")


class Eventless(LightningStore):
    """A store of an older kind."""

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"async_safe": True}


async def test_a_store_without_events_answers_501_in_our_form(serve: Serve) -> None:
    server, _ = await serve(Eventless())
    answer = await exchange(server.server_launcher.port, request("GET", EVENTS_PATH))
    assert (answer.status, answer.json["error_type"]) == (501, "NotImplementedError")


class Failing(InMemoryLightningStore):
    """Fails its followers from the third page on."""

    pages = 0
    error: Exception

    async def query_events(self, **arguments: Any) -> EventPage:
        self.pages += 1
        if self.pages > 2:
            raise self.error
        return await super().query_events(**arguments)


@pytest.mark.parametrize(
    ("error", "detail"), [(GoneError("dropped"), "dropped"), (RuntimeError("s3cret"), "Internal server error")]
)
async def test_a_failure_of_the_store_is_the_last_message(error: Exception, detail: str) -> None:
    store = Failing()
    store.error = error
    async with streams_of(store) as launcher, follow(launcher) as stream:
        await stream.next()
        assert await stream.next() == ("error", {"detail": detail, "error_type": type(error).__name__})
        with pytest.raises(EOFError):
            await stream.next()


async def test_a_store_that_is_no_thread_safe_one_is_followed_too(serve: Serve) -> None:
    class Single(InMemoryLightningStore):
        @property
        def capabilities(self) -> LightningStoreCapabilities:
            return {**super().capabilities, "thread_safe": False}

    server, _ = await serve(Single())
    async with follow(server) as stream:
        await stream.next()
        rollout = await server.enqueue_rollout("x")
        (event,) = await stream.until(lambda event: True)
    assert event["rollout_id"] == rollout.rollout_id


async def test_changes_of_runs_are_told_beside_those_of_rollouts(server: LightningStoreServer) -> None:
    async with follow(server, "?run_id=r") as stream:
        assert (await stream.next())[0] == "cursor"
        await server.start_run("r")
        await server.start_run("of another")
        await server.add_run_records("r", [RunRecord(kind="step", step=3)])
        changes: list[Any] = []
        while not changes or changes[-1]["last_step"] is None:
            kind, data = await stream.next()
            changes += [data] if kind == "run" else []
        assert {each["run_id"] for each in changes} == {"r"}
        assert (changes[-1]["state"], changes[-1]["last_step"], changes[-1]["records"]) == ("running", 3, {"step": 1})
        rollout = await server.enqueue_rollout("x", run_id="r")
        [event] = await stream.until(lambda data: True)
        assert event["rollout_id"] == rollout.rollout_id
        last = stream.last_id
    await server.update_run("r", state="stopped")
    async with follow(server, **{"Last-Event-ID": last}) as stream:  # what came while nobody listened
        assert (await stream.next())[0] == "cursor"
        kind, data = await stream.next()
        assert (kind, data["run_id"], data["state"]) == ("run", "r", "stopped")


# --- workers and resources ------------------------------------------------------------------------------------------


async def told_of(stream: Stream, kind: str, **fields: Any) -> dict[str, Any]:
    """Return the first event of a kind whose data have these values."""
    while True:
        event_kind, data = await stream.next()
        if event_kind == kind and all(data[name] == value for name, value in fields.items()):
            return data


async def test_a_worker_is_told_when_it_claims_and_when_it_is_free(server: LightningStoreServer) -> None:
    await server.enqueue_rollout("x")
    async with follow(server) as stream:
        claimed = required(await server.dequeue_rollout("w-1"))
        busy = await told_of(stream, "worker", worker_id="w-1", status="busy")
        assert busy["current_rollout_id"] == claimed.rollout_id
        await server.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        assert (await told_of(stream, "worker", worker_id="w-1", status="idle"))["current_rollout_id"] is None


async def test_each_version_of_resources_is_told_without_what_is_in_it(server: LightningStoreServer) -> None:
    async with follow(server) as stream:
        llm = LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="sk-not-to-be-told")
        published = await server.add_resources({"main_llm": llm})
        first = await told_of(stream, "resources", resources_id=published.resources_id)
        assert first == {"resources_id": published.resources_id, "version": 1, "run_id": None}
        await server.update_resources(published.resources_id, {"main_llm": llm})
        await told_of(stream, "resources", resources_id=published.resources_id, version=2)


async def test_who_begins_to_follow_hears_where_each_stands(server: LightningStoreServer) -> None:
    published = await server.add_resources({})
    await server.update_worker("w-1")
    async with follow(server) as first, follow(server) as second:
        for stream in (first, second):
            await told_of(stream, "worker", worker_id="w-1")
    async with follow(server, **{"Last-Event-ID": first.last_id}) as back:
        await told_of(back, "resources", resources_id=published.resources_id)


async def test_who_follows_one_run_hears_of_no_other(server: LightningStoreServer) -> None:
    await server.add_resources({}, run_id="other")
    mine = await server.add_resources({}, run_id="mine")
    async with follow(server, "?run_id=mine") as stream:
        while (message := await stream.next())[0] != "resources":
            pass
        assert message[1]["resources_id"] == mine.resources_id


async def test_a_client_with_much_to_hear_is_told_that_it_lags_and_hears_all(server: LightningStoreServer) -> None:
    async with follow(server, "?after=0") as stream:
        requests = [EnqueueRolloutRequest(input=number) for number in range(2500)]
        made = await server.enqueue_many_rollouts(requests)
        event_ids: list[str] = []
        lags: list[int] = []
        while len(event_ids) < 2500:
            kind, data = await stream.next()
            if kind == "lag":
                lags.append(data["behind"])
            elif kind == "rollout":
                event_ids.append(data["rollout_id"])
        assert event_ids == [rollout.rollout_id for rollout in made]
        assert lags == [1000]


async def test_nobody_looks_while_nobody_follows() -> None:
    looks = 0

    class Counted(InMemoryLightningStore):
        async def query_workers(self, **filters: Any) -> Any:
            nonlocal looks
            looks += 1
            return await super().query_workers(**filters)

    store = Counted()
    watch = ListWatch(lambda: store, look_seconds=0.01)
    assert looks == 0
    async with watch.follow():
        while looks < 3:  # noqa: ASYNC110 -- nobody tells of a look
            await asyncio.sleep(0.01)
    looks_before = looks
    await asyncio.sleep(0.1)
    assert looks == looks_before


async def test_a_store_that_fails_for_a_while_is_looked_at_again_and_one_without_lists_is_left() -> None:
    class Failing(InMemoryLightningStore):
        error: Exception | None = ConnectionError("away")

        async def query_workers(self, **filters: Any) -> Any:
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            return await super().query_workers(**filters)

    store = Failing()
    await store.update_worker("w-1")
    async with ListWatch(lambda: store, look_seconds=0.01).follow() as queue:
        assert (await asyncio.wait_for(queue.get(), 10))[1]["worker_id"] == "w-1"

    class Bare(LightningStore):
        @property
        def capabilities(self) -> LightningStoreCapabilities:
            return LightningStoreCapabilities()

    async with ListWatch(Bare, look_seconds=0.01).follow() as queue:
        await asyncio.sleep(0.05)
        assert queue.empty()
