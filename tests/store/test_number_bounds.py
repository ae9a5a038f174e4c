"""Every time, duration and count that a client can send has bounds, wherever it stands in a request."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import quote

from agentlightning.store import SQLiteLightningStore
from agentlightning.store.http.openapi import openapi_document
from tests.store.conftest import Serve
from tests.store.http.test_redaction import IDS, planted
from tests.stubs.raw_http import exchange, request

Path = tuple[str | int, ...]
FREE = {
    *("reward", "value", "reward_from", "reward_to", "attributes", "rewards", "task", "timeout", "token_ids"),
    *("started_after", "started_before"),
}
"""Measured values, attributes and filters of them; a wait is cut by the server, and an unknown token has no text."""


def numbers(schema: dict[str, Any], components: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, bool]]:
    """Yield where a schema has numbers, and whether they are whole."""
    if "$ref" in schema:
        yield from numbers(components[schema["$ref"].rpartition("/")[2]], components, path)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from numbers(choice, components, path)
    if schema.get("type") in ("number", "integer"):
        yield path, schema["type"] == "integer"
    for name, part in schema.get("properties", {}).items():
        yield from numbers(part, components, (*path, name))
    if "items" in schema:
        yield from numbers(schema["items"], components, (*path, 0))


def put(body: Any, path: Path, value: object) -> Any:
    """Return a copy of a body with a value at a place, which is made where the body has none."""
    body = copy.deepcopy(body)
    place: Any = body
    for step, after in pairwise(path):
        if isinstance(place, dict) and not isinstance(place.get(step), (dict, list)):
            place[step] = [{}] if after == 0 else {}
        place = place[step]
    place[path[-1]] = value
    return body


async def test_a_number_that_nothing_can_reckon_with_is_refused_by_its_name(serve: Serve, tmp_path: FilePath) -> None:
    server, _ = await serve(SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL"))
    port = server.server_launcher.port
    document = openapi_document()
    components = document["components"]["schemas"]
    wrong: list[str] = []
    tried = 0
    for path, entries in document["paths"].items():
        for method, entry in entries.items():
            content = entry.get("requestBody", {}).get("content", {}).get("application/json")
            schema = (content or {}).get("schema", {})
            base = planted(schema, "", components)
            places = [(place, whole, None) for place, whole in numbers(schema, components) if place]
            parameters: list[Any] = [each for each in entry.get("parameters", ()) if each.get("in") == "query"]
            needed = "".join(f"&{each['name']}=resources:a@1" for each in parameters if each["required"])
            for parameter in parameters:
                places += [((), whole, parameter["name"]) for _, whole in numbers(parameter["schema"], components)]
            for place, whole, query in places:
                names = [str(step) for step in place if step != 0] or [query or ""]
                if set(names) & FREE and names[-1] != "dropped_attributes":
                    continue
                if not whole and ("spans" in names or path.endswith("/spans")):
                    continue  # a time of a span that no calendar has is not known
                for value in (10**30, -(10**30)) if whole else (1e308, -1e308):
                    body = json.dumps(put(base, place, value)) if place else ""
                    target = path.format_map(IDS) + (f"?{query}={quote(str(value))}{needed}" if query else "")
                    answer = await exchange(port, request(method.upper(), target, body.encode()))
                    tried += 1
                    if not 400 <= answer.status < 500 or names[-1] not in answer.body.decode().lower():
                        wrong.append(
                            f"{method} {path} {'.'.join(names)} {value}: {answer.status} {answer.body[:200]!r}"
                        )
    assert not wrong, "\n".join(wrong)
    assert tried > 200
