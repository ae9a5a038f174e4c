"""Commands within the process of the tests, and commands that serve until they are told to end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import main
from tests.cli.terminal import Serve


@pytest.fixture
def agl(place: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command against the store of a test; returns exit code, standard output and standard error."""

    async def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(main, [*arguments, "--store", place])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a command that serves at a free port; returns its process and the first lines that it prints."""
    servers: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, lines: int = 1, module: str = "agentlightning.cli", **environment: str
    ) -> tuple[subprocess.Popen[str], list[str]]:
        command = [sys.executable, "-m", module, *arguments, "--port", "0"]
        inherited = {name: value for name, value in os.environ.items() if name != "AGL_TOKEN"}
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path,
            start_new_session=True, env={**inherited, **environment},
        )  # fmt: skip
        servers.append(server)
        assert server.stdout is not None
        return server, [server.stdout.readline().strip() for _ in range(lines)]

    yield start
    for server in servers:
        server.kill()
        server.communicate()
