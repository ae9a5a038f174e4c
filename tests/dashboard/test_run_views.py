"""Runs, one run, a group of rollouts, a comparison: each agrees with the store, and its links work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import RunRecord
from tests.dashboard.browser import everything_loaded
from tests.dashboard.conftest import OpenView, Serve
from tests.dashboard.facts import ask, records, summaries, the_run
from tests.dashboard.server import ROOT
from tests.dashboard.stores import run_async
from tests.stubs.processes import Terminal

pytestmark = pytest.mark.dashboard


def rows_of(page: Page, chart: str) -> dict[str, list[str]]:
    """Return the values of a chart's table by series, as they stand at one moment."""
    cells: list[list[str]] = page.locator(f'[data-chart="{chart}"] table:not(.u-legend)').evaluate(
        "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return {name: [row[place] for row in cells[1:]] for place, name in enumerate(cells[0])}


def loaded(page: Page) -> Page:
    """Return the overview of a run when all of it is there."""
    expect(page.locator("[data-verdict]")).to_be_visible()
    everything_loaded(page)
    return page


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_listed_with_its_state_verdict_curve_and_duration(open_view: OpenView, store_address: str) -> None:
    page, run_id = open_view("/runs"), the_run(store_address)
    row = page.locator("tbody tr", has_text=run_id)
    expect(row.get_by_text("succeeded")).to_be_visible()
    expect(row.locator("svg")).to_be_visible()
    expect(row).to_contain_text(re.compile(r"\d+(\.\d)? (s|min)"))
    row.get_by_role("link", name=run_id).click()
    expect(page.get_by_role("heading", level=1, name=run_id)).to_be_visible()


def test_a_run_is_stopped_only_after_a_question(open_view: OpenView, tmp_path: Path, serve: Serve) -> None:
    server = serve(tmp_path / "runs.db")
    ask(server.address, "/runs/run-1/start", {"algorithm": "GRPO"})
    page = open_view("/runs", address=server.address)
    page.get_by_role("button", name="Actions for run-1").click()
    page.get_by_role("menuitem", name="Stop").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    assert ask(server.address, "/runs/run-1")["stop_reason"] is None
    dialog.get_by_role("button", name=re.compile("stop", re.IGNORECASE)).last.click()
    expect(dialog).to_be_hidden()
    assert ask(server.address, "/runs/run-1")["stop_reason"]


def test_a_thousand_runs_are_listed(open_view: OpenView, tmp_path: Path, serve: Serve) -> None:
    async def make() -> None:
        store = SQLiteLightningStore(tmp_path / "many-runs.db", synchronous="NORMAL")
        for number in range(1000):
            await store.start_run(f"run-{number:04}", algorithm="GRPO")
        await store.close()

    run_async(make)
    page = open_view("/runs", address=serve(tmp_path / "many-runs.db").address)
    expect(page.get_by_text("1,000 runs")).to_be_visible(timeout=20_000)
    expect(page.locator("tbody tr", has_text="run-0").first).to_be_visible()


# --- one run ---------------------------------------------------------------------------------------------------------


def test_the_curves_of_a_run_are_those_of_its_rollouts_and_evaluations(open_view: OpenView, store_address: str) -> None:
    run_id = the_run(store_address)
    page = loaded(open_view(f"/runs/{run_id}"))
    rewards = page.locator('[data-chart^="Reward by step"]')
    expect(rewards).to_be_visible()
    shown = rows_of(page, "Reward by step, with 95 % intervals")
    groups = ask(
        store_address, "/rollouts/aggregate", {"by": "step", "filter": {"run_id": run_id, "mode_in": ["train"]}}
    )
    means = {str(group["key"]): group["mean"] for group in groups["groups"]}
    train = dict(zip(shown["step"], shown["training rollouts"], strict=True))
    assert {step: float(value) for step, value in train.items() if value != "–"} == pytest.approx(means, abs=1e-3)
    for name in ("held_out_sampled", "held_out_greedy"):
        recorded_values = {
            str(r["step"]): r["data"]["value"]
            for r in records(store_address, run_id, "evaluation")
            if r["name"] == name
        }
        drawn = dict(zip(shown["step"], shown[name.replace("_", " ")], strict=True))
        assert {step: float(value) for step, value in drawn.items() if value != "–"} == pytest.approx(
            recorded_values, abs=1e-3
        )


def test_the_verdict_has_its_p_value_and_leads_to_the_tasks(open_view: OpenView, store_address: str) -> None:
    page = open_view(f"/runs/{the_run(store_address)}")
    verdict = page.locator("[data-verdict]")
    expect(verdict).to_contain_text("better than at the start")
    expect(verdict).to_contain_text(re.compile(r"p [<=≈] ?0\.\d+"))
    verdict.get_by_role("link", name="Compare by task").click()
    expect(page.get_by_role("table", name="Tasks")).to_be_visible()


def test_the_ledger_s_bars_are_the_ledger_s_records_and_add_up(open_view: OpenView, store_address: str) -> None:
    run_id = the_run(store_address)
    page = loaded(open_view(f"/runs/{run_id}"))
    expect(page.get_by_test_id("ledger-sum")).to_contain_text("✓")
    shown = rows_of(page, "Model calls by outcome")
    for place, step in enumerate(shown["step"]):
        endings: dict[str, int] = {}
        for record in records(store_address, run_id, "ledger", step_from=int(step), step_to=int(step)):
            for call in record["data"]["calls"]:
                name = "trained" if call["ending"] == "trained" else call["reason"].replace("_", " ")
                endings[name] = endings.get(name, 0) + 1
        drawn = {name: int(cells[place].split()[0]) for name, cells in shown.items() if name != "step"}
        assert {name: number for name, number in drawn.items() if number} == endings


def test_every_figure_of_a_step_has_its_chart_and_unit(open_view: OpenView, store_address: str) -> None:
    page = loaded(open_view(f"/runs/{the_run(store_address)}"))
    charts = " ".join(page.locator("figcaption").all_text_contents()).lower()
    for word in ("step time", "entropy", "kl", "clip", "drift", "tokens"):
        assert word in charts, word
    assert all(cell.endswith(" s") or cell == "–" for cell in rows_of(page, "Step time by phase")["generate"])


def test_an_asynchronous_run_shows_its_groups_in_flight_and_their_age(
    open_view: OpenView, store_address: str, tmp_path: Path, serve: Serve
) -> None:
    drawn = {
        "Groups in progress at the start of a step": ("in_flight", ["4", "3", "4"], "groups"),
        "Wait for the groups of a step": ("waited_seconds", ["1.5", "0.25", "2"], "s"),
        "Mean age of trained calls": ("mean_staleness", ["0", "0.5", "0.75"], "weight versions"),
        "Maximum age of trained calls": ("max_staleness", ["0", "1", "2"], "weight versions"),
        "Dropped stale groups": ("dropped_groups", ["0", "0", "3"], "groups"),
    }

    async def make() -> None:
        store = SQLiteLightningStore(tmp_path / "flight.db", synchronous="NORMAL")
        await store.start_run("flight", algorithm="GRPO")
        for step in (1, 2, 3):
            flight = {name: float(values[step - 1]) for name, values, _ in drawn.values()}
            data = {"step": step, "flight": {**flight, "taken": [[step, 0, 0]], "dropped": []}}
            await store.add_run_records("flight", [RunRecord(kind="step", step=step, data=data)])
        await store.close()

    run_async(make)
    page = open_view("/runs/flight", address=serve(tmp_path / "flight.db").address)
    for title, (_, values, unit) in drawn.items():
        expect(page.locator(f'[data-chart="{title}"]')).to_be_visible()
        figures = [value.removesuffix(f" {unit}") for value in rows_of(page, title)[title]]
        assert [float(value) for value in figures] == [float(value) for value in values], title
        expect(page.locator(f'[data-chart="{title}"]')).to_contain_text(unit)
    page = loaded(open_view(f"/runs/{the_run(store_address)}"))
    for title in drawn:
        expect(page.locator(f'[data-chart="{title}"]')).to_have_count(0)


def test_a_click_on_a_step_opens_its_rollouts_and_so_does_the_keyboard(open_view: OpenView, store_address: str) -> None:
    run_id = the_run(store_address)
    page = loaded(open_view(f"/runs/{run_id}"))
    plot = page.locator('[data-chart="Model calls by outcome"] .u-over')
    plot.hover()  # in its middle, as the click; a chart that is drawn anew meanwhile is looked for again
    plot.click()
    expect(page).to_have_url(re.compile(r"#/rollouts\?.*step_from=2"))
    expect(page.locator("[data-total='128']")).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="3", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("step_from=3"))


def _long_run(path: Path, steps: int) -> None:
    async def make() -> None:
        store = SQLiteLightningStore(path, synchronous="NORMAL")
        await store.start_run("long", algorithm="GRPO")
        made = [
            RunRecord(
                kind="step",
                step=step,
                data={
                    "step": step,
                    "mean_reward": step / steps,
                    "calls_captured": 10,
                    "calls_trained": 8,
                    "calls_excluded": {"equal_rewards": 2},
                    "seconds": {"generate": 1.0, "train": 0.5},
                    "update": {"entropy": 1.0 - step / steps},
                },
            )
            for step in range(1, steps + 1)
        ]
        for start in range(0, steps, 1000):
            await store.add_run_records("long", made[start : start + 1000])
        alarm = {"text": "the entropy fell", "state": "raised", "since": 40, "what_to_try": "less learning_rate"}
        await store.add_run_records("long", [RunRecord(kind="alarm", step=40, name="entropy_collapse", data=alarm)])
        await store.close()

    run_async(make)


def test_ten_thousand_steps_stay_smooth(open_view: OpenView, tmp_path: Path, serve: Serve) -> None:
    _long_run(tmp_path / "long.db", 10_000)
    page = open_view("/runs/long", address=serve(tmp_path / "long.db").address)
    expect(page.locator('[data-chart="Model calls by outcome"] canvas')).to_be_visible(timeout=60_000)
    expect(page.get_by_test_id("ledger-sum")).to_contain_text("100,000 calls captured")
    assert page.locator("table tbody tr").count() < 5000, "the tables for screen readers are thinned"
    page.mouse.wheel(0, 4000)
    assert page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")


def test_an_alarm_that_lasts_stands_above_with_what_to_try(open_view: OpenView, tmp_path: Path, serve: Serve) -> None:
    _long_run(tmp_path / "alarm.db", 60)
    page = open_view("/runs/long", address=serve(tmp_path / "alarm.db").address)
    alarms = page.get_by_test_id("alarms")
    expect(alarms).to_contain_text("Step 40 onward: entropy collapse. the entropy fell")
    expect(alarms).to_contain_text("Try: less learning_rate")


def test_a_run_without_steps_says_so_and_one_that_failed_shows_its_error(
    open_view: OpenView, tmp_path: Path, serve: Serve
) -> None:
    server = serve(tmp_path / "failed.db")
    ask(server.address, "/runs/run-1/start", {"algorithm": "APO"})
    error = {"type": "ValueError", "message": "no tasks", "traceback": "Traceback: line 1"}
    ask(server.address, "/runs/run-1", {"state": "failed", "error": error})
    page = open_view("/runs/run-1", address=server.address)
    expect(page.get_by_text("No completed steps yet")).to_be_visible()
    expect(page.get_by_text("✕ ValueError")).to_be_visible()
    expect(page.get_by_text("Traceback: line 1")).to_be_visible()


# --- a group, a comparison -------------------------------------------------------------------------------------------


def test_a_group_shows_rewards_advantages_and_where_its_tokens_part(open_view: OpenView, store_address: str) -> None:
    run_id = the_run(store_address)
    entries = {r["name"]: r["data"] for r in records(store_address, run_id, "ledger", step_from=1, step_to=1)}
    task = next(data["group"] for data in entries.values() if data["advantage"] not in (None, 0.0) and data.get("rows"))
    members = summaries(store_address, run_id=run_id, step_from=1, step_to=1, task=task, mode_in=["train"])["items"]
    page = open_view(f"/runs/{run_id}/steps/1/groups/{task}")
    table = page.get_by_role("table", name="Rollouts of the group")
    expect(table.locator("tbody tr")).to_have_count(len(members))
    expect(page.get_by_test_id("parting")).to_contain_text(re.compile(r"first different token is token \d+"))
    for member in members:
        cells = table.locator("tbody tr", has_text=member["rollout_id"]).locator("td").all_text_contents()
        advantage = entries[member["rollout_id"]]["advantage"]
        assert float(cells[2]) == member["reward"]
        assert (
            cells[3] == "–"
            if advantage is None
            else float(cells[3].replace("−", "-")) == pytest.approx(advantage, abs=1e-3)
        )


def test_a_step_before_the_last_ones_is_reached_by_keyboard_and_parts_of_bars_differ_by_pattern(
    open_view: OpenView, serve: Serve, tmp_path: Path
) -> None:
    async def make() -> None:
        store = SQLiteLightningStore(tmp_path / "steps.db", synchronous="NORMAL")
        await store.start_run("many steps")
        data = {"seconds": {"generate": 1.0, "train": 2.0}, "update": {"approx_kl": 0.0001, "update_kl": 0.02}}
        await store.add_run_records("many steps", [RunRecord(kind="step", step=n, data=data) for n in range(1, 31)])
        await store.close()

    run_async(make)
    page = open_view("/runs/many%20steps", address=serve(tmp_path / "steps.db").address)
    expect(page.locator('[data-chart^="KL of an update"]')).to_be_visible()
    swatches = page.locator('[data-chart="Step time by phase"] .u-marker')
    expect(swatches.last).to_be_visible()
    drawn = swatches.evaluate_all("all => all.map(each => each.style.background).filter(Boolean)")
    assert len(set(drawn)) == 2
    assert "gradient" in drawn[0]
    page.get_by_role("combobox", name="Rollouts of another step").focus()
    page.keyboard.type("7")
    page.get_by_role("option", name="7", exact=True).wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("step_from=7&step_to=7"))


def test_two_steps_are_compared_and_each_side_leads_to_its_rollout(open_view: OpenView, store_address: str) -> None:
    run_id = the_run(store_address)
    comparison = ask(store_address, f"/comparison?before={run_id}:0&after={run_id}:3")
    page = open_view(f"/compare?before={run_id}%3A0&after={run_id}%3A3")
    task = ask(store_address, f"/comparison?before={run_id}:0&after={run_id}:3&limit=1")["pairs"][0]
    expect(page.locator("main tbody tr td").first).to_have_attribute("title", task["task"])
    expect(page.locator("main tbody tr td").first).not_to_contain_text(task["task"][:16])
    expect(page.locator("[data-verdict]")).to_contain_text("after is better")
    facts = page.locator("main").inner_text()
    for name in ("gained", "lost", "unchanged"):
        assert re.search(rf"{name.title()}\s+{comparison[name]:,}", facts), (name, comparison[name])
    row = page.get_by_role("table", name="Tasks").locator("tbody tr").first
    expect(row).to_contain_text("gained")
    row.get_by_role("link", name="after").click()
    expect(page.get_by_role("tab", name="Conversation")).to_be_visible()


def test_sides_are_chosen_on_the_page_and_a_wrong_one_says_what_is_missing(
    open_view: OpenView, store_address: str
) -> None:
    run_id = the_run(store_address)
    page = open_view("/compare")
    expect(page.get_by_text("Select two sides to compare")).to_be_visible()
    for side, step in (("Before", "0"), ("After", "3")):
        group = page.get_by_role("group", name=side)
        group.get_by_role("combobox", name=f"{side}: run").click()
        page.get_by_role("option", name=run_id).click()
        group.get_by_role("combobox", name=f"{side}: step").click()
        page.get_by_role("option", name=step, exact=True).click()
    expect(page.locator("[data-verdict]")).to_be_visible()
    wrong = open_view(f"/compare?before=run-unknown&after={run_id}", may_fail=True)
    expect(wrong.locator("main [data-state]")).to_contain_text("run-unknown")


# --- access, width, live ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_the_curve_of_a_real_run_grows_while_the_page_is_open(
    open_view: OpenView, terminal: Terminal, tmp_path: Path
) -> None:
    demo = terminal(["agl", "demo", "--steps", "3", "--plain", "--out", tmp_path / "run"], folder=ROOT)
    [address, *_] = re.findall(r"http://127\.0\.0\.1:\d+", demo.until(r"http://127\.0\.0\.1:\d+.*\n"))
    page = open_view("/runs", address=address, may_fail=True)
    page.locator("tbody a").first.click()
    counts: list[int] = []
    bars = page.locator('[data-chart="Model calls by outcome"] table:not(.u-legend) tbody tr')
    for count in (1, 2):
        expect(bars).to_have_count(count, timeout=90_000)
        counts.append(bars.count())
    assert counts == [1, 2]
    demo.succeeded()
