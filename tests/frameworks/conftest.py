"""A gateway that demands keys, and nothing that reaches beyond this machine."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import agent_of_guide

NOT_OURS = (
    "ignore:unclosed:ResourceWarning",  # programs leave their clients open, as most programs do
    "ignore:Pydantic serializer warnings",  # some packages dump parsed answers by the type of unparsed ones
)

IN_GROUPS = ("ignore", "error:::agentlightning")  # of their own packages these warn on every path; ours stays an error


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pass the packages' own warnings."""
    for item in items:
        folder = Path(__file__).parent
        if folder in item.path.parents:
            in_group = item.path.parent != folder or "AGL_TEST_FRAMEWORK" in os.environ
            for warning in IN_GROUPS if in_group else NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(warning))


REACHED: list[str] = []
"""Hosts beyond this machine that were requested, from the import of the framework on."""


def _stay_here() -> None:
    """Resolve no address of another machine, and record it."""
    ask = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (None, "", "localhost", "127.0.0.1", "0.0.0.0", "::1", "::", socket.gethostname()):
            REACHED.append(str(name))
            raise socket.gaierror(socket.EAI_NONAME, f"the tests of a framework do not reach {name}")
        return ask(host, *arguments, **options)

    socket.getaddrinfo = getaddrinfo


if os.environ.get("AGL_TEST_FRAMEWORK"):
    _stay_here()


@pytest.fixture(autouse=True)
def _nothing_reaches_out() -> Iterator[None]:
    yield
    assert REACHED == []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a test was skipped because its framework is not installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("AGL_TEST_FRAMEWORK") and reporter is not None:
        skipped = [report for report in reporter.stats.get("skipped", []) if "is not installed" in str(report.longrepr)]
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if skipped else session.exitstatus


@pytest.fixture(autouse=True, scope="module")
def _left_open() -> Iterator[None]:
    yield
    gc.collect()  # within this folder, so that no other test meets what was left open


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "the-secret-of-the-server")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")  # that library sends traces to its vendor
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "LANGSMITH_TRACING"):
        monkeypatch.delenv(name, raising=False)


class Listener:
    """A proxy that lets nothing through and records the requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                self.asked.append(connection.recv(1000).decode(errors="replace").partition("\r\n")[0])

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """Yield a listener that receives everything sent to any other machine."""
    listener = Listener()
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, listener.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield listener
    listener.close()


@pytest.fixture
def coder(outside: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return what gives the agent of a coding agent's guide, whose command reaches nothing beyond this machine."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield agent_of_guide
    assert outside.asked == []
