"""Promises of the whole page: its token, a server that is killed, hostile texts, the views of resources and workers."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import no_violations
from tests.dashboard.conftest import TOKEN, OpenView
from tests.dashboard.server import StoreProcess

pytestmark = pytest.mark.dashboard


def test_a_wrong_token_is_refused_and_the_right_one_opens_the_page_until_a_reload(
    open_view: OpenView, token_address: str
) -> None:
    page = open_view("/runs", address=token_address, may_fail=True)
    page.get_by_role("link", name="Enter the token").first.click()
    field = page.get_by_label("Token of the server", exact=True)
    field.fill("wrong")
    page.get_by_role("button", name="Use").click()
    expect(page.locator("[data-token=refused]")).to_be_visible()
    field.fill(TOKEN)
    field.press("Enter")
    expect(page.locator("[data-token=taken]")).to_be_visible()
    expect(page.locator("[data-connection=live]")).to_be_visible()
    assert TOKEN not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    page.reload()
    expect(page.locator("[data-connection=denied]")).to_be_visible()


def test_a_page_reconnects_when_its_server_was_killed_and_started_again(
    open_view: OpenView, demo_server: StoreProcess
) -> None:
    page = open_view("/workers", address=demo_server.address, may_fail=True)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    demo_server.kill()
    expect(page.locator("[data-connection=lost]")).to_be_visible()
    demo_server.start()
    expect(page.locator("[data-connection=live]")).to_be_visible(timeout=30_000)


@pytest.mark.parametrize("view", ["/runs", "/rollouts", "/resources", "/workers", "/rollouts/ROLLOUT"])
def test_no_hostile_text_runs(open_view: OpenView, hostile: tuple[str, str], view: str) -> None:
    address, rollout_id = hostile
    page = open_view(view.replace("ROLLOUT", rollout_id), address=address)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    expect(page.get_by_text("Loading")).to_have_count(0)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img[src=x]").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_set_of_resources_shows_what_it_holds(open_view: OpenView, theme: str) -> None:
    page = open_view("/resources", theme=theme)
    page.locator("tbody a").first.click()
    expect(page.get_by_role("heading", name="main_llm")).to_be_visible()
    expect(page.get_by_text('"model": "policy"')).to_be_visible()
    expect(page.get_by_text("api_key")).to_have_count(0)
    no_violations(page)


def test_workers_say_what_they_did(open_view: OpenView) -> None:
    page = open_view("/workers")
    expect(page.locator("[data-worker]")).to_have_count(2)
    expect(page.get_by_text("without a sign of life for 30.0 s is silent")).to_be_visible()
    page.clock.set_fixed_time(time.time() * 1000 + 60_000)  # a minute later, without waiting for it
    expect(page.get_by_text("? silent")).to_have_count(2)


@pytest.mark.parametrize("view", ["/runs", "/rollouts", "/resources", "/workers"])
def test_an_empty_store_says_so(open_view: OpenView, empty_address: str, view: str) -> None:
    page = open_view(view, address=empty_address)
    expect(page.locator("[data-state=empty]")).to_be_visible()
