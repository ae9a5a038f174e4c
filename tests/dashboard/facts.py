"""Facts about the store that a page shows, queried from its server."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def ask(address: str, path: str, body: Any = None) -> Any:
    """Return the server's answer below `/v1/agl`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/agl{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def summaries(address: str, **filters: Any) -> dict[str, Any]:
    """Return a page of summaries; arguments that begin with `page_` are about the page."""
    page = {name.removeprefix("page_"): value for name, value in filters.items() if name.startswith("page_")}
    chosen = {name: value for name, value in filters.items() if not name.startswith("page_")}
    page_of_summaries: dict[str, Any] = ask(address, "/rollouts/summaries", {"filter": chosen, **page})
    return page_of_summaries


def records(address: str, run_id: str, kind: str, **query: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    while True:
        query_body = {"kind_in": [kind], "limit": 1000, "offset": len(items), **query}
        page = ask(address, f"/runs/{run_id}/records/search", query_body)
        items += page["items"]
        if not page["items"] or len(items) >= page["total"]:
            return items


def the_run(address: str) -> str:
    return str(ask(address, "/runs")["items"][0]["run_id"])


def trained_rollout(address: str) -> str:
    """Return a rollout of the demo's first step whose tokens were trained; one of equal rewards has no rows."""
    entries = records(address, the_run(address), "ledger", step_from=1, step_to=1)
    return str(next(record["name"] for record in entries if record["data"].get("rows")))
