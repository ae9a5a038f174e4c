"""Promises of the whole page: its token, a server that is killed, hostile texts, the views of resources and workers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Response, expect

from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import LLM, PromptTemplate
from tests.dashboard.browser import everything_loaded, no_violations, nothing_cut_off
from tests.dashboard.conftest import TOKEN, OpenView, Serve
from tests.dashboard.facts import ask, the_run
from tests.dashboard.server import StoreProcess
from tests.dashboard.stores import HOSTILE, run_async

pytestmark = pytest.mark.dashboard


def test_a_wrong_token_is_refused_and_the_right_one_opens_the_page_until_a_reload(
    open_view: OpenView, token_address: str
) -> None:
    page = open_view("/runs", address=token_address, may_fail=True)
    page.get_by_role("link", name="Enter the token").first.click()
    field = page.get_by_label("Server token", exact=True)
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


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_set_of_resources_shows_what_it_holds(open_view: OpenView, theme: str) -> None:
    page = open_view("/resources", theme=theme)
    page.locator("tbody a").first.click()
    expect(page.get_by_role("heading", name="main_llm")).to_be_visible()
    expect(page.locator(".agl-tree li", has_text="model: policy")).to_be_visible()
    expect(page.locator("[data-version][aria-current=true]")).to_be_visible()
    expect(page.get_by_text("api_key")).to_have_count(0)
    no_violations(page)


def test_workers_say_what_they_did(open_view: OpenView) -> None:
    page = open_view("/workers")
    expect(page.locator("[data-worker]")).to_have_count(2)
    expect(page.get_by_text("sends no heartbeat for 30.0 s, its rollout is requeued")).to_be_visible()
    page.clock.set_fixed_time(time.time() * 1000 + 60_000)  # a minute later, without waiting for it
    expect(page.get_by_text("? no heartbeat")).to_have_count(2)
    expect(page.locator("[data-status=gone]")).to_have_count(2)  # they had nothing to do: no fault, no orange


@pytest.mark.parametrize("view", ["/runs", "/rollouts", "/resources", "/workers"])
def test_an_empty_store_says_so(open_view: OpenView, empty_address: str, view: str) -> None:
    page = open_view(view, address=empty_address)
    expect(page.locator("[data-state=empty]")).to_be_visible()


def test_an_empty_store_says_what_to_type(open_view: OpenView, empty_address: str) -> None:
    page = open_view("/", address=empty_address)
    expect(page.locator("[data-state=empty]")).to_contain_text("agl demo")


def test_times_count_by_the_server_s_clock(open_view: OpenView) -> None:
    """A browser whose clock is an hour ahead shows no worker as silent, and counts from the same moment."""
    page = open_view("/settings")
    page.clock.install(time=time.time() + 3600)
    page.reload()
    page.get_by_role("link", name="Workers").click()
    expect(page.locator("[data-worker]")).to_have_count(2)
    age_cell = page.locator("[data-worker] td:nth-child(3)").first
    shown = age_cell.inner_text()
    assert "ago" in shown
    beats = [each["last_heartbeat_time"] for each in ask(page.url.partition("#")[0].rstrip("/"), "/workers")["items"]]
    silent = time.time() - max(beats)
    assert hours_of(shown) == pytest.approx(silent / 3600, abs=0.5)


def hours_of(text: str) -> float:
    """Return the hours of "3 d 2 h ago" or the like."""
    units = {"d": 24.0, "h": 1.0, "min": 1 / 60, "m": 1 / 60, "s": 1 / 3600, "ms": 0.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) ?(ms|min|[dhms])", text))


def test_another_store_at_the_same_address_is_shown_and_nothing_of_the_old_one(
    open_view: OpenView, demo_server: StoreProcess, tmp_path: Path
) -> None:
    run_id = the_run(demo_server.address)
    page = open_view(f"/runs/{run_id}", address=demo_server.address, may_fail=True)
    expect(page.get_by_role("heading", name=run_id)).to_be_visible()
    demo_server.kill()
    expect(page.locator("[data-connection=lost]")).to_be_visible()
    demo_server.db = str(tmp_path / "other.db")
    demo_server.start()
    expect(page.locator("[data-connection=live]")).to_be_visible(timeout=30_000)
    expect(page.get_by_text("Run is not in this store")).to_be_visible(timeout=30_000)
    page.get_by_role("link", name="Runs").first.click()
    expect(page.locator("[data-state=empty]")).to_be_visible()


def test_versions_of_a_prompt_are_compared_word_by_word(open_view: OpenView, serve: Serve, tmp_path: Path) -> None:
    store = tmp_path / "prompts.db"
    run_async(lambda: _prompts(store))
    page = open_view("/resources/prompts?version=2&before=1", address=serve(store).address)
    prompt = page.get_by_role("region", name="prompt")
    expect(prompt.locator("ins")).to_have_text(["brief and naïve 🙂"])
    expect(prompt.locator("del")).to_have_text(["long"])
    expect(page.get_by_role("region", name="llm")).to_contain_text("Unchanged.")
    expect(page.get_by_role("region", name="llm")).to_contain_text("model: m")
    expect(page.locator("[data-version]")).to_have_count(3)
    page.locator("[data-version='3'] a").first.click()
    expect(page).to_have_url(re.compile("version=3"))
    huge = page.get_by_role("region", name="prompt")
    expect(huge.locator("ins, del").first).to_be_attached()
    assert page.evaluate("window.hacked") is None
    no_violations(page)


async def _prompts(path: Path) -> None:
    store = SQLiteLightningStore(path)
    llm = LLM(endpoint="http://127.0.0.1:9/v1", model="m", api_key="sk-planted-0123456789abcdef")
    for text in (
        "Be long. {question}",
        "Be brief and naïve 🙂. {question}",
        f"{HOSTILE.replace(chr(0xD800), '')}{' word' * 20_000}",
    ):
        prompt = PromptTemplate(template=text, engine="f-string")
        await store.update_resources("prompts", {"prompt": prompt, "llm": llm})
    await store.close()


def test_settings_change_the_density_and_the_time_zone_of_every_view(open_view: OpenView, many_address: str) -> None:
    page = open_view("/rollouts", address=many_address)
    row = page.locator("[data-index='0'][data-rollout]")
    before = row.bounding_box()
    page.get_by_role("link", name="Settings").click()
    page.get_by_text("Compact", exact=True).click()
    page.get_by_role("combobox", name="Time zone").click()
    page.get_by_role("option", name="UTC", exact=True).click()
    page.get_by_role("link", name="Rollouts").first.click()
    after = row.bounding_box()
    assert before is not None
    assert after is not None
    assert after["height"] < before["height"]
    expect(row.locator("time").first).to_have_attribute("title", re.compile(r"\(UTC\)"))
    page.reload()
    expect(row.locator("time").first).to_have_attribute("title", re.compile(r"\(UTC\)"))


def test_who_wants_less_motion_gets_none(open_view: OpenView) -> None:
    page = open_view("/runs")
    page.emulate_media(reduced_motion="reduce")
    longest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('*')]"
        ".map(each => parseFloat(getComputedStyle(each).transitionDuration)))"
    )
    assert longest <= 0.001


def test_a_reader_is_told_that_the_page_fell_behind_and_sees_all_in_the_end(
    open_view: OpenView, serve: Serve, tmp_path: Path
) -> None:
    address = serve(tmp_path / "lag.db").address
    page = open_view("/rollouts", address=address, width=400)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    expect(page.locator("[data-behind]")).to_have_count(0)
    ask(address, "/queues/rollouts/enqueue", {"rollouts": [{"input": f"task {number}"} for number in range(2500)]})
    expect(page.locator("[data-behind]")).to_be_visible(timeout=10_000)
    expect(page.locator("[data-total='2500']")).to_be_visible(timeout=10_000)
    nothing_cut_off(page)
    no_violations(page)


SECRET = "planted-0123456789abcdef"


def test_the_views_of_one_rollout_and_of_one_resource_get_no_secret(
    open_view: OpenView, serve: Serve, tmp_path: Path
) -> None:
    store = tmp_path / "secrets.db"
    rollout_id = run_async(lambda: _secrets(store))
    address = serve(store).address
    views = [f"/rollouts/{rollout_id}?tab={tab}" for tab in ("conversation", "waterfall", "attempts", "details")]
    for view in (*views, "/resources/llms", "/resources/llms?version=2&before=1", "/resources/llms?version=1"):
        page = open_view("/runs", address=address)
        answers: list[Response] = []
        page.on("response", lambda answer, texts=answers: texts.append(answer))
        page.goto(f"{address}/#{view}")
        shown = page.get_by_role("region", name="llm") if "resources" in view else page.get_by_role("tabpanel")
        expect(shown).to_contain_text("h:[hidden]@host" if "resources" in view else re.compile("."))
        if "details" in view:
            expect(shown).to_contain_text("What is 1 + 1?")
            expect(shown).to_contain_text("[hidden]")
        everything_loaded(page)
        assert SECRET not in page.content(), view
        addresses = [each.url for each in answers if "/v1/agl/events" not in each.url and SECRET in each.text()]
        assert not addresses, view


async def _secrets(path: Path) -> str:
    store = SQLiteLightningStore(path)
    for model in ("one", "two"):
        llm = LLM(
            endpoint=f"http://h:{SECRET}@host/v1",
            model=model,
            api_key=f"sk-{SECRET}",
            sampling_parameters={"extra_headers": {"authorization": f"Bearer {SECRET}"}},
        )
        await store.update_resources("llms", {"llm": llm})
    rollout = await store.start_rollout(
        {"question": "What is 1 + 1?", "db": f"postgres://h:{SECRET}@host/x", "api_key": SECRET},
        metadata={"password": SECRET, "note": f"token={SECRET}"},
        resources_id="llms",
    )
    await store.close()
    return rollout.rollout_id
