"""Commands within the process of the tests, and commands that serve until they are told to end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.cli import main
from tests.cli.terminal import Serve
from tests.stubs.processes import Process, Terminal


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
def serve(terminal: Terminal) -> Serve:
    """Starts a command that serves at a free port; returns its process and the first lines that it prints."""

    def start(*arguments: str, lines: int = 1, **environment: str) -> tuple[Process, list[str]]:
        server = terminal(["agl", *arguments, "--port", "0"], apart=True, **environment)
        return server, server.until(".*\n" * lines).splitlines()[:lines]

    return start
