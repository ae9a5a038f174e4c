"""A real browser and real store servers. The tests that use it are plain functions (Playwright's sync interface keeps a
loop running in the thread), marked `pytest.mark.dashboard`; they run behind those that are coroutines.

Fixtures: `store_address` (a copy of the store of a demo run), `open_view(path, ...)`, `serve(db, token=...)`, and the
addresses `empty_address`, `token_address`, `many_address`, and with a rollout's id `many_spans`, `hostile`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.dashboard.browser import CHROMIUM, Opened
from tests.dashboard.hostile import hostile_store
from tests.dashboard.server import ROOT, StoreProcess
from tests.dashboard.stores import copy_store, demo_store, many_store, spans_store

TOKEN = "the-token-of-this-server"
Serve = Callable[..., StoreProcess]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No coroutine runs in a thread in which a browser is open."""
    items.sort(key=lambda item: item.get_closest_marker("dashboard") is not None)


class OpenView(Protocol):
    def __call__(
        self,
        path: str,
        *,
        address: str | None = None,
        theme: str = "light",
        width: int = 1280,
        may_fail: bool = False,
        **more: Any,
    ) -> Page: ...


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    if not (ROOT / "agentlightning" / "dashboard" / "static" / "index.html").exists():
        pytest.fail("the page is not built: make dashboard")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def _serve(folder: Path) -> Iterator[Serve]:
    running: list[StoreProcess] = []

    def start(db: Path | str, *, token: str | None = None) -> StoreProcess:
        process = StoreProcess(db, token=token, log=folder / f"server-{len(running)}.log").start()
        running.append(process)
        return process

    yield start
    for process in running:
        process.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server for this test: `serve(db, token=None)`."""
    yield from _serve(tmp_path)


@pytest.fixture(scope="session")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="session")
def _serve_long(_folder: Path) -> Iterator[Serve]:
    yield from _serve(_folder)


@pytest.fixture(scope="session")
def store_address(_folder: Path, _serve_long: Serve) -> str:
    """A server over a copy of the store of a demo run of three steps. Tests that change it take `demo_server`."""
    return _serve_long(copy_store(demo_store(), _folder / "demo.db")).address


@pytest.fixture
def demo_server(tmp_path: Path, serve: Serve) -> StoreProcess:
    """The same for one test alone, which may change and kill it."""
    return serve(copy_store(demo_store(), tmp_path / "demo.db"))


@pytest.fixture(scope="session")
def empty_address(_folder: Path, _serve_long: Serve) -> str:
    return _serve_long(_folder / "empty.db").address


@pytest.fixture(scope="session")
def token_address(_folder: Path, _serve_long: Serve) -> str:
    return _serve_long(copy_store(demo_store(), _folder / "token.db"), token=TOKEN).address


@pytest.fixture(scope="session")
def many_address(_folder: Path, _serve_long: Serve) -> str:
    return _serve_long(copy_store(many_store(), _folder / "many.db")).address


@pytest.fixture(scope="session")
def many_spans(_folder: Path, _serve_long: Serve) -> tuple[str, str]:
    path, rollout_id = spans_store(_folder / "spans.db")
    return _serve_long(path).address, rollout_id


@pytest.fixture(scope="session")
def hostile(_folder: Path, _serve_long: Serve) -> tuple[str, str]:
    """A server whose every text is hostile, and the id of its rollout."""
    path, rollout_id = hostile_store(_folder / "hostile.db")
    return _serve_long(path).address, rollout_id


@pytest.fixture
def open_view(browser: Browser, request: pytest.FixtureRequest, serve: Serve) -> Iterator[OpenView]:
    """Open a view in a browser context of its own, of the demo's store if no address is given; the test fails at its
    end on an error of the page, a violation of its policy or a request to another host."""
    contexts: list[BrowserContext] = []
    views: list[Opened] = []

    def show(
        path: str,
        *,
        address: str | None = None,
        theme: str = "light",
        width: int = 1280,
        may_fail: bool = False,
        **more: Any,
    ) -> Page:
        where = address or request.getfixturevalue("store_address")
        options = {"color_scheme": theme, "viewport": {"width": width, "height": 800}, **more}
        context = browser.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        view = Opened(context.new_page(), where)
        view.watch.may_fail = may_fail
        views.append(view)
        return view.go(path)

    yield show
    for context in contexts:
        context.close()
    faults = [fault for view in views for fault in view.watch.faults]
    assert not faults, "\n".join(faults[:20])


@pytest.fixture
def page(open_view: OpenView) -> Page:
    """The page at its first view, of the demo's store."""
    return open_view("/runs")
