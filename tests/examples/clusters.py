"""Parts of examples/cluster as processes of this machine: started as their recipe says, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

import agentlightning as agl
from agentlightning.store.sqlite import SQLiteLightningStore
from tests.deploy.recipes import Part
from tests.examples.shown import EXAMPLES
from tests.stubs.ports import free_port

CLUSTER = EXAMPLES / "cluster"
PROGRAM = CLUSTER / "train.py"
INSTALLED = {"agl": str(Path(sys.executable).with_name("agl")), "python": sys.executable}
LIMIT_SECONDS = 240


class Process:
    """A process and what it has started, in a group of its own; its output goes to a file."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str], name: str) -> None:
        self.log = folder / f"{name}.log"
        plain = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                command,
                cwd=folder,
                env={**plain, "PYTHONUNBUFFERED": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, pattern: str) -> None:
        """Wait until its output has the pattern. A file tells nobody of new lines, so this asks 20 times a second."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while re.search(pattern, self.said) is None:
            assert self.popen.poll() is None, f"it ended without {pattern!r}:\n{self.said[-4000:]}"
            assert time.monotonic() < deadline, f"no {pattern!r} yet:\n{self.said[-4000:]}"
            threading.Event().wait(0.05)

    def ended(self) -> int:
        """Wait for its end; return its exit code."""
        return self.popen.wait(LIMIT_SECONDS)

    def family(self) -> list[psutil.Process]:
        """Return the process and all that it has started and that lives."""
        try:
            whole = psutil.Process(self.popen.pid)
            return [whole, *whole.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill it and all that it has started: a machine is gone."""
        for one in self.family():
            kill(one)
        self.popen.wait(30)


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


class Topology:
    """The parts of a recipe on one machine: its names and ports are replaced by those of this machine."""

    def __init__(self, parts: list[Part], folder: Path) -> None:
        self.parts = {part.name: part for part in parts}
        self.folder = folder
        self.store_port, gateway_port = (str(free_port()) for _ in range(2))
        self.token = self.parts["store"].environment["AGL_TOKEN"]
        self.places = {"agl-store:": "127.0.0.1:", "//store:": "//127.0.0.1:", "/data": str(folder)}
        self.places |= {"4747": self.store_port, "8000": gateway_port, "0.0.0.0": "127.0.0.1"}
        self.started: list[Process] = []

    def start(self, name: str, *further: str) -> Process:
        part = self.parts[name]
        words = [INSTALLED.get(word, word) for word in part.command]
        words = [re.sub(r"^train\.py", str(PROGRAM), self._here(word)) for word in words]
        environment = {key: self._here(value) for key, value in part.environment.items()}
        number = len(self.started)
        self.started.append(Process([*words, *further], self.folder, environment, f"{name}-{number}"))
        return self.started[-1]

    def _here(self, text: str) -> str:
        for there, local in self.places.items():
            text = text.replace(there, local)
        return text

    def kill_at_work(self, runner: Process) -> str:
        """Kill a runner while it has a rollout; return the id of that rollout."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            for each in runner.family():
                each.send_signal(signal.SIGSTOP)  # what it has in hand now, it has when it is killed
            if rollout := self._in_hand({each.pid for each in runner.family()}):
                runner.kill()
                return rollout
            for each in runner.family():
                each.send_signal(signal.SIGCONT)
            threading.Event().wait(0.1)
        raise AssertionError(f"it had no rollout in all the time:\n{runner.said[-4000:]}")

    def _in_hand(self, pids: set[int]) -> str | None:
        async def ask() -> str | None:
            client = agl.LightningStoreClient(f"http://127.0.0.1:{self.store_port}")
            try:
                workers = await client.query_workers()
                mine = [one for one in workers if pids & {int(part) for part in re.findall(r"\d+", one.worker_id)}]
                return next((one.current_rollout_id for one in mine if one.current_rollout_id), None)
            finally:
                await client.close()

        return asyncio.run(ask())

    def close(self) -> None:
        for each in self.started:
            each.kill()


def attempts_of(file: Path, rollout: str) -> list[str]:
    """Return the statuses of a rollout's attempts, out of the file of a store."""

    async def ask() -> list[str]:
        store = SQLiteLightningStore(file)
        try:
            return [attempt.status for attempt in await store.query_attempts(rollout)]
        finally:
            await store.close()

    return asyncio.run(ask())


def steps_of(said: str) -> list[int]:
    """Return the numbers of the steps that an algorithm says it has taken, in their order."""
    return [int(step) for step in re.findall(r"^step +(\d+)/", said, re.MULTILINE)]


def curve(printed: str) -> dict[int, int]:
    """Return updates and the percentage of solved tasks after them."""
    table = printed.partition("updates  solved")[2]
    return {int(updates): int(solved) for updates, solved in re.findall(r"^ +(\d+) +(\d+)%", table, re.MULTILINE)}
