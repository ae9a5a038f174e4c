"""One rollout: its conversation, its spans over time, its tokens, and its actions."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.training.ledger_records import numbers_of
from agentlightning.types import Span
from tests.adapter.span_maker import spoken_call
from tests.dashboard.browser import no_violations
from tests.dashboard.conftest import OpenView, Serve
from tests.dashboard.facts import ask, records, summaries, the_run, trained_rollout
from tests.dashboard.server import StoreProcess
from tests.dashboard.stores import SPANS, run_async

pytestmark = pytest.mark.dashboard


def test_five_thousand_spans_are_a_tree_of_which_only_what_is_in_view_is_drawn(
    open_view: OpenView, many_spans: tuple[str, str]
) -> None:
    address, rollout_id = many_spans
    page = open_view(f"/rollouts/{rollout_id}?tab=waterfall", address=address)
    tree = page.get_by_role("treegrid", name="Spans")
    expect(tree).to_have_attribute("aria-rowcount", str(SPANS))
    assert page.locator("[data-span]").count() < 100
    expect(page.get_by_text(re.compile(r"9 failed.*some are running"))).to_be_visible()
    tree.focus()
    page.keyboard.press("End")
    last = page.locator("[data-span][aria-selected=true]")
    expect(last).to_contain_text("runs")
    page.keyboard.press("Home")
    page.get_by_role("button", name="Collapse all").click()
    expect(tree).to_have_attribute("aria-rowcount", "1")
    page.get_by_role("button", name="Expand all").click()
    page.get_by_label("Find by name").fill("turn 7")
    expect(tree).to_have_attribute("aria-rowcount", "1")
    expect(page).to_have_url(re.compile("find=turn"))


def test_a_part_of_the_time_is_zoomed_and_left_again(open_view: OpenView, many_spans: tuple[str, str]) -> None:
    address, rollout_id = many_spans
    page = open_view(f"/rollouts/{rollout_id}?tab=waterfall", address=address)
    tree, part = page.get_by_role("treegrid", name="Spans"), page.get_by_test_id("part")
    expect(part).to_have_text("full time range")
    tree.focus()
    page.keyboard.press("+")
    expect(part).to_contain_text(" to ")
    before = part.text_content()
    page.keyboard.press("]")
    expect(part).not_to_have_text(str(before))
    page.get_by_role("button", name="Reset zoom").click()
    expect(part).to_have_text("full time range")


def test_spans_are_chosen_by_kind(open_view: OpenView, store_address: str) -> None:
    page = open_view(f"/rollouts/{trained_rollout(store_address)}?tab=waterfall")
    tree = page.get_by_role("treegrid", name="Spans")
    expect(tree).to_be_visible()
    page.get_by_role("button", name="R reward").click()
    expect(tree).to_have_attribute("aria-rowcount", "1")
    expect(page).to_have_url(re.compile("kind=reward"))


def facts_of_token(page: Page, at: int) -> str:
    """Return the page's facts about a token of the first row."""
    page.locator(f"#token-{at}").first.click()
    return page.get_by_test_id("token-facts").first.text_content() or ""


def test_a_token_shows_what_the_ledger_recorded_of_it(open_view: OpenView, store_address: str) -> None:
    rollout_id = trained_rollout(store_address)
    [record] = [
        record
        for record in records(store_address, the_run(store_address), "ledger", step_from=1, step_to=1)
        if record["name"] == rollout_id
    ]
    row = record["data"]["rows"][0]
    numbers = numbers_of(row)
    page = open_view(f"/rollouts/{rollout_id}?tab=tokens")
    expect(page.locator(".agl-coloured").first).to_be_visible()
    trained = [place for place, flag in enumerate(numbers["mask"]) if flag]
    for number in (0, len(trained) - 1):
        facts = facts_of_token(page, trained[number]).replace("−", "-")
        assert f"id {numbers['tokens'][trained[number]]}" in facts
        for name, label in (("engine_logprobs", "engine"), ("entropy", "entropy"), ("ratio", "ratio")):
            match = re.search(rf"{label}[^·]*? (-?\d[\d.e-]*)", facts)
            assert match is not None, (label, facts)
            assert float(match[1]) == pytest.approx(numbers[name][number], rel=2e-3, abs=2e-4)
            assert math.isfinite(float(match[1]))
    first = numbers["mask"].index(0)
    assert "not trained" in facts_of_token(page, first)


def test_every_colouring_has_its_legend_and_stands_in_the_address(open_view: OpenView, store_address: str) -> None:
    page = open_view(f"/rollouts/{trained_rollout(store_address)}?tab=tokens")
    choice = page.get_by_role("combobox", name="Colour tokens by")
    choice.click()
    names = page.get_by_role("option").filter(visible=True).all_text_contents()
    names = [name for name in names if name and not name.startswith("<")]
    page.keyboard.press("Escape")
    for word in ("Log-probability", "Entropy", "Advantage", "Ratio", "Clip"):
        assert any(word.lower() in name.lower() for name in names), (word, names[:12])
    choice.click()
    page.get_by_role("option", name="Entropy").click()
    expect(page).to_have_url(re.compile("colour=entropy"))


def test_a_rollout_is_queued_again_only_after_a_question_and_then_claimed(
    open_view: OpenView, demo_server: StoreProcess
) -> None:
    rollout = summaries(demo_server.address, mode_in=["train"], page_limit=1)["items"][0]
    page = open_view(f"/rollouts/{rollout['rollout_id']}", address=demo_server.address)
    expect(page.get_by_role("button", name="Cancel…")).to_be_disabled()
    page.get_by_role("button", name="Retry…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Retry this rollout?")
    dialog.get_by_role("button", name="Retry the rollout").click()
    expect(dialog).to_be_hidden()
    claimed = ask(demo_server.address, "/queues/rollouts/dequeue", {"limit": 1, "run_id": rollout["run_id"]})
    assert [claim["rollout_id"] for claim in claimed] == [rollout["rollout_id"]]
    expect(page.get_by_role("tab", name="Attempts (2)")).to_be_visible(timeout=10_000)
    page.get_by_role("button", name="Cancel…").click()
    dialog.get_by_role("button", name="Cancel the rollout").click()
    expect(dialog).to_be_hidden()  # its text has the same word
    expect(page.get_by_text("cancelled").first).to_be_visible(timeout=10_000)
    assert ask(demo_server.address, f"/rollouts/{rollout['rollout_id']}")["status"] == "cancelled"


def test_a_bar_stands_where_the_answer_of_a_call_begins_and_kl_colours_the_tokens(
    open_view: OpenView, store_address: str
) -> None:
    rollout_id = trained_rollout(store_address)
    page = open_view(f"/rollouts/{rollout_id}?tab=tokens&colour=kl", address=store_address)
    row = page.locator("[data-row]").first
    expect(row.locator("[data-call]").first).to_be_visible()
    record = ask(store_address, f"/runs/{the_run(store_address)}/records?kind_in=ledger&name={rollout_id}")["items"][
        -1
    ]["data"]
    number = int(row.get_attribute("data-row") or "-1")
    calls = [place + 1 for place, call in enumerate(record["calls"]) if call["row"] == number]
    call_numbers = [int(each.get_attribute("data-call") or "0") for each in row.locator("[data-call]").all()]
    assert call_numbers == calls
    expect(row.get_by_test_id("row-figures")).to_be_visible()


def test_a_conversation_of_many_calls_is_drawn_page_by_page_and_its_first_calls_come_first(
    open_view: OpenView, serve: Serve, tmp_path: Path
) -> None:
    turns = 230

    async def make() -> str:
        store = SQLiteLightningStore(tmp_path / "long.db", synchronous="NORMAL")
        rollout = await store.start_rollout({"question": "a long task"}, mode="train")
        place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        messages, spans = [{"role": "user", "content": "begin"}], list[Span]()
        for turn in range(turns):
            spans += spoken_call(f"c{turn}", turn + 1, [turn], [1], messages, f"answer {turn}")
            messages = [
                *messages,
                {"role": "assistant", "content": f"answer {turn}"},
                {"role": "user", "content": f"result {turn}"},
            ]
        await store.add_many_spans([each.model_copy(update=place) for each in spans])
        await store.update_attempt(
            rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", outcome="scored", reward=1.0
        )
        await store.close()
        return rollout.rollout_id

    rollout_id = run_async(make)
    address = serve(tmp_path / "long.db").address
    page = open_view(f"/rollouts/{rollout_id}", address=address)
    expect(page.locator("[data-whole=true]")).to_have_text(f"Calls 1 to 50 of {turns}")
    expect(page.locator("[data-call]")).to_have_count(50)
    expect(page.locator("[data-call=c0]")).to_contain_text("answer 0")
    expect(page.get_by_text("training reads rewards from spans. The reward of 1 was set")).to_be_visible()
    page.get_by_role("button", name="5", exact=True).first.click()
    expect(page.locator("[data-call]")).to_have_count(turns % 50)
    expect(page.locator(f"[data-call=c{turns - 1}]")).to_contain_text(f"result {turns - 2}")
    expect(page).to_have_url(re.compile("calls=5"))
    no_violations(page)


def test_a_rollout_for_evaluation_is_not_shown_as_left_out_of_training(open_view: OpenView, store_address: str) -> None:
    [row] = summaries(store_address, mode_in=["val"], page_limit=1)["items"]
    page = open_view(f"/rollouts/{row['rollout_id']}", address=store_address)
    text = "Nothing of this rollout is trained: it is for evaluation (mode val)."
    expect(page.get_by_text(text)).to_be_visible()
    expect(page.get_by_text("token ids recorded").first).to_be_visible()
    expect(page.get_by_text("not trained:")).to_have_count(0)
    page.get_by_role("tab", name="Tokens").click()
    expect(page.get_by_text(text)).to_be_visible()
