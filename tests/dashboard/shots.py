"""Pictures of each view in both themes, into docs/images/dashboard/: `python -m tests.dashboard.shots`.

They are of the store of the demo run (build/dashboard/demo/store.db); each is below 150 kB.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.dashboard.browser import CHROMIUM, Opened
from tests.dashboard.server import ROOT, StoreProcess
from tests.dashboard.stores import copy_store, demo_store

OUT = ROOT / "docs" / "images" / "dashboard"
MOST_BYTES = 150_000
SHOWN = {
    "runs": "tbody tr svg",
    "run": "[data-verdict]",
    "rollouts": "[data-rollout]",
    "waterfall": "[data-span]",
    "tokens": ".agl-coloured",
    "group": "[data-testid=parting]:has-text('token')",
    "compare": "[data-verdict]",
    "workers": "[data-worker]",
}
"""Text that a view shows once it has loaded."""


def _first(address: str, path: str, name: str) -> str:
    with urllib.request.urlopen(f"{address}/v1/agl{path}") as reply:
        return json.load(reply)["items"][0][name]


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = StoreProcess(copy_store(demo_store(), Path(folder) / "demo.db"), log=Path(folder) / "log").start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            run = _first(server.address, "/runs", "run_id")
            rollout = _first(server.address, "/rollouts/summaries?mode_in=train&limit=1", "rollout_id")
            resources = _first(server.address, "/resources", "resources_id")
            views = {
                "runs": "/runs",
                "run": f"/runs/{run}",
                "rollouts": "/rollouts",
                "rollout": f"/rollouts/{rollout}",
                "waterfall": f"/rollouts/{rollout}?tab=waterfall",
                "tokens": f"/rollouts/{rollout}?tab=tokens",
                "group": f"/runs/{run}/steps/1/groups/0",
                "compare": f"/compare?before={run}%3A0&after={run}%3A3",
                "resources": "/resources",
                "resource": f"/resources/{resources}",
                "workers": "/workers",
                "settings": "/settings",
            }
            for theme in ("light", "dark"):
                context = browser.new_context(color_scheme=theme, viewport={"width": 1280, "height": 720})
                for name, path in views.items():
                    page = Opened(context.new_page(), server.address).go(path)
                    page.locator("[data-connection=live]").wait_for()
                    page.get_by_text("Loading ").first.wait_for(state="hidden")
                    page.locator(SHOWN.get(name, "main h1")).first.wait_for()
                    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
                    target = OUT / f"{name}-{theme}.png"
                    page.screenshot(path=target, animations="disabled")
                    if target.stat().st_size > MOST_BYTES:
                        raise SystemExit(f"{target} has {target.stat().st_size:,} bytes; at most {MOST_BYTES:,}")
                    page.close()
                context.close()
        finally:
            browser.close()
            server.stop()


if __name__ == "__main__":
    main()
