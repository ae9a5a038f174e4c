"""`agl dashboard` as a shell runs it: the page of a finished run, of a server, and clear words where there is none."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.store.client_server import LightningStoreServer
from tests.cli.terminal import shell
from tests.stubs.processes import Terminal

AGL = [sys.executable, "-m", "agentlightning.cli", "dashboard", "--no-browser"]


run = partial(shell, "dashboard", "--no-browser")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:

    async def fill() -> None:
        store = agl.SQLiteLightningStore(tmp_path / "store.db")
        await store.start_run("the-run", algorithm="GRPO")
        await store.update_run("the-run", state="succeeded")
        await store.close()

    asyncio.run(fill())
    return tmp_path


def test_a_finished_run_is_served_until_ctrl_c(run_folder: Path, terminal: Terminal) -> None:
    process = terminal([*AGL, run_folder], apart=True)
    [address] = re.findall(r"dashboard: (http://127\.0\.0\.1:\d+/)", process.until(r"dashboard: .*\n"))
    with urllib.request.urlopen(address + "v1/agl/runs/the-run") as reply:
        assert b'"succeeded"' in reply.read()
    assert process.interrupted() == 0


@pytest.fixture
def other_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_cannot_be_opened_is_one_clear_line(tmp_path: Path, other_server: str) -> None:
    for name, store in (("early", None), ("memory", "memory, until this program ends"), ("kept", "sqlite:///kept.db")):
        (tmp_path / name).mkdir()
        config = {"versions": {}} if store is None else {"run": {"run_id": "run-1", "store": store}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for arguments, message in (
        ([str(tmp_path / "none.db")], "none.db' not found. Set PLACE to a store file, the folder of a run"),
        ([str(tmp_path)], "has no store.db. Pass the store that the program used, such as sqlite:///NAME.db"),
        ([str(tmp_path / "early")], "has no store.db. Pass the store that the program used, such as sqlite:///NAME.db"),
        ([str(tmp_path / "memory")], "has no store.db. Its run was stored in memory until the program ended"),
        ([str(tmp_path / "kept")], "has no store.db. Pass the store that the program used: 'sqlite:///kept.db'"),
        (["memory"], "is available only in its own process"),
        (["http://127.0.0.1:9"], "Cannot reach a server at http://127.0.0.1:9/"),
        ([other_server], "is not a store server"),
        (["http://"], "is not the address of a server"),
        (["http://127.0.0.1:4747", "--port", "80"], "--port 80 has no effect"),
    ):
        ended = run(*arguments)
        assert ended.returncode == 2, (arguments, ended)
        assert message in ended.stderr, (arguments, ended.stderr)
        assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr


async def test_the_page_of_a_server_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: LightningStoreServer
) -> None:
    from agentlightning.dashboard import pages

    (tmp_path / "index.html").write_text("<title>page</title>")
    monkeypatch.setattr(pages.Pages.__init__, "__defaults__", (tmp_path,))
    ended = await asyncio.to_thread(run, server.endpoint)
    assert ended.returncode == 0, ended
    assert ended.stdout.strip() == f"dashboard: {server.endpoint}/"
