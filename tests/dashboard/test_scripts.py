"""The scripts of dashboard/package.json: those that serve, in a browser; those that check, on a file with a fault.

`types`, `test`, `build` and `lint` on the page's own files are run by `make check-dashboard`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from typing_extensions import override

from tests.dashboard.browser import Watch, no_violations
from tests.dashboard.conftest import OpenView
from tests.dashboard.server import ROOT
from tests.stubs.ports import free_port

pytestmark = pytest.mark.dashboard
PAGE = ROOT / "dashboard"
SECONDS = 90


def npm(
    script: str, *further: str, folder: Path = PAGE, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Run a script as a terminal does, in a process group of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["npm", "run", "--silent", script, "--", *further]
    whole = {**os.environ, "PATH": path, **(environment or {})}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(script: str, *further: str, folder: Path = PAGE) -> tuple[int, str]:
    """Run a script to its end; return its exit code and what it printed."""
    process = npm(script, *further, folder=folder)
    out, _ = process.communicate(timeout=SECONDS)
    return process.returncode, out


Serving = Callable[..., str]


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Start a script that serves; return its address when it answers."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *further: str, **environment: str) -> str:
        port = str(free_port())
        process = npm(script, "--port", port, *further, environment=environment)
        started.append(process)
        address = f"http://localhost:{port}"
        deadline = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
                return address
            time.sleep(0.1)
        end(process)
        raise AssertionError(f"npm run {script} does not answer:\n{process.communicate()[0][-4000:]}")

    yield start
    for process in started:
        end(process)
        process.communicate()


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("script", ["dev", "preview"])
def test_the_page_is_served_beside_a_running_store(
    script: str, serving: Serving, empty_address: str, open_view: OpenView
) -> None:
    address = serving(script, "--strictPort", AGL_SERVER_PORT=empty_address.rpartition(":")[2])
    page = open_view("/runs", address=address)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    expect(page.locator("main [data-state=empty]")).to_be_visible()


def test_storybook_is_served_while_parts_are_written(serving: Serving) -> None:
    address = serving("storybook", "--ci", "--exact-port")
    with urllib.request.urlopen(f"{address}/index.json", timeout=SECONDS) as answer:
        assert "parts--state-denied" in json.load(answer)["entries"]


class Quiet(SimpleHTTPRequestHandler):
    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("storybook")
    code, out = finished("build-storybook", "--output-dir", str(folder))
    assert code == 0, out[-4000:]
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_story_is_shown_without_a_fault(stories: str, browser: Browser, scheme: str) -> None:
    with urllib.request.urlopen(f"{stories}/index.json", timeout=SECONDS) as answer:
        ids = list(json.load(answer)["entries"])
    assert "parts--status-badges" in ids
    with browser.new_context(viewport={"width": 400, "height": 800}) as context:
        for story in ids:
            page = context.new_page()
            watch = Watch(page, stories)
            page.goto(f"{stories}/iframe.html?id={story}&viewMode=story&globals=scheme:{scheme}")
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            assert page.locator("html").get_attribute("data-mantine-color-scheme") == scheme
            no_violations(page)
            assert watch.faults == [], story
            page.close()


HOOK = "import { useState } from 'react';\nexport const A = () => (0 ? useState(1)[0] : 1);\n"
FAILING = "import { test } from 'vitest';\ntest('no', () => {\n  throw new Error('it is wrong');\n});\n"


@pytest.mark.parametrize(
    ("script", "file", "text", "words"),
    [
        ("eslint", "a.ts", "export function go(): void {\n  fetch('/');\n}\n", "no-floating-promises"),
        ("eslint", "a.tsx", HOOK, "rules-of-hooks"),
        ("stylelint", "a.css", "a {\n  colour: red;\n}\n", "property-no-unknown"),
        ("prettier", "a.ts", "export const a = 'b'\n", "src/a.ts"),
        ("typecheck", "a.ts", "export const a: number = 'b';\n", "TS2322"),
        ("vitest", "a.test.ts", FAILING, "it is wrong"),
    ],
    ids=lambda value: value if value.isidentifier() else "-",
)
def test_a_check_finds_the_fault_that_it_is_for(script: str, file: str, text: str, words: str, tmp_path: Path) -> None:
    faulty(tmp_path, file, text)
    code, out = finished(script, folder=tmp_path)
    assert code != 0, out
    assert words in out


def test_format_repairs_what_prettier_finds(tmp_path: Path) -> None:
    written = faulty(tmp_path, "a.ts", "export const a = 'b'\n")
    assert finished("format", folder=tmp_path)[0] == 0
    assert written.read_text() == 'export const a = "b";\n'
    assert finished("prettier", folder=tmp_path)[0] == 0


def faulty(folder: Path, file: str, text: str) -> Path:
    """Write a folder with the settings of the page and one source file; return the file."""
    for name in ("package.json", "tsconfig.json", "eslint.config.js", "vite.config.ts", ".prettierignore"):
        shutil.copy(PAGE / name, folder)
    (folder / "node_modules").symlink_to(PAGE / "node_modules")
    (folder / "src").mkdir()
    written = folder / "src" / file
    written.write_text(text)
    return written
