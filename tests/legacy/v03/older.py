"""Data as an installation of v0.3 kept them, and the doors at which it gave them out.

The shapes are those of its documented behaviour: a server that answers `GET /v1/agl/...` with pages, an error of the
store with status 500 and a traceback; one collection of MongoDB for each kind, each document with its partition.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

Older = dict[str, list[dict[str, Any]]]
START = 1_700_000_000.0
_LIMITS = {"timeout_seconds": None, "unresponsive_seconds": 60.0, "max_attempts": 2, "retry_condition": ["failed"]}


def older(rollouts: int = 4, spans: int = 3) -> Older:
    """Make rollouts that succeeded at the second try, with a reward each; two sets of resources; a worker."""
    made: Older = {"resources": [], "rollouts": [], "attempts": [], "spans": [], "workers": []}
    llm = {"resource_type": "proxy_llm", "endpoint": "http://10.0.0.5:4000/v1", "model": "m", "api_key": None}
    prompt = {"resource_type": "prompt_template", "template": "Answer: {q}", "engine": "f-string"}
    for number in (1, 2):
        made["resources"].append(
            {
                **{"resources_id": f"rs-{number:012x}", "create_time": START, "update_time": START + number},
                **{"version": number, "resources": {"main_llm": {**llm, "sampling_parameters": {}}, "prompt": prompt}},
            }
        )
    for number in range(rollouts):
        rollout_id, began = f"ro-{number:012x}", START + 10.0 * number
        for try_, status in ((1, "failed"), (2, "succeeded")):
            attempt_id = f"at-{number:06x}{try_:02x}"
            made["attempts"].append(
                {
                    **{"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": try_, "status": status},
                    **{"start_time": began + try_, "end_time": began + try_ + 0.5, "worker_id": "w-3"},
                    **{"last_heartbeat_time": None, "metadata": None},
                }
            )
            for place in range(1, spans + 1):
                sequence_id = (try_ - 1) * spans + place
                last = place == spans and status == "succeeded"
                reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": number / 8}
                context = {"trace_id": f"{number + 1:032x}", "span_id": f"{sequence_id:016x}", "is_remote": False}
                made["spans"].append(
                    {
                        **{"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": sequence_id},
                        **{"trace_id": context["trace_id"], "span_id": context["span_id"], "parent_id": None},
                        **{"name": "agentlightning.annotation" if last else "openai.chat.completion"},
                        **{"status": {"status_code": "OK", "description": None}, "events": [], "links": []},
                        **{"attributes": reward if last else {"gen_ai.request.model": "m", "n": [1, 2]}},
                        **{"start_time": began + try_, "end_time": began + try_ + 0.1, "parent": None},
                        **{"context": {**context, "trace_state": {}}, "a_vendors_own": "kept"},
                        **{"resource": {"attributes": {"service.name": "agent"}, "schema_url": ""}},
                    }
                )
        made["rollouts"].append(
            {
                **{"rollout_id": rollout_id, "input": {"q": f"{number}"}, "start_time": began, "end_time": began + 9},
                **{"mode": "train", "resources_id": "rs-000000000002", "status": "succeeded", "config": dict(_LIMITS)},
                **{"metadata": {}},
            }
        )
    made["workers"].append({"worker_id": "w-3", "status": "idle"})
    return made


def unfinished(made: Older, number: int = 0) -> None:
    """Let one rollout be at work still, in its second attempt."""
    made["rollouts"][number].update(status="running", end_time=None)
    made["attempts"][2 * number + 1].update(status="running", end_time=None)


def write_dump(folder: Path, made: Older, *, lines: bool = False) -> Path:
    """Write a folder as `mongoexport` does, with `lines` one document a line, else a list."""
    folder.mkdir(exist_ok=True)
    for kind in ("resources", "rollouts", "attempts", "spans"):
        documents = [{"_id": {"$oid": f"{n:024x}"}, "partition_id": "pt-1", **d} for n, d in enumerate(made[kind])]
        text = "\n".join(json.dumps(document) for document in documents) if lines else json.dumps(documents, indent=1)
        (folder / f"{kind}.json").write_text(text)
    return folder


@asynccontextmanager
async def older_server(made: Older, *, evicted: tuple[str, ...] = (), failures: int = 0) -> AsyncIterator[str]:
    """Serve data as v0.3 did; the first `failures` requests fail. Yields the address."""
    remaining = failures

    async def answer(request: web.Request) -> web.Response:
        nonlocal remaining
        if remaining:
            remaining -= 1
            return web.json_response({"detail": "Bad Gateway"}, status=502)
        items = _items(made, request)
        rollout_id = request.query.get("rollout_id", "")
        if rollout_id in evicted:
            error = f"Traceback: RuntimeError: Spans for rollout {rollout_id} have been evicted"
            body = {"detail": "Internal server error", "error_type": "RuntimeError", "traceback": error}
            return web.json_response(body, status=500)
        if "sort_by" in request.query:
            items = sorted(items, key=lambda each: each[request.query["sort_by"]])
        limit, offset = int(request.query.get("limit", -1)), int(request.query.get("offset", 0))
        if limit == 0:
            return web.json_response({"detail": "Limit must be greater than 0 or -1 for no limit"}, status=400)
        page = items[offset : None if limit == -1 else offset + limit]
        return web.json_response({"items": page, "limit": limit, "offset": offset, "total": len(items)})

    app = web.Application()
    for path in ("/rollouts", "/resources", "/workers", "/spans", "/rollouts/{rollout_id}/attempts"):
        app.router.add_get("/v1/agl" + path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _items(made: Older, request: web.Request) -> list[dict[str, Any]]:
    if (of := request.match_info.get("rollout_id")) is not None:
        return [each for each in made["attempts"] if each["rollout_id"] == of]
    kind = request.path.rpartition("/")[2]
    if kind == "spans":
        return [each for each in made["spans"] if each["rollout_id"] == request.query["rollout_id"]]
    if kind == "rollouts":  # with the latest attempt in each
        latest = {each["rollout_id"]: each for each in made["attempts"]}
        return [{**each, "attempt": latest[each["rollout_id"]]} for each in made["rollouts"]]
    return made[kind]
