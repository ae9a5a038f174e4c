"""The disk is full or the file turns read-only in the middle of writes: a clear error, whole data, and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.store import LightningStore, SQLiteLightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest
from tests.algorithm.parts import ask, fit, say
from tests.chaos.processes import CONTEXT
from tests.chaos.stores import Place
from tests.store.parts import serving, span_of

BODY = "x" * 4000


@dataclass
class Fault:
    """A disk failure under a store and its repair; both in the process that writes."""

    folder: Path
    begin: Callable[[], None]
    mend: Callable[[], None]


@contextlib.contextmanager
def small_disk(tmp_path: Path, megabytes: int = 4) -> Iterator[Fault]:
    """A file system of a few megabytes that is filled by something else, which then makes room again."""
    folder = tmp_path / "disk"
    folder.mkdir()
    _run_as_root(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)])

    def fill() -> None:
        with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))

    try:
        yield Fault(folder, fill, (folder / "ballast").unlink)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def read_only_file(tmp_path: Path) -> Iterator[Fault]:
    """Database and log are read-only even for a process that has them open (their shared memory may not be)."""

    def turn(sign: str) -> None:
        files = [str(file) for file in tmp_path.iterdir() if file.name in ("store.db", "store.db-wal")]
        _run_as_root(["chattr", f"{sign}i", *files])

    try:
        yield Fault(tmp_path, lambda: turn("+"), lambda: turn("-"))
    finally:
        turn("-")


@contextlib.contextmanager
def file_size_limit(tmp_path: Path) -> Iterator[Fault]:
    """A limit on the size of the files that this process writes (`ulimit -f`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    def begin() -> None:
        limit((tmp_path / "store.db-wal").stat().st_size + 20_000)

    try:
        yield Fault(tmp_path, begin, lambda: limit(hard))
    finally:
        limit(hard)


def _run_as_root(command: list[str]) -> None:
    """Run a command that needs rights, or skip the test with the reason."""
    if os.geteuid() != 0:
        pytest.skip(f"needs root for {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} is not possible here: {done.stderr.strip()}")


@pytest.mark.parametrize("bad", [small_disk, read_only_file])
async def test_writes_fail_clearly_reads_go_on_and_writes_do_when_the_disk_is_good_again(
    bad: Callable[[Path], contextlib.AbstractContextManager[Fault]], tmp_path: Path
) -> None:
    with bad(tmp_path) as fault:
        await write_through(fault)


def test_a_limit_on_the_size_of_files_is_reported_and_survived(tmp_path: Path) -> None:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=write_under_a_limit, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "done"
    process.join()
    ours.close()


def write_under_a_limit(tmp_path: Path, pipe: Connection) -> None:
    try:
        with file_size_limit(tmp_path) as fault:
            asyncio.run(write_through(fault))
        pipe.send("done")
    except BaseException as error:
        pipe.send(repr(error))
        raise


async def write_through(fault: Fault) -> None:
    """Write until it fails, check, mend, write on, check again."""
    place = Place("sqlite", f"sqlite:///{fault.folder}/store.db")
    async with place.opened() as store:
        started = await store.start_rollout("first")
        ids = [started.rollout_id]
        ids += [(await store.enqueue_rollout(BODY)).rollout_id for _ in range(5)]
        fault.begin()
        ids += await enqueue_until_it_fails(store, str(fault.folder))
        for write in writes(store, started):
            with pytest.raises(OSError, match=r"Nothing of this call was stored"):
                await write
        await check(store, ids, started.rollout_id)
        fault.mend()
        ids += [(await store.enqueue_rollout(BODY)).rollout_id for _ in range(20)]
        await check(store, ids, started.rollout_id)
        await store.update_attempt(started.rollout_id, "latest", status="succeeded")
    assert place.integrity() == "ok"
    async with place.opened() as again:
        assert [rollout.rollout_id for rollout in await again.query_rollouts()] == ids


async def enqueue_until_it_fails(store: LightningStore, folder: str) -> list[str]:
    """Several callers at once, so that their scripts share a commit: each gets the result of its own."""
    acknowledged: list[str] = []
    failures: list[BaseException] = []

    async def caller() -> None:
        try:
            while True:
                acknowledged.append((await store.enqueue_rollout(BODY)).rollout_id)
        except OSError as error:
            failures.append(error)

    await asyncio.wait_for(asyncio.gather(*[caller() for _ in range(8)]), 60)
    assert len(failures) == 8
    for failure in failures:
        assert f"{folder}/store.db" in str(failure)
        assert "Nothing of this call was stored" in str(failure)
    return acknowledged


def writes(store: LightningStore, started: AttemptedRollout) -> Iterator[object]:
    """Writes that need more room than there is."""
    yield store.enqueue_many_rollouts([EnqueueRolloutRequest(input=BODY)] * 50)
    yield store.add_many_spans([span_of(started, attributes={"text": BODY}) for _ in range(50)])
    yield store.update_rollout(started.rollout_id, metadata={"text": BODY * 50})
    yield store.update_worker("w", {"text": BODY * 50})


async def check(store: LightningStore, ids: list[str], started: str) -> None:
    """Check that the acknowledged rows are there, and no others."""
    stored_ids = {rollout.rollout_id for rollout in await store.query_rollouts()}
    assert stored_ids == set(ids)
    assert (await store.query_spans(started)).total == 0
    assert await store.get_worker_by_id("w") is None
    statistics = await store.statistics()
    counted = [statistics.get(name) for name in ("total_rollouts", "total_attempts", "total_spans", "total_workers")]
    assert counted == [len(ids), 1, 0, 0]


async def test_a_client_is_told_by_the_server_that_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path) as fault:
        place = Place("sqlite", f"sqlite:///{fault.folder}/store.db")
        async with place.opened() as store, serving(store) as (_, client):
            await store.enqueue_rollout(BODY)
            fault.begin()
            with pytest.raises(OSError, match=r"store\.db.*Nothing of this call was stored"):
                await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=BODY)] * 100)
            assert (await client.query_rollouts()).total == 1
            fault.mend()
            await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=BODY)] * 20)
        assert place.integrity() == "ok"


async def test_a_store_that_cannot_open_its_file_for_writing_says_so_and_does_not_hang(tmp_path: Path) -> None:
    """The first write opens a second connection; here the process is out of file descriptors by then."""
    store = SQLiteLightningStore(tmp_path / "store.db")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest - 1, hard))
        descriptors = []
        with contextlib.suppress(OSError):
            while True:
                descriptors.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises((OSError, ValueError), match=r"store\.db"):
            await asyncio.wait_for(store.enqueue_rollout("x"), 30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in descriptors:
            os.close(descriptor)
    await asyncio.wait_for(store.enqueue_rollout("x"), 30)
    assert (await store.query_rollouts()).total == 1
    await store.close()


@pytest.mark.parametrize("mended", [True, False], ids=["room is made before the end", "it stays full"])
def test_a_training_goes_on_while_the_disk_of_its_folder_is_full_and_ends_with_the_first_cause(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, mended: bool
) -> None:
    with small_disk(tmp_path, megabytes=64) as fault:
        rewards = itertools.cycle([0.0, 1.0])
        calls = itertools.count(1)

        @agl.rollout
        def agent(task: str, llm: agl.LLM) -> float:
            ask(llm, [say(task)])
            number = next(calls)
            if number == 5:  # of four in each step: in the second
                fault.begin()
            if number == 29 and mended:
                fault.mend()
            return next(rewards)

        store = agl.InMemoryLightningStore()
        settings = {"max_steps": 8, "batch_size": 1, "num_generations": 4, "output_dir": fault.folder / "run"}
        failing = contextlib.nullcontext() if mended else pytest.raises(OSError, match=r"No space left.*metrics\.jsonl")
        with caplog.at_level(logging.WARNING), failing:
            fit(agent, ["a"], model=untrained_model, store=store, **settings)
        lines = (fault.folder / "run" / "metrics.jsonl").read_text().splitlines()
        steps, every = [json.loads(line)["step"] for line in lines], [*range(1, 9)]
        assert steps == (every if mended else every[: len(steps)]), "whole lines only"
        assert mended or len(steps) < len(every)
        assert caplog.text.count("They stay in memory") == 1
        assert asyncio.run(recorded_steps(store)) == every


async def recorded_steps(store: LightningStore) -> list[int]:
    """Return the steps that the run has recorded."""
    run = (await store.query_runs()).items[0]
    return [record.step for record in await store.query_run_records(run.run_id, kind_in=["step"])]
