"""The tokens of a rollout: the parts of a row, the begins of rows, parts of characters, and the colours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.training.ledger_records import pack
from agentlightning.types import RunRecord
from tests.adapter.span_maker import reward, spoken_call
from tests.dashboard.browser import no_violations, nothing_cut_off
from tests.dashboard.conftest import OpenView, Serve
from tests.dashboard.facts import ask, records, the_run
from tests.dashboard.stores import run_async

pytestmark = pytest.mark.dashboard
TEXTS = ["<pad>", "What", " is it?", "\\xf0\\x9f", "\\x99\\x82", "A\u202eB", " seven"]
ASKED: dict[str, Any] = {"role": "user", "content": "What is it?"}


def _row(number: int, tokens: list[int], mask: list[int], kl: list[float]) -> dict[str, Any]:
    trained = sum(mask)
    figures = {
        "engine_logprobs": [-0.5] * trained,
        "trainer_logprobs": [-0.5 + 0.25 * place for place in range(trained)],
        "kl": kl,
    }
    packed = {name: pack(values, "f32") for name, values in figures.items()}
    parts = {"tokens": pack(tokens, "i32"), "mask": pack(mask, "u8")}
    return {"row": number, "vocabulary": "texts", "length": len(tokens), **parts, **packed}


@pytest.fixture
def two_rows(tmp_path: Path, serve: Serve) -> tuple[str, str]:
    """A server with a rollout of two calls; the second one's prompt has other tokens than the first call's answer."""

    async def make() -> str:
        store = SQLiteLightningStore(tmp_path / "tokens.db")
        await store.start_run("run", algorithm="GRPO")
        await store.add_vocabulary("texts", TEXTS)
        rollout = await store.start_rollout("What is it?", mode="train", run_id="run", metadata={"step": 1, "task": 0})
        place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        answer = {"role": "assistant", "content": "🙂"}
        spans = [
            *spoken_call("c1", 1, [1, 2], [3, 4], [ASKED], "🙂"),
            *spoken_call("c2", 3, [1, 2, 5, 1, 2], [6], [ASKED, answer, ASKED], " seven"),
            reward("r", None, 9.0, 1.0, sequence_id=8),
        ]
        await store.add_many_spans([each.model_copy(update=place) for each in spans])
        await store.update_attempt(rollout.rollout_id, place["attempt_id"], status="succeeded", outcome="scored")
        common = {"attempt_id": place["attempt_id"], "ending": "trained", "reason": None, "advantage": 1.0}
        calls = [
            {**common, "call_id": "c1", "row": 4, "tokens": 2, "weight_version": 7},
            {**common, "call_id": "c2", "row": 5, "tokens": 1, "weight_version": 8},
        ]
        rows = [_row(4, [1, 2, 3, 4], [0, 0, 1, 1], [0.0, 0.5]), _row(5, [1, 2, 5, 1, 2, 6], [0] * 5 + [1], [0.125])]
        data = {**place, "reward": 1.0, "outcome": "scored", "verdict": None, "group": 0, "advantage": 1.0}
        entry = {**data, "weight_versions": [7, 8], "calls": calls, "rows": rows}
        await store.add_run_records("run", [RunRecord(kind="ledger", step=1, name=rollout.rollout_id, data=entry)])
        await store.close()
        return rollout.rollout_id

    rollout_id = run_async(make)
    return serve(tmp_path / "tokens.db").address, rollout_id


def facts_of(page: Page, row: int, at: int) -> str:
    """Return the page's facts about a token below the pointer."""
    section = page.locator(f"[data-row='{row}']")
    section.locator(f"#token-{at}").hover()
    facts = section.get_by_test_id("token-facts")
    expect(facts).to_contain_text(f"token {at} of row {row}")
    return facts.inner_text()


def test_each_row_says_with_which_call_it_began_and_why(open_view: OpenView, two_rows: tuple[str, str]) -> None:
    address, rollout_id = two_rows
    explanation = ask(address, f"/rollouts/{rollout_id}/explanation")
    page = open_view(f"/rollouts/{rollout_id}?tab=tokens", address=address)
    for row, call in ((4, explanation["calls"][0]), (5, explanation["calls"][1])):
        assert call["begins"], "each call begins a row of its own"
        expect(page.locator(f"[data-row='{row}']")).to_contain_text(
            f"starts with call {call['number']}: {call['begins'].replace('_', ' ')}"
        )
    assert explanation["notes"], "the tokens part between the calls"
    expect(page.get_by_role("region", name="Reasons for new rows")).to_contain_text(
        explanation["notes"][0].splitlines()[0][:40]
    )


def test_a_part_of_a_character_shows_its_bytes_and_no_text_turns_its_neighbours(
    open_view: OpenView, two_rows: tuple[str, str]
) -> None:
    address, rollout_id = two_rows
    page = open_view(f"/rollouts/{rollout_id}?tab=tokens", address=address)
    expect(page.locator("[data-row='4'] .agl-partial")).to_have_text(["\\xf0\\x9f", "\\x99\\x82"])
    expect(page.locator("[data-row='4']")).to_contain_text("2 tokens with part of a character")
    assert "part of a character" in facts_of(page, 4, 2)
    expect(page.locator("[data-row='5'] .agl-partial")).to_have_count(0)
    expect(page.locator("[data-row='5'] #token-2")).to_have_text("A⟨U+202E⟩B")


def test_engine_and_trainer_stand_side_by_side_with_their_difference(
    open_view: OpenView, two_rows: tuple[str, str]
) -> None:
    address, rollout_id = two_rows
    page = open_view(f"/rollouts/{rollout_id}?tab=tokens&colour=difference", address=address)
    facts = facts_of(page, 4, 3).replace("−", "-")
    for fact in ("(engine) -0.5", "(trainer) -0.25", "trainer - engine 0.25", "reply of call 1", "weights 7"):
        assert fact in facts, (fact, facts)
    assert "reply of call 2" in facts_of(page, 5, 5)
    colours = [
        page.locator(f"[data-row='4'] #token-{at}").evaluate("each => getComputedStyle(each).backgroundColor")
        for at in (2, 3)
    ]
    assert colours[0] != colours[1]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tokens_are_coloured_by_their_divergence_from_the_reference(
    open_view: OpenView, two_rows: tuple[str, str], theme: str
) -> None:
    address, rollout_id = two_rows
    page = open_view(f"/rollouts/{rollout_id}?tab=tokens", address=address, theme=theme, width=400)
    page.get_by_role("combobox", name="Colour tokens by").click()
    page.get_by_role("option", name="KL to the reference").click()
    expect(page).to_have_url(re.compile("colour=kl"))
    figures = page.locator("[data-row='4']").get_by_test_id("row-figures")
    expect(figures).to_contain_text("mean 0.25")
    expect(figures).to_contain_text("0 to 0.5")
    assert "KL to the reference 0.5" in facts_of(page, 4, 3)
    nothing_cut_off(page)
    no_violations(page)


def test_a_row_of_several_calls_says_where_each_answer_begins(open_view: OpenView, store_address: str) -> None:
    entries = records(store_address, the_run(store_address), "ledger", step_from=1, step_to=1)
    record = next(each for each in entries if each["data"].get("rows") and len(each["data"]["calls"]) == 2)
    page = open_view(f"/rollouts/{record['name']}?tab=tokens")
    row = record["data"]["rows"][0]["row"]
    parts = page.locator(f"[data-row='{row}'] [data-part]")
    expect(parts).to_have_text(["prompt", "reply 1", "prompt", "reply 2"])
    page.get_by_role("listbox").first.focus()
    page.keyboard.press("End")
    expect(page.get_by_test_id("token-facts").first).to_contain_text("reply of call 2")
