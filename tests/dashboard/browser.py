"""Checks of a page in a browser: it is quiet, loads from its own server only, and has no faults of access."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
AXE = ROOT / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
_NOT_A_SKIP_LINK = {"skip-link": {"enabled": False}}
"""Links within the page stand behind `#`, and axe takes the first of them for a jump to an element of that name."""
_LOST = ("Failed to load resource", "net::ERR_")
"""Messages of the browser itself when a server refuses or is unreachable; the page's own faults read otherwise."""


class Watch:
    """Collects what a page must not cause: errors, violations of its policy, requests to other hosts."""

    def __init__(self, page: Page, address: str) -> None:
        self.faults: list[str] = []
        self.may_fail = False
        """The test makes the server refuse, or kills it: the browser's notes of failed requests are no faults."""
        host = urlsplit(address).netloc
        page.on("pageerror", lambda error: self.faults.append(f"page error: {error}"))
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on(
            "request",
            lambda request: (
                None
                if urlsplit(request.url).netloc == host or request.url.startswith(("data:", "blob:"))
                else self.faults.append(f"request to another host: {request.url}")
            ),
        )

    def _said(self, kind: str, text: str) -> None:
        lost = self.may_fail and any(word in text for word in _LOST)
        if (kind == "error" and not lost) or "Content Security Policy" in text:
            self.faults.append(f"console {kind}: {text}")


class Opened:
    """A page with its watch: `view = open_view("/runs")`, then `view.page`."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address, self.watch = page, address, Watch(page, address)

    def go(self, path: str) -> Page:
        """Show a view by its address, for example `/runs?state=running`; returns when its heading is there."""
        self.page.goto(f"{self.address}/#{path}")
        expect(self.page.locator("main h1, main [data-state]").first).to_be_visible()
        return self.page


def no_violations(page: Page) -> None:
    """Fail if axe finds a fault of access. It runs in a world of its own, which the page's policy does not reach."""
    page.evaluate(AXE.read_text("utf-8"))
    violations = page.evaluate(
        "async ([values, rules]) => (await axe.run(document, {runOnly: {type: 'tag', values}, rules}))"
        ".violations.map(v => [v.id, v.help, v.nodes.slice(0, 5)"
        ".map(n => n.html.slice(0, 200) + ' ' + n.failureSummary)])",
        [list(RULES), _NOT_A_SKIP_LINK],
    )
    assert not violations, "\n".join(f"{rule}: {help}\n  " + "\n  ".join(nodes) for rule, help, nodes in violations)


def everything_loaded(page: Page) -> None:
    """Wait until no part of the page says that it loads; names of settings may contain the word."""
    expect(page.get_by_text(re.compile("^Loading "))).to_have_count(0)


def nothing_cut_off(page: Page) -> None:
    """Fail if the page is wider than its window."""
    width, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= window, f"the page is {width} px wide in a window of {window} px"
