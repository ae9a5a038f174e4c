"""The frame of the page: its views by link, live state, keyboard, narrow windows, both themes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.dashboard.browser import everything_loaded, no_violations, nothing_cut_off
from tests.dashboard.conftest import OpenView
from tests.dashboard.facts import summaries, the_run, trained_rollout
from tests.dashboard.server import ROOT, StoreProcess

pytestmark = pytest.mark.dashboard
SCRIPTS = ROOT / "agentlightning" / "dashboard" / "static" / "assets"
VIEWS = ("/runs", "/rollouts", "/compare", "/resources", "/workers", "/settings")
VIEWS_OF_A_RUN = (
    *("/runs/RUN", "/runs/RUN?tab=settings", "/runs/RUN/steps/1/groups/0", "/compare?before=RUN%3A0&after=RUN%3A3"),
)
TABS = ("conversation", "waterfall", "tokens", "attempts", "details")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", [*VIEWS, *VIEWS_OF_A_RUN, *(f"/rollouts/ROLLOUT?tab={tab}" for tab in TABS)])
def test_axe_finds_nothing_and_nothing_is_cut_off(
    open_view: OpenView, store_address: str, view: str, theme: str
) -> None:
    for word, find in (("RUN", the_run), ("ROLLOUT", trained_rollout)):
        view = re.sub(rf"\b{word}\b", find(store_address), view) if word in view else view
    page = open_view(view, theme=theme, width=400)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    everything_loaded(page)
    nothing_cut_off(page)
    no_violations(page)


def test_the_page_follows_the_store_and_goes_everywhere_by_keyboard(open_view: OpenView) -> None:
    page = open_view("/runs")
    expect(page.locator("[data-connection=live]")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    for name in ("Rollouts", "Compare", "Resources", "Workers", "Settings", "Runs"):
        page.get_by_role("navigation", name="Views").get_by_role("link", name=name, exact=True).focus()
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(f"#/{name.lower()}"))
        expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_the_page_goes_on_without_its_server(open_view: OpenView, demo_server: StoreProcess) -> None:
    rollout_id = summaries(demo_server.address, page_limit=1)["items"][0]["rollout_id"]
    page = open_view("/runs", address=demo_server.address, may_fail=True)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    page.wait_for_function(
        "(all) => performance.getEntriesByType('resource').filter(each => /\\.js$/.test(each.name)).length >= all",
        arg=len(list(SCRIPTS.glob("*.js"))),
    )
    demo_server.kill()
    expect(page.locator("[data-state=offline]")).to_contain_text("no response from the server")
    expect(page.locator("tbody [data-run]")).to_have_count(1)
    for name in ("Rollouts", "Compare", "Resources", "Workers", "Settings", "Runs"):
        page.get_by_role("navigation", name="Views").get_by_role("link", name=name, exact=True).click()
        expect(page.get_by_role("heading", level=1, name=name)).to_be_visible()
    page.evaluate(f"location.hash = '#/rollouts/{rollout_id}?tab=waterfall'")
    expect(page.locator("main [data-state=error]")).to_contain_text("No response from the server")
    assert page.url.startswith(demo_server.address)
    demo_server.start()
    expect(page.locator("[data-connection=live]")).to_be_visible(timeout=30_000)
    expect(page.get_by_role("treegrid", name="Spans")).to_be_visible()
