"""The parts of a recipe as processes of this machine, and a job script as Slurm runs it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from tests.deploy.recipes import Part
from tests.stubs.ports import free_port
from tests.stubs.processes import Process, Terminal

INSTALLED = {"agl": str(Path(sys.executable).with_name("agl")), "python": sys.executable}


class Topology:
    """The parts of a recipe on one machine: its names and ports are replaced by those of this machine."""

    def __init__(self, parts: list[Part], terminal: Terminal, folder: Path, program: Path, **places: str) -> None:
        self.parts = {part.name: part for part in parts}
        self.store_port, self.gateway_port = (str(free_port()) for _ in range(2))
        self._terminal, self._program = terminal, program
        hosts = {f"{before}{name}:": "//127.0.0.1:" for before in ("//agl-", "//") for name in ("store", "gateway")}
        ports = {"4747": self.store_port, "8000": self.gateway_port, "0.0.0.0": "127.0.0.1"}
        self._places = {**hosts, **ports, "/data": str(folder), **places}

    def start(self, name: str, *further: str) -> Process:
        part = self.parts[name]
        words = [self._here(word) for word in part.command]
        words = [re.sub(r"^train\.py", str(self._program), word) for word in words]
        environment = {key: self._here(value) for key, value in part.environment.items()}
        return self._terminal([*words, *further], **environment)

    def _here(self, text: str) -> str:
        for there, local in self._places.items():
            text = text.replace(there, local)
        return text


SRUN = """#!/usr/bin/env bash
# All nodes are this machine; as the real one it hands signals on and waits for all tasks.
while [[ $1 == -* ]]; do shift; done
pids=()
for _ in {nodes}; do "$@" & pids+=($!); done
echo "nodes ${{pids[*]}}"
trap 'kill -TERM ${{pids[*]}} 2>/dev/null' TERM
for pid in "${{pids[@]}}"; do wait $pid; done; wait
"""


def submit(
    terminal: Terminal, folder: Path, script: Path, *arguments: str, job: int = 7, nodes: int = 1, **variables: str
) -> Process:
    """Start a job script as Slurm would, with stand-ins for its commands."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    scripts = {"srun": SRUN.format(nodes=" ".join(map(str, range(nodes)))), "scontrol": "#!/bin/sh\necho 127.0.0.1\n"}
    scripts |= {name: f'#!/bin/sh\nexec {path} "$@"\n' for name, path in INSTALLED.items()}
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "nodes", "SLURM_SUBMIT_DIR": str(folder)}
    ports = {"STORE_PORT": str(free_port()), "GATEWAY_PORT": str(free_port())}
    places = {"PATH": f"{commands}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    return terminal(["bash", script, *arguments], **slurm, **ports, **places, **variables)


def in_file(file: Path, look: Callable[[LightningStore], Any]) -> Any:
    """Return the result of a query to the store of a file."""

    async def ask() -> Any:
        store = SQLiteLightningStore(file)
        try:
            return await look(store)
        finally:
            await store.close()

    return asyncio.run(ask())
