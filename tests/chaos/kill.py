"""Kill a store server again and again while clients work, restart it on the same port and data, and look what is left.

A server dies by SIGKILL: at a random moment, or by its own hand at a counted place on the write path (a primitive of a
script, the end of a script before its commit, the commit before its answer). The clients go on by their own retries.
With a `Database` PostgreSQL itself dies, all its processes at once, under a store server that stays up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from agentlightning.store import LightningStoreClient
from tests.chaos.load import Fact, Producer, Publisher, Worker, problems
from tests.chaos.processes import CONTEXT, LIMIT_SECONDS, StoreProcess
from tests.chaos.stores import Place
from tests.stubs.postgres_server import PostgresServer

CLIENTS = 4
Where = Literal["any moment", "primitive", "before commit", "after commit"]
_CROSSINGS: dict[Where, int] = {"any moment": 300, "primitive": 300, "before commit": 60, "after commit": 60}


@dataclass(frozen=True)
class Trap:
    """The place where a server is killed: the `count`-th crossing of a place, or `count` ms after its first answer."""

    where: Where
    count: int

    @staticmethod
    def draw(chance: random.Random, *places: Where) -> Trap:
        """Return a trap at one of the places."""
        where = chance.choice(places)
        return Trap(where, chance.randint(1, _CROSSINGS[where]))


# --- the process that is killed --------------------------------------------------------------------------------------


def set_trap(trap: Trap, store: Any) -> None:
    """Put the trap around the backend's writes; it kills the process."""
    if trap.where == "any moment":
        return
    remaining = trap.count
    run = store._backend.run

    def cross(where: Where) -> None:
        nonlocal remaining
        remaining -= where == trap.where
        if remaining <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    async def run_with_trap(script: Callable[[Any], Any], *, write: bool = True) -> Any:
        if not write:
            return await run(script, write=False)

        def trapped(tx: Any) -> Any:
            result = script(_TrappedTx(tx, cross) if trap.where == "primitive" else tx)
            cross("before commit")
            return result

        done = await run(trapped)
        cross("after commit")
        return done

    store._backend.run = run_with_trap


class _TrappedTx:
    """A `Tx` that says when a primitive is called."""

    def __init__(self, tx: Any, cross: Callable[[Where], None]) -> None:
        self._tx, self._cross = tx, cross

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._tx, name)
        if not callable(member):
            return member

        def primitive(*args: Any) -> Any:
            self._cross("primitive")
            return member(*args)

        return primitive


class Server(StoreProcess):
    """A store server that falls into traps."""

    data_can_be_read = True
    """Whether the data can be read while it is dead."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.spec)
        self.place = place

    def next_trap(self, chance: random.Random) -> Trap:
        """Return how it dies next."""
        return Trap.draw(chance, *get_args(Where))

    def start_with(self, trap: Trap) -> None:
        """Start it with a trap."""
        self.start(functools.partial(set_trap, trap))

    def await_death(self) -> None:
        """Return when the trap has fired."""
        if (code := self.joined()) != -signal.SIGKILL:
            raise RuntimeError(f"the store server did not fall into its trap: exit code {code}")

    def close(self) -> None:
        """The same as `kill`."""
        self.kill()


class Database:
    """PostgreSQL under a store server that stays up. Dies with all its processes at once, as with its machine."""

    data_can_be_read = False

    def __init__(self, database: PostgresServer, store: Server) -> None:
        self._database, self._store = database, store
        self.place, self.endpoint = store.place, store.endpoint
        self._runs = True

    def next_trap(self, chance: random.Random) -> Trap:
        """Return how it dies next."""
        return Trap.draw(chance, "any moment")

    def start_with(self, trap: Trap) -> None:
        """Return when the database takes connections (after recovery) and the store server answers."""
        if not self._runs:
            self._database.start()
            self._runs = True
        if not self._store.is_alive():
            self._store.start()

    def is_alive(self) -> bool:
        """True if the store server runs, as it should all the time."""
        return self._store.is_alive()

    def await_death(self) -> None:
        """Do nothing: the database has no traps."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill every process of the database."""
        data = Path(self._database.uri.partition("host=")[2]) / "data"
        postmaster = psutil.Process(int((data / "postmaster.pid").read_text().split()[0]))
        postmaster.suspend()  # so that it starts nobody while it dies
        family = [*postmaster.children(recursive=True), postmaster]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while any(map(_lives, family)):
            time.sleep(0.001)  # they are not our children: nobody tells us of their end
        self._database.crash()  # nothing of it is left to crash; what started it notices that
        self._runs = False

    def close(self) -> None:
        """End the store server."""
        self._store.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- the processes that work -----------------------------------------------------------------------------------------


def work(endpoint: str, name: str, seed: int, pipe: Connection) -> None:
    """Work as producers, workers and a publisher; tell each fact. Finish what was begun at "enough", end at "over"."""
    logging.disable()

    async def run() -> None:
        client = LightningStoreClient(endpoint, deadline=LIMIT_SECONDS)
        producer = Producer(client, f"{name}-producer", seed, pipe.send)
        workers = [Worker(client, f"{name}-worker-{i}", seed, pipe.send) for i in range(4)]
        publisher = Publisher(client, f"{name}-publisher", seed, pipe.send)
        over = asyncio.Event()
        working = asyncio.gather(*[worker.run(over) for worker in workers], publisher.run(over, pause=0.05))
        await producer.run(pipe.poll)
        pipe.recv()
        pipe.send(["produced"])
        await asyncio.to_thread(pipe.recv)
        over.set()
        await working
        await client.close()

    try:
        asyncio.run(run())
        pipe.send(["over"])
    except Exception as error:
        pipe.send(["failed", repr(error)])


class Crowd:
    """The clients, and all the facts that they reported, in the order in which they arrived."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.facts: list[Fact] = []
        self._news = threading.Condition()
        self._signals: list[str] = []
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._readers: list[threading.Thread] = []
        for i in range(CLIENTS):
            ours, theirs = CONTEXT.Pipe()
            args = (endpoint, f"client-{i}", seed, theirs)
            self._processes.append(CONTEXT.Process(target=work, args=args, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
            self._readers.append(threading.Thread(target=self._read, args=(ours,), daemon=True))
            self._readers[-1].start()

    def _read(self, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                fact: Fact = pipe.recv()
                with self._news:
                    (
                        self._signals.append(str(fact))
                        if len(fact) < 3 and fact[0] != "waited"
                        else self.facts.append(fact)
                    )
                    self._news.notify_all()

    def await_news(self, server: Server | Database) -> bool:
        """Return True when a client reports another fact, False if the server dies before that.

        Raises:
            RuntimeError: a client failed, or nothing came for long.
        """
        count = len(self.facts)
        self._await(lambda: len(self.facts) > count or not server.is_alive(), "a client to be answered")
        return len(self.facts) > count

    def finish(self) -> None:
        """Have the clients finish what they began, and return when they have ended."""
        for command, answer in (("enough", "['produced']"), ("over", "['over']")):
            for pipe in self._pipes:
                pipe.send(command)
            self._await(lambda answer=answer: self._signals.count(answer) == CLIENTS, f"the clients to say {answer}")

    def _await(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        with self._news:
            while not done() and not self._failed() and time.monotonic() < end:
                self._news.wait(0.05)  # the death of a process notifies nobody
            if self._failed() or not done():
                raise RuntimeError(f"waited for {what}; {self._failed() or 'nothing came'}")

    def _failed(self) -> list[str]:
        return [signal for signal in self._signals if "failed" in signal]

    def close(self) -> None:
        """End the processes, in whatever state they are."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for reader in self._readers:
            reader.join()


# --- points ----------------------------------------------------------------------------------------------------------


_NONE = Trap("any moment", 0)


@dataclass
class Point:
    """One kill: its place, the facts acknowledged before, the time until the next one, and the problems."""

    number: int
    trap: Trap
    acknowledged: int
    recovered_seconds: float | None = None
    """None if the server fell into its next trap before it had answered anybody."""
    found: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        where = f"{self.trap.where} {self.trap.count}"
        recovered = "-" if self.recovered_seconds is None else f"{self.recovered_seconds:.2f} s"
        verdict = "ok" if not self.found else "; ".join(self.found[:3])
        return f"{self.number or 'end':>5}  {where:<18}  {self.acknowledged:>12}  {recovered:>9}  {verdict}"


HEADER = f"{'point':>5}  {'killed at':<18}  {'acknowledged':>12}  {'recovered':>9}  verdict"


def kill_points(victim: Server | Database, points: int, seed: int) -> Iterator[Point]:
    """Kill it so often under load and yield each point; number 0 is the end, when every client has finished.

    Raises:
        RuntimeError: it did not come back, or a client gave up.
    """
    chance = random.Random(seed)
    trap = victim.next_trap(chance)
    victim.start_with(trap)
    crowd = Crowd(victim.endpoint, seed)
    checked = 0
    try:
        for number in range(1, points + 1):
            if trap.where == "any moment":
                crowd.await_news(victim)
                time.sleep(trap.count / 1000)
                victim.kill()
            else:
                victim.await_death()
            point = Point(number, trap, len(crowd.facts))
            news = crowd.facts[checked : point.acknowledged]
            checked = point.acknowledged
            if victim.data_can_be_read:
                point.found = look_at_copy(victim.place, news)
            trap = victim.next_trap(chance) if number < points else _NONE
            began = time.monotonic()
            victim.start_with(trap)
            if crowd.await_news(victim):
                point.recovered_seconds = time.monotonic() - began
            if not victim.data_can_be_read:
                point.found = look(victim.place, news, complete=False)
            yield point
        crowd.finish()
        victim.close()
        yield Point(0, _NONE, len(crowd.facts), found=look(victim.place, crowd.facts, complete=True))
    finally:
        crowd.close()
        victim.close()


def look_at_copy(place: Place, facts: list[Fact]) -> list[str]:
    """The same as `look`, at the data as they lie there, so that recovering them is left to the next server."""
    with tempfile.TemporaryDirectory() as folder:
        return look(place.copied(Path(folder)), facts, complete=False)


def look(place: Place, facts: list[Fact], *, complete: bool) -> list[str]:
    """Return what is wrong with the data."""

    async def read() -> list[str]:
        async with place.opened() as store:
            return await problems(store, facts, complete=complete)

    differences = asyncio.run(read())
    verdict = place.integrity()
    return differences if verdict == "ok" else [*differences, f"integrity: {verdict}"]


@contextlib.contextmanager
def database_victim() -> Iterator[Database]:
    """Give a PostgreSQL of its own that is to be killed, under a store server."""
    with PostgresServer() as database:
        yield Database(database, Server(Place("postgres", database.uri)))
