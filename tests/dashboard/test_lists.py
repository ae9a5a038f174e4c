"""The list of rollouts in detail: each filter, each head of a column, the columns chosen, the file that is written, and
the way from one rollout of the list to the next."""

from __future__ import annotations

import csv
import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import OpenView
from tests.dashboard.facts import ask, summaries, the_run
from tests.dashboard.server import StoreProcess

pytestmark = pytest.mark.dashboard


def total_of(page: Page, total: int) -> None:
    """Wait until the list says how many there are."""
    expect(page.locator("[data-total]")).to_have_attribute("data-total", str(total))


@pytest.mark.parametrize(
    ("search", "chosen"),
    [
        ("status=succeeded", {"status_in": ["succeeded"]}),
        ("status=failed,cancelled", {"status_in": ["failed", "cancelled"]}),
        ("mode=val", {"mode_in": ["val"]}),
        ("outcome=scored", {"outcome_in": ["scored"]}),
        ("outcome=infrastructure_fault", {"outcome_in": ["infrastructure_fault"]}),
        ("step_from=2", {"step_from": 2}),
        ("step_to=1", {"step_to": 1}),
        ("reward_from=0.5", {"reward_from": 0.5}),
        ("reward_to=0.5", {"reward_to": 0.5}),
        ("resources=rs-none", {"resources_id": "rs-none"}),
        ("text=apples", {"input_contains": "apples"}),
        ("task=3&mode=train&step_from=1&step_to=1", {"task": 3, "mode_in": ["train"], "step_from": 1, "step_to": 1}),
    ],
)
def test_each_filter_of_the_address_is_asked_of_the_server(
    open_view: OpenView, store_address: str, search: str, chosen: dict[str, Any]
) -> None:
    page = open_view(f"/rollouts?{search}", address=store_address)
    total_of(page, summaries(store_address, **chosen)["total"])


def test_worker_version_and_run_are_filters_too(open_view: OpenView, store_address: str) -> None:
    row = summaries(store_address, page_limit=1)["items"][0]
    for search, chosen in (
        (f"worker={row['worker_id']}", {"worker_id": row["worker_id"]}),
        (
            f"resources={row['resources_id']}&version={row['resources_version']}",
            {"resources_id": row["resources_id"], "resources_version": row["resources_version"]},
        ),
        (f"run={the_run(store_address)}", {"run_id": the_run(store_address)}),
        (f"id={row['rollout_id'][4:]}", {"rollout_id_contains": row["rollout_id"][4:]}),
    ):
        page = open_view(f"/rollouts?{search}", address=store_address)
        total_of(page, summaries(store_address, **chosen)["total"])


def test_what_is_typed_and_chosen_is_in_the_address(open_view: OpenView, store_address: str) -> None:
    page = open_view("/rollouts", address=store_address)
    page.get_by_label("Input contains").fill("apples")
    expect(page).to_have_url(re.compile(r"text=apples"))
    page.get_by_label("step from", exact=True).fill("2")
    expect(page).to_have_url(re.compile(r"step_from=2"))
    page.get_by_label("Mode", exact=True).first.focus()
    page.keyboard.press("ArrowDown")
    page.get_by_role("option", name="train").click()
    expect(page).to_have_url(re.compile(r"mode=train"))
    total_of(page, summaries(store_address, input_contains="apples", step_from=2, mode_in=["train"])["total"])
    page.reload()
    expect(page.get_by_label("Input contains")).to_have_value("apples")
    page.get_by_role("button", name="Clear 3 filters").click()
    total_of(page, 1408)


@pytest.mark.parametrize("head", ["Status", "Reward", "Step", "Started", "Duration"])
def test_a_click_on_the_head_of_a_column_sorts_by_it_and_a_second_one_turns_it(
    open_view: OpenView, store_address: str, head: str
) -> None:
    page = open_view("/rollouts?sort=attempts", address=store_address)
    total_of(page, 1408)
    column = page.get_by_role("columnheader", name=head)
    for direction, order in (("descending", "desc"), ("ascending", "asc")):
        column.get_by_role("button").click()
        expect(column).to_have_attribute("aria-sort", direction)
        [sort] = re.findall(r"sort=(\w+)", page.url)
        first_row = summaries(store_address, page_sort_by=sort, page_sort_order=order, page_limit=1)["items"][0]
        expect(page.locator("[data-index='0']")).to_have_attribute("data-rollout", first_row["rollout_id"])


def test_the_columns_that_are_chosen_stay_chosen(open_view: OpenView, store_address: str) -> None:
    page = open_view("/rollouts", address=store_address)
    page.get_by_role("button", name="Choose columns").click()
    page.get_by_role("menuitemcheckbox", name="Worker").click()
    page.get_by_role("menuitemcheckbox", name="Input").click()
    page.keyboard.press("Escape")
    for _ in range(2):
        expect(page.get_by_role("columnheader", name="Worker")).to_be_visible()
        expect(page.get_by_role("columnheader", name="Input")).to_have_count(0)
        page.reload()


@pytest.mark.parametrize(("form", "button"), [("csv", "Export CSV"), ("jsonl", "Export JSON Lines")])
def test_what_passes_the_filter_is_written_into_a_file(
    open_view: OpenView, store_address: str, tmp_path: Path, form: str, button: str
) -> None:
    page = open_view("/rollouts?mode=train&columns=id,reward,input,start", address=store_address)
    items = summaries(store_address, mode_in=["train"], page_limit=1000)["items"]
    total_of(page, len(items))
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    download.value.save_as(tmp_path / "file")
    text = (tmp_path / "file").read_text(encoding="utf-8")
    if form == "csv":
        rows = list(csv.DictReader(text.splitlines()))
        assert [row["Rollout"] for row in rows] == [each["rollout_id"] for each in items]
        assert set(rows[0]) == {"Rollout", "Reward", "Input", "Started"}
        times = [datetime.fromisoformat(row["Started"]) for row in rows]
        assert [time.utcoffset() for time in times] == [timedelta(0)] * len(rows)
        assert [time.timestamp() for time in times] == pytest.approx([each["start_time"] for each in items], abs=0.002)
    else:
        assert [json.loads(line)["rollout_id"] for line in text.splitlines()] == [each["rollout_id"] for each in items]
    expect(page.get_by_text(f"{len(items)} rollouts exported")).to_be_visible()


def test_from_a_rollout_to_the_next_one_of_its_list_and_back(open_view: OpenView, store_address: str) -> None:
    search = "mode=train&step_from=2&step_to=2&sort=reward&order=desc"
    page = open_view(f"/rollouts?{search}", address=store_address)
    filters = {"mode_in": ["train"], "step_from": 2, "step_to": 2}
    rows = summaries(store_address, **filters, page_sort_by="reward", page_sort_order="desc", page_limit=3)
    first, second, third = (row["rollout_id"] for row in rows["items"])
    page.locator(f"[data-rollout='{first}'] a").click()
    expect(page.get_by_role("heading", name=first)).to_be_visible()
    expect(page.locator("[data-place='0']")).to_contain_text(f"1 of {rows['total']}")
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()
    page.get_by_role("tab", name="Waterfall").click()
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_role("heading", name=second)).to_be_visible()
    expect(page.get_by_role("tab", name="Waterfall")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("j")
    expect(page.get_by_role("heading", name=third)).to_be_visible()
    page.keyboard.press("k")
    expect(page.get_by_role("heading", name=second)).to_be_visible()
    page.get_by_role("link", name="Back to the list").click()
    total_of(page, rows["total"])
    expect(page.locator("[data-index='0']")).to_have_attribute("data-rollout", first)


def test_a_rollout_that_is_opened_by_itself_has_no_list(open_view: OpenView, store_address: str) -> None:
    rollout_id = summaries(store_address, page_limit=1)["items"][0]["rollout_id"]
    page = open_view(f"/rollouts/{rollout_id}", address=store_address)
    expect(page.get_by_role("heading", name=rollout_id)).to_be_visible()
    expect(page.get_by_role("navigation", name="Rollouts of the list")).to_have_count(0)


def test_a_rollout_that_left_its_list_says_so(open_view: OpenView, demo_server: StoreProcess) -> None:
    address = demo_server.address
    [made] = ask(address, "/queues/rollouts/enqueue", {"rollouts": [{"input": "to cancel"}]})
    page = open_view(f"/rollouts/{made['rollout_id']}?list=status%3Dqueuing&at=0", address=address)
    expect(page.locator("[data-place='0']")).to_contain_text("1 of 1")
    ask(address, f"/rollouts/{made['rollout_id']}", {"status": "cancelled"})
    expect(page.get_by_text("This rollout is no longer in the list")).to_be_visible(timeout=10_000)
