"""Whatever a model server says about trying again, the call is recorded and its agent gets an answer of its API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agentlightning.utils.backoff import LONGEST_RETRY_AFTER
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.faulty_engine import FaultyEngine, Request, Way

VALUES = (
    *("inf", "Infinity", "-inf", "nan", "-1", "-0", "1e400", "1e308", "9" * 400, "0x10", "1_0", "", "soon", "\x80\xff"),
    *("Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 +2359", "Wed, 21 Oct 2015 07:28:00 GMT"),
    *("Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Foo 2030 25:61:61 GMT", ",,,", "Thu, 1 Jan 1970 00:00:00 +999999999"),
)
ROUTES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/completions": {"prompt": "hi"},
    "/embeddings": {"input": "hi"},
    "/responses": {"input": "hi"},
    "/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


def answers(value: str) -> Way:
    """Return a way that is busy and says for how long. A 400 with the header is not tried again, so it is quick."""
    error = json.dumps({"error": {"message": "busy"}}).encode()

    async def way(request: Request) -> None:
        head = f"HTTP/1.1 400 Stub\r\nContent-Type: application/json\r\nRetry-After: {value}\r\n"
        await request.send(head.encode("latin-1") + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(error))
        await request.send(error)

    return way


async def test_every_call_that_an_engine_puts_off_is_recorded_and_answered_in_its_own_form() -> None:
    with FaultyEngine({f"m{number}": answers(value) for number, value in enumerate(VALUES)}) as engine:
        dialects = ["chat/completions", "completions", "embeddings"]
        entries = [engine.entry(name, dialects=dialects, engine="vllm") for name in engine.ways]
        entries += [{**entry, "model_name": f"{entry['model_name']}-native"} for entry in entries]
        for entry in entries[len(VALUES) :]:
            entry["litellm_params"] = {**entry["litellm_params"], "dialects": ["messages", "responses"]}
            del entry["litellm_params"]["engine"]
        async with GatewayHarness(model_list=entries) as harness:
            attempt = await harness.attempt()

            async def say(model: str, route: str, stream: bool) -> None:
                body = {"model": model, **ROUTES[route], **({"stream": True} if stream else {})}
                async with harness.session.post(harness.url(attempt, route), json=body) as answer:
                    said = await answer.json()
                    assert answer.status == 400, (model, route, said)
                    assert said["error"]["message"]
                    wait = answer.headers.get("retry-after", "1")
                    assert wait.isdecimal()
                    assert 1 <= int(wait) <= LONGEST_RETRY_AFTER

            calls = [
                (entry["model_name"], route, stream)
                for entry in entries
                for route in ROUTES
                if ("native" in entry["model_name"]) <= (route in ("/messages", "/responses"))
                for stream in (False, True)
            ]
            for at in range(0, len(calls), 50):
                await asyncio.gather(*(say(*call) for call in calls[at : at + 50]))
            states = await harness.states(attempt)
            assert states == ["upstream_error"] * len(calls)
            assert harness.proxy.stats()["calls"] == {"upstream_error": len(calls)}
            assert harness.proxy.stats()["rejected"] == 0
