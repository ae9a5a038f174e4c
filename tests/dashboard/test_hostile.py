"""Hostile texts in every field that a program can write: nothing runs, nothing hides or turns writing round, a million
characters stand in no cell, and at 400 pixels the page is as wide as its window."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.browser import everything_loaded, nothing_cut_off
from tests.dashboard.conftest import OpenView
from tests.dashboard.hostile import NAME, RUN, TASK

pytestmark = pytest.mark.dashboard
MOST_CHARACTERS = 60_000
FIND_HIDDEN = r"""() => {
  const hidden = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/;
  const found = [];
  for (const each of document.body.querySelectorAll('*')) {
    if (each.closest('script, style, noscript, template')) continue;
    for (const name of ['title', 'aria-label', 'placeholder', 'alt']) {
      if (hidden.test(each.getAttribute(name) ?? '')) found.push(`${name} of ${each.outerHTML.slice(0, 200)}`);
    }
    for (const node of each.childNodes) {
      if (node.nodeType === 3 && hidden.test(node.data)) found.push(`text in ${each.outerHTML.slice(0, 300)}`);
    }
  }
  return found;
}"""

COLUMNS = "id,status,outcome,reward,mode,step,task,input,worker,resources,run,error"
RESOURCES = f"/resources/{quote(NAME, safe='')}"
OF_RUN = f"/runs/{quote(RUN, safe='')}"
SIDE = quote(RUN, safe="")
VIEWS = {
    "runs": "/runs",
    "run": OF_RUN,
    "settings of a run": f"{OF_RUN}?tab=settings",
    "prompts of a run": f"{OF_RUN}?tab=prompts",
    "checkpoints of a run": f"{OF_RUN}?tab=checkpoints",
    "rollouts": "/rollouts",
    "rollouts with all columns": f"/rollouts?columns={COLUMNS}&run={SIDE}",
    "conversation": "/rollouts/ROLLOUT",
    "waterfall": "/rollouts/ROLLOUT?tab=waterfall&span=f",
    "tokens": "/rollouts/ROLLOUT?tab=tokens",
    "attempts": "/rollouts/ROLLOUT?tab=attempts",
    "details": "/rollouts/ROLLOUT?tab=details",
    "group": f"{OF_RUN}/steps/1/groups/{quote(TASK, safe='')}",
    "compare": f"/compare?before={SIDE}%3A0&after={SIDE}%3A1",
    "resources": "/resources",
    "one set of resources": RESOURCES,
    "workers": "/workers",
    "settings": "/settings",
}


def is_harmless(page: Page) -> None:
    """Fail if a text of the store ran, hides or turns writing round, or is drawn at a length nobody reads."""
    assert page.evaluate("window.hacked") is None
    assert page.locator("#root script, #root img, #root svg[onload], #root [onerror]").count() == 0
    hidden = page.evaluate(FIND_HIDDEN)
    assert not hidden, "\n".join(hidden[:8])
    long = page.evaluate(
        f"[...document.querySelectorAll('#root *')].filter(each => each.textContent.length > {MOST_CHARACTERS})"
        ".map(each => `${each.tagName}.${each.className}: ${each.textContent.length}`)"
    )
    assert not long, long[-1]


@pytest.mark.parametrize("name", VIEWS)
def test_hostile_texts_are_harmless_in_a_narrow_window(
    open_view: OpenView, hostile: tuple[str, str], name: str
) -> None:
    address, rollout_id = hostile
    page = open_view(VIEWS[name].replace("ROLLOUT", rollout_id), address=address, width=400)
    expect(page.locator("[data-connection=live]")).to_be_visible()
    everything_loaded(page)
    expect(page.locator("[data-state=error], [data-state=empty]")).to_have_count(0)
    is_harmless(page)
    nothing_cut_off(page)


def test_what_is_folded_is_harmless_when_it_is_opened(open_view: OpenView, hostile: tuple[str, str]) -> None:
    address, rollout_id = hostile
    page = open_view(f"/rollouts/{rollout_id}?tab=waterfall&span=f", address=address, width=400)
    expect(page.get_by_test_id("span-details")).to_be_visible()
    page.get_by_test_id("span-details").get_by_role("button", name="Raw JSON").click()
    expect(page.get_by_test_id("span-details").locator(".agl-json")).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert not page.evaluate(FIND_HIDDEN)
    nothing_cut_off(page)


def test_links_lead_to_what_has_a_hostile_name(open_view: OpenView, hostile: tuple[str, str]) -> None:
    page = open_view("/runs", address=hostile[0])
    page.locator("tbody a").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("⟨U+202E⟩run")
    page.get_by_role("link", name="View rollouts").click()
    expect(page.locator("[data-total='1']")).to_be_visible()
    page.get_by_role("link", name="Resources").first.click()
    page.locator("tbody a").first.click()
    expect(page.get_by_role("region", name="Versions", exact=True)).to_be_visible()
    page.get_by_role("link", name="view rollouts of version 1").first.click()
    expect(page.locator("[data-total='1']")).to_be_visible()
