"""`agl store` as a shell runs it: the place of the data, its end, and the maintenance of its file."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from agentlightning.cli.store import Backend, read_bytes, read_seconds, store_spec
from agentlightning.errors import BadRequestError, StoreUnreachableError
from agentlightning.store import LightningStoreClient, SQLiteLightningStore
from tests.stubs.processes import Process, run_program

Serve = Callable[..., tuple[Process, str]]


@pytest.fixture
def serve_store(serve: Any) -> Serve:
    """Starts `agl store` with arguments; returns the process and its address."""

    def start(*arguments: str) -> tuple[Process, str]:
        server, [line, page] = serve("store", *arguments, lines=2)
        url = line.split()[-1]
        assert page == f"dashboard: {url}/"
        return server, url

    return start


@pytest.fixture
async def client() -> AsyncIterator[Callable[[str], LightningStoreClient]]:
    clients: list[LightningStoreClient] = []

    def connect(endpoint: str, **settings: Any) -> LightningStoreClient:
        clients.append(LightningStoreClient(endpoint, **settings))
        return clients[-1]

    yield connect
    for each in clients:
        await each.close()


# --- where the data lies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("db", "backend", "mongo_uri", "spec"),
    [
        (None, None, None, "sqlite:///agl.db"),
        (None, Backend.SQLITE, None, "sqlite:///agl.db"),
        (None, Backend.MEMORY, None, "memory"),
        (None, Backend.MONGO, None, "mongodb://127.0.0.1:27017"),
        ("run.db", None, None, "sqlite:///run.db"),
        ("/var/run.db", Backend.SQLITE, None, "sqlite:////var/run.db"),
        ("memory", None, None, "memory"),
        ("sqlite:///run.db?synchronous=NORMAL", None, None, "sqlite:///run.db?synchronous=NORMAL"),
        ("postgresql://h/d", Backend.POSTGRES, None, "postgresql://h/d"),
        ("postgres://h/d", Backend.POSTGRES, None, "postgres://h/d"),
        ("mongodb://h/d", Backend.MONGO, None, "mongodb://h/d"),
        (None, Backend.MONGO, "mongodb://h/?replicaSet=rs0", "mongodb://h/?replicaSet=rs0"),
        (None, None, "mongodb+srv://h", "mongodb+srv://h"),
        ("http://127.0.0.1:4747", None, None, "http://127.0.0.1:4747"),
    ],
)
def test_the_options_name_one_place(db: str | None, backend: Backend | None, mongo_uri: str | None, spec: str) -> None:
    assert store_spec(db, backend, mongo_uri) == spec


@pytest.mark.parametrize(
    ("db", "backend", "mongo_uri", "text"),
    [
        ("run.db", None, "mongodb://h", "Use either --db or --mongo-uri, not both"),
        ("run.db", Backend.MEMORY, None, "--backend memory and 'sqlite:///run.db' are incompatible"),
        ("postgresql://u:s3cret@h/d", Backend.MONGO, None, r"--backend mongo and 'postgresql://u:\*\*\*@h/d' are"),
        (None, Backend.SQLITE, "mongodb://h", "--backend sqlite and 'mongodb://h' are incompatible"),
        (None, None, "127.0.0.1:27017", "--backend mongo and .* are incompatible"),
        (None, Backend.POSTGRES, None, "--backend postgres requires --db postgresql://"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    db: str | None, backend: Backend | None, mongo_uri: str | None, text: str
) -> None:
    with pytest.raises(BadRequestError, match=text):
        store_spec(db, backend, mongo_uri)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--db", "redis://h"], "'redis://h' is not a store; expected one of: memory, sqlite:///run.db"),
        (["--db", "sqlite:run.db"], "did you mean 'sqlite:///run.db'?"),
        (["--db", "no/such/folder/x.db"], "Cannot open the SQLite store 'no/such/folder/x.db'"),
        (["--keep-last", "-1"], "keep_last=-1"),
        (["--max-age", "7w"], "--max-age '7w': expected seconds, or a number with one of s, m, h, d"),
        (["--max-bytes", "lots"], "--max-bytes 'lots': expected bytes"),
        (["--lease-seconds", "0"], "lease_seconds must be positive"),
        (["--db", "http://127.0.0.1:1", "--keep-last", "3"], "served by another process; pass retention"),
        (["--db", "x.db", "check"], "--db before 'check' has no effect. Use: agl store check --db ..."),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", "--port", "0", *arguments] if "check" not in arguments else ["store", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("agl: ")
    assert text in line


def test_durations_and_sizes_have_units() -> None:
    assert [read_seconds("--x", text) for text in ("90", "1.5m", "12h", "7d")] == [90, 90, 43_200, 604_800]
    assert [read_bytes("--x", text) for text in ("10", "500MB", "2GiB")] == [10, 500_000_000, 2_147_483_648]
    for wrong in ("", "-1", "5 apples", "inf", "MB"):
        with pytest.raises(BadRequestError, match="--x"):
            read_bytes("--x", wrong)


# --- serving ---------------------------------------------------------------------------------------------------------


async def test_retention_on_the_command_line_deletes_what_ended_first(serve_store: Serve, client: Any) -> None:
    _, endpoint = serve_store("--db", "memory", "--keep-last", "1", "--lease-seconds", "0.2")
    store = client(endpoint)
    ids: list[str] = []
    for number in range(3):
        ids.append((await store.start_rollout(number)).rollout_id)
        await store.update_attempt(ids[-1], "latest", status="succeeded")
    while len(await store.query_rollouts()) > 1:  # noqa: ASYNC110 -- a deletion is no event
        await asyncio.sleep(0.05)
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [ids[-1]]


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_with_every_request_answered_and_every_answer_stored(
    serve_store: Serve, client: Any, tmp_path: Path, number: signal.Signals
) -> None:
    server, endpoint = serve_store("--db", "run.db")
    store = client(endpoint, deadline=1.0)
    answered: list[str] = []
    enough = asyncio.Event()

    async def enqueue() -> None:
        while True:
            answered.append((await store.enqueue_rollout("x")).rollout_id)
            if len(answered) > 40:
                enough.set()

    callers = [asyncio.create_task(enqueue()) for _ in range(8)]
    parked = asyncio.create_task(store.dequeue_rollout(timeout=60.0, run_id="idle"))
    await enough.wait()
    assert await asyncio.to_thread(server.interrupted, number) == 0
    for ended in await asyncio.gather(*callers, parked, return_exceptions=True):
        assert isinstance(ended, StoreUnreachableError)  # nobody answers there any more
    assert server.said.splitlines()[-1] == "store closed"
    assert os.listdir(tmp_path) == ["run.db"]
    again = SQLiteLightningStore(tmp_path / "run.db")
    assert set(answered) <= {rollout.rollout_id for rollout in await again.query_rollouts()}
    await again.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_it_at_once_and_loses_no_answer(
    serve_store: Serve, client: Any, tmp_path: Path, number: signal.Signals
) -> None:
    server, endpoint = serve_store("--db", "run.db")
    stored_rollout = await client(endpoint).enqueue_rollout("x")
    _, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
    half = b"POST /v1/agl/spans HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
    writer.write(half)  # a request in progress, for which a stop in good order waits
    await writer.drain()
    await client(endpoint).statistics()
    server.popen.send_signal(number)
    await asyncio.to_thread(server.until, "(?m)^stopping")
    await asyncio.sleep(0.5)  # longer than what counts as an echo of the first signal
    assert await asyncio.to_thread(server.interrupted, number) == 128 + number
    writer.close()
    again = SQLiteLightningStore(tmp_path / "run.db")
    assert [rollout.rollout_id for rollout in await again.query_rollouts()] == [stored_rollout.rollout_id]
    await again.close()


async def test_one_signal_that_arrives_twice_is_one(serve_store: Serve, client: Any) -> None:
    server, endpoint = serve_store("--db", "memory")
    await client(endpoint).statistics()
    server.popen.terminate()
    os.killpg(server.popen.pid, signal.SIGTERM)
    assert await asyncio.to_thread(server.ended) == 0


@pytest.mark.parametrize(("echo_seconds", "code"), [(60.0, 0), (0.0, 128 + signal.SIGTERM)])
def test_a_second_signal_counts_as_such_also_when_the_loop_is_closed_already(echo_seconds: float, code: int) -> None:
    program = f"""
import asyncio, os, signal
from agentlightning.cli import serving
serving._ECHO_SECONDS = {echo_seconds}
async def main():
    end = serving.end_of_process()
    os.kill(os.getpid(), signal.SIGTERM)
    await end
asyncio.run(main())
os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = run_program("python", "-c", program, code=code)
    assert ("stopped immediately" in ended.stderr) == (code != 0), ended.stderr


def test_an_echo_at_the_very_end_of_the_interpreter_does_not_end_it() -> None:
    program = """
import asyncio, os, signal
from agentlightning.cli import serving
class Late:  # deleted when modules are, after the handlers of signals
    def __del__(self, kill=os.kill, us=os.getpid(), number=signal.SIGTERM):
        kill(us, number)
signal.late = Late()
async def main():
    end = serving.end_of_process()
    os.kill(os.getpid(), signal.SIGTERM)
    await end
asyncio.run(main())
"""
    run_program("python", "-c", program)


# --- looking after a file --------------------------------------------------------------------------------------------


async def test_a_served_file_is_copied_and_checked_while_it_is_served(
    serve_store: Serve, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, endpoint = serve_store("--db", "run.db")
    made = await client(endpoint).enqueue_rollout("x")
    served, copy = str(tmp_path / "run.db"), str(tmp_path / "copy.db")
    assert await asyncio.to_thread(main, ["store", "backup", copy, "--db", served]) == 0
    assert "consistent copy" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["store", "backup", copy, "--db", served]) == 2
    assert "replace it with --force" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["store", "backup", copy, "--db", served, "--force"]) == 0
    for path in (served, copy, f"sqlite:///{copy}?synchronous=FULL"):
        assert await asyncio.to_thread(main, ["store", "check", "--db", path]) == 0
        assert "ok, 1 rollout, 0 spans" in capsys.readouterr().out
    for where in (endpoint, served, f"sqlite:///{copy}"):
        assert await asyncio.to_thread(main, ["store", "stats", where]) == 0
        shown = {tuple(line.rsplit(maxsplit=1)) for line in capsys.readouterr().out.splitlines()}
        assert {("total_rollouts", "1"), ("rollouts queuing", "1"), ("rollouts failed", "0")} <= shown
    assert (await client(endpoint).get_rollout_by_id(made.rollout_id)) == made


def test_a_file_that_is_not_whole_is_exit_code_1_and_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.db"

    async def fill() -> str:
        store = SQLiteLightningStore(path)
        made = await store.enqueue_rollout("x")
        await store.close()
        return made.rollout_id

    rollout_id = asyncio.run(fill())
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE rollouts SET attempts = 3")
    assert main(["store", "check", "--db", str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"rollout {rollout_id}: column attempts is 3, but the record has 0",
        f"{path}: 1 problem, 1 of them listed",
    ]


@pytest.mark.parametrize("command", [["backup", "copy.db"], ["check"]])
@pytest.mark.parametrize(
    ("db", "text"),
    [
        ("mongodb://u:s3cret@h/d", "'mongodb://u:***@h/d' is not a store file: copy"),
        ("postgres://h/d", "pg_dump"),
        ("http://127.0.0.1:4747", "run this command on the machine with the server's file"),
        ("memory", "a store in memory has no file"),
        ("missing.db", "'missing.db'"),
    ],
)
def test_what_has_no_file_is_told_what_to_use_instead(
    command: list[str], db: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if command == ["check"] and db.startswith(("mongodb", "postgres")):
        pytest.skip("what lies in a database is checked there")
    assert main(["store", *command, "--db", db]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_statistics_of_a_file_that_is_not_there_make_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", "stats"]) == 2
    assert "Store file 'agl.db' not found" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_statistics_of_a_server_that_is_not_there_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "stats", "http://127.0.0.1:1?deadline=0.2"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("agl: The store at http://127.0.0.1:1 did not respond")
