"""Figures of the page in a real browser, over a real store server with 100,000 rollouts.

    python -m bench.dashboard.page [--rollouts 100000] [--minutes 30] [--json FILE]

The server is a separate process on SQLite; the browser is headless Chromium (`CHROMIUM`, else /usr/bin/chromium). Times
of the page are measured inside it, by its own clock. The figures are only valid on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

from playwright.async_api import Browser, Page, async_playwright

from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.sqlite import SQLiteLightningStore
from bench.dashboard.live import LOADED, PER_SECOND, Load, serve
from bench.dashboard.store import RUN, fill
from bench.dashboard.tokens import TOKENS, TURNS, add_tokens, add_turns
from bench.store_figures import HEAD, Figure, cpu_seconds

_WAIT_MS = 15_000
_CPU_SECONDS = 20.0
_PAGES = 4


_FRAMES = """async (selector) => {
  const element = document.querySelector(selector);
  const far = element.scrollHeight - element.clientHeight;
  const seconds = 3;
  const pace = Math.min(far, 60000) / seconds;
  return await new Promise((done) => {
    let frames = 0;
    const began = performance.now();
    const frame = (now) => {
      const passed = (now - began) / 1000;
      element.scrollTop = Math.max(0, Math.min(far, passed * pace));
      if (passed >= seconds) return done(frames / passed);
      frames += 1;
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
}"""
_ARM = """() => {
  const sign = document.querySelector("[data-total]");
  const was = sign.getAttribute("data-total");
  window.aglSeen = new Promise((done) => {
    new MutationObserver((_, observer) => {
      if (sign.getAttribute("data-total") === was) return;
      observer.disconnect();
      done(performance.timeOrigin + performance.now());
    }).observe(sign, { attributes: true, subtree: true, childList: true });
  });
}"""


@asynccontextmanager
async def opened(browser: Browser, address: str, ready: str) -> AsyncGenerator[Page]:
    """Open a page in a new context, so that nothing is cached, and wait for its content."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = await context.new_page()
        page.set_default_timeout(_WAIT_MS)
        await page.goto(address)
        await page.wait_for_selector(ready)
        yield page
    finally:
        await context.close()


ROWS = '[role="grid"] [role="rowgroup"] [role="row"]'


async def first_view(browser: Browser, base: str) -> list[Figure]:
    """Measure the time to the first rows, and the size of the scripts and styles that they need."""
    async with opened(browser, f"{base}/#/rollouts", ROWS) as page:
        milliseconds = float(await page.evaluate("() => performance.now()"))
        kilobytes = float(
            await page.evaluate(
                "() => performance.getEntriesByType('resource').filter((each) => /\\.(js|css)$/.test(each.name))"
                ".reduce((sum, each) => sum + each.encodedBodySize, 0) / 1000"
            )
        )
    return [
        _at_most("first view of the rollouts, s", milliseconds / 1e3, 1.0),
        _at_most("scripts and styles of the first view, gzip, kB", kilobytes, 300),
    ]


async def filtering(browser: Browser, base: str) -> Figure:
    """Measure the time from the request of a filter to the end of its answer, without the pause after typing."""
    async with opened(browser, f"{base}/#/rollouts", ROWS) as page:
        was = await page.get_attribute("[data-total]", "data-total")
        async with page.expect_response(lambda reply: "/rollouts/summaries" in reply.url) as expectation:
            await page.get_by_role("search").get_by_label("text").first.fill("number 99")
        reply = await expectation.value
        await reply.finished()
        await page.wait_for_function(
            "(was) => document.querySelector('[data-total]').getAttribute('data-total') !== was", arg=was
        )
        took = reply.request.timing["responseEnd"] - max(0.0, reply.request.timing["requestStart"])
    return _at_most("answer to a filter, ms", took, 200)


async def change_seen(browser: Browser, base: str, client: LightningStoreClient) -> Figure:
    """Measure the time from the storage of a new rollout to the page that counts it."""
    async with opened(browser, f"{base}/#/rollouts", ROWS) as page:
        await page.wait_for_selector('[data-connection="live"]')
        await page.evaluate(_ARM)
        began = time.time()
        await client.enqueue_rollout(input={"question": "a change"}, run_id=RUN)
        shown_at = float(await page.evaluate("() => window.aglSeen")) / 1e3
    return _at_most("change in the store seen on the page, s", shown_at - began, 1.0)


async def scrolling(browser: Browser, base: str, rollout_id: str, count: int) -> list[Figure]:
    """Measure frames per second while rows and tokens scroll."""
    figures: list[Figure] = []
    async with opened(browser, f"{base}/#/rollouts", ROWS) as page:
        frames = float(await page.evaluate(_FRAMES, '[role="grid"]'))
        figures.append(Figure(f"scrolling {count:,} rows, frames/s", frames, 50))
    async with opened(browser, f"{base}/#/rollouts/{rollout_id}?tab=tokens", ".agl-token") as page:
        frames = float(await page.evaluate(_FRAMES, ".agl-tokens"))
        figures.append(Figure(f"scrolling {TOKENS:,} tokens, frames/s", frames, 50))
    return figures


async def conversation(browser: Browser, base: str, rollout_id: str) -> Figure:
    """Measure the time from opening a conversation until its first calls are shown."""
    async with opened(browser, f"{base}/#/rollouts/{rollout_id}", "[data-call]") as page:
        milliseconds = float(await page.evaluate("() => performance.now()"))
    return _at_most(f"conversation of {TURNS:,} turns opened, s", milliseconds / 1e3, 2.0)


async def server_load(browser: Browser, base: str, pid: int, client: LightningStoreClient) -> Figure:
    """Measure the server's processor time for an open page while rollouts run."""
    async with Load(client):
        alone = await processor_share(pid)
        async with asyncio.TaskGroup() as group:
            leave = asyncio.Event()
            watched = [group.create_task(_watch(browser, base, leave)) for _ in range(_PAGES)]
            await asyncio.sleep(2.0)
            together = await processor_share(pid)
            leave.set()
            await asyncio.gather(*watched)
    return _at_most(
        f"server, each open page at {PER_SECOND} rollouts/s, % core", 100 * (together - alone) / _PAGES, 2.0
    )


async def _watch(browser: Browser, base: str, leave: asyncio.Event) -> None:
    async with opened(browser, f"{base}/#/rollouts", ROWS):
        await leave.wait()


async def processor_share(pid: int) -> float:
    """Return the share of a core that a process used over some seconds."""
    began, used = time.perf_counter(), cpu_seconds(pid)
    await asyncio.sleep(_CPU_SECONDS)
    return (cpu_seconds(pid) - used) / (time.perf_counter() - began)


async def memory(browser: Browser, base: str, client: LightningStoreClient, minutes: float) -> Figure:
    """Measure the growth of the page's heap after collection, from the second tenth of a live run to its end."""
    async with opened(browser, f"{base}/#/rollouts", ROWS) as page, Load(client):
        session = await page.context.new_cdp_session(page)
        heap: list[float] = []
        for share in (0.1, 0.9):
            await asyncio.sleep(60 * minutes * share)
            await session.send("HeapProfiler.collectGarbage")  # pyright: ignore[reportUnknownMemberType]
            usage = cast(dict[str, float], await session.send("Runtime.getHeapUsage"))  # pyright: ignore[reportUnknownMemberType]
            heap.append(usage["usedSize"] / 1e6)
    return _at_most(f"page's memory, growth in {minutes:g} minutes of a live run, MB", heap[1] - heap[0], 5.0)


async def run(count: int, minutes: float) -> list[Figure]:
    """Fill a store, serve it and measure the page over it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "store.db")
        store = SQLiteLightningStore(file, synchronous="NORMAL")
        try:
            await store.start_run(RUN)
            await fill(store, count)
            rollout_id, long_id = await add_tokens(store), await add_turns(store)
        finally:
            await store.close()
        print(f"{count:,} rollouts are in the store; {LOADED}", flush=True)
        async with serve(file) as (base, pid), async_playwright() as playwright:
            client = LightningStoreClient(base)
            browser = await playwright.chromium.launch(
                executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
            )
            try:
                figures = await first_view(browser, base)
                figures.append(await filtering(browser, base))
                figures.append(await change_seen(browser, base, client))
                figures += await scrolling(browser, base, rollout_id, count)
                figures.append(await conversation(browser, base, long_id))
                figures.append(await server_load(browser, base, pid, client))
                figures.append(await memory(browser, base, client, minutes))
            finally:
                await browser.close()
                await client.close()
    return figures


def _at_most(name: str, value: float, target: float) -> Figure:
    return Figure(name, value, target, at_most=True)


def main(arguments: list[str]) -> int:
    """Return 1 if a figure missed its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=30.0, help="of a live run, for the page's memory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    figures = asyncio.run(run(options.rollouts, options.minutes))
    print(HEAD, *(figure.line() for figure in figures), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([{**asdict(each), "met": each.met} for each in figures], indent=2))
    return int(not all(each.met for each in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
