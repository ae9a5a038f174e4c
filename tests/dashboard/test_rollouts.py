"""The list of rollouts, over 100,000 of them: drawing, filters, sorting and opening by keys."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.dashboard.conftest import OpenView
from tests.dashboard.facts import ask
from tests.dashboard.server import StoreProcess
from tests.dashboard.stores import MANY

pytestmark = pytest.mark.dashboard


def test_a_hundred_thousand_rows_are_counted_and_only_those_in_view_are_drawn(
    open_view: OpenView, many_address: str
) -> None:
    page = open_view("/rollouts?sort=start_time&order=asc", address=many_address)
    expect(page.locator("[data-total]")).to_have_text(f"{MANY:,} rollouts")
    page.locator(".agl-grid").evaluate("grid => { grid.scrollTop = grid.scrollHeight; }")
    expect(page.locator(f"[data-index='{MANY - 1}'][data-rollout]")).to_be_visible()
    assert page.locator("[data-index]").count() < 100


def test_a_filter_of_the_address_is_the_server_s(open_view: OpenView, many_address: str) -> None:
    page = open_view("/rollouts?step_from=100&step_to=100&id=ro-many", address=many_address)
    expect(page.locator("[data-total]")).to_have_text("400 rollouts")
    page.get_by_role("button", name="Clear 3 filters").click()
    expect(page.locator("[data-total]")).to_have_text(f"{MANY:,} rollouts")


def test_keys_move_through_the_list_and_open_a_rollout(open_view: OpenView, many_address: str) -> None:
    page = open_view("/rollouts?sort=step&order=desc", address=many_address)
    expect(page.locator("[data-index='2'][data-rollout]")).to_be_visible()
    for key in ("j", "j", "k"):
        page.keyboard.press(key)
    chosen = page.locator("[data-index][aria-selected=true]")
    expect(chosen).to_have_attribute("data-index", "1")
    rollout_id = chosen.get_attribute("data-rollout")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/rollouts/{rollout_id}"))


def test_the_list_stands_still_under_who_reads(open_view: OpenView, demo_server: StoreProcess) -> None:
    page = open_view("/rollouts", address=demo_server.address)
    expect(page.locator("[data-total='1408']")).to_be_visible()
    for _ in range(3):
        page.keyboard.press("j")
    chosen = page.locator("[data-index][aria-selected=true]")
    expect(chosen).to_have_attribute("data-index", "3")
    rollout_id = chosen.get_attribute("data-rollout")
    for number in range(2):
        ask(demo_server.address, "/queues/rollouts/enqueue", {"rollouts": [{"input": f"new {number}"}]})
    expect(page.locator("[data-new='2']")).to_be_visible(timeout=10_000)
    expect(chosen).to_have_attribute("data-rollout", str(rollout_id))
    expect(page.locator("[data-total='1408']")).to_be_visible()
    page.get_by_role("button", name="2 new").click()
    expect(page.locator("[data-total='1410']")).to_be_visible()
    expect(page.locator("[data-index='0']")).to_contain_text("new 1")
