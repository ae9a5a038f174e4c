"""The gateway with all that it needs, real and small: memory store, model server, attempts, an agent's HTTP client."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp

from agentlightning.llm_proxy import LLMProxy
from agentlightning.semconv import LightningCallAttributes
from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Span
from tests.stubs.model_server import Exchange, ModelServer
from tests.stubs.ports import free_port

Json = dict[str, Any]
Response = tuple[int, Json]
HI: Any = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, Json] = {
    "chat/completions": {"model": "policy", "messages": HI},
    "completions": {"model": "policy", "prompt": "hi"},
    "embeddings": {"model": "policy", "input": "hi"},
    "responses": {"model": "policy", "input": "hi"},
    "messages": {"model": "policy", "messages": HI, "max_tokens": 9},
    "messages/count_tokens": {"model": "policy", "messages": HI},
}
"""The least request of each route."""


class GatewayHarness:
    """Serves the model `policy` while entered; keyword arguments go to `LLMProxy`.

    Its methods are about an attempt of its own, or about the one that they are given.
    """

    def __init__(
        self, model: ModelServer | None = None, *, store: LightningStore | None = None, **options: Any
    ) -> None:
        self.model = model or ModelServer()
        self.store = store or InMemoryLightningStore()
        self._options = options

    async def __aenter__(self) -> Self:
        self.model.start()
        self.session = aiohttp.ClientSession()
        options: Json = {"model_list": [self.model.entry("policy")], "store": self.store, **self._options}
        self.proxy = LLMProxy(**options)
        await self.proxy.start()
        self.own = await self.attempt()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        if self.proxy.is_running():
            await self.proxy.stop()
        self.model.stop()

    async def attempt(self) -> AttemptedRollout:
        return await self.store.start_rollout(input={"question": "six times seven"})

    @property
    def ids(self) -> tuple[str, str]:
        """Ids of the own attempt and its rollout, as `as_resource` takes them."""
        return self.own.rollout_id, self.own.attempt.attempt_id

    def url(self, tail: str = "/chat/completions", *, of: AttemptedRollout | None = None) -> str:
        attempt = of or self.own
        return self.proxy.as_resource(attempt.rollout_id, attempt.attempt.attempt_id, "policy").endpoint + tail

    async def post(self, url: str, body: Any, **headers: str) -> Response:
        """Post to a URL, or to a path of the own attempt."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        url = self.url(url) if url.startswith("/") else url
        async with self.session.post(url, data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def ask(self, content: str = "hi there", *, of: AttemptedRollout | None = None, **fields: Any) -> Response:
        """Make one call as an agent would; return status and body."""
        body = {"model": "policy", "messages": [{"role": "user", "content": content}], **fields}
        return await self.post(self.url(of=of), body)

    async def spans(self, of: AttemptedRollout | None = None) -> list[Span]:
        attempt = of or self.own
        return list(await self.store.query_spans(attempt.rollout_id, attempt.attempt.attempt_id))

    async def raw(self, of: AttemptedRollout | None = None) -> list[Json]:
        """Return the typed attributes of each recorded call, by the last word of their key."""
        spans = [span for span in await self.spans(of) if span.name == "raw_gen_ai_request"]
        keys = {key.value: key.value.rsplit(".", 1)[1] for key in LightningCallAttributes}
        return [{keys[k]: v for k, v in span.attributes.items() if k in keys} for span in spans]

    async def states(self, of: AttemptedRollout | None = None) -> list[str]:
        return [call["state"] for call in await self.raw(of)]


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds: for events on the gateway's thread."""
    while not condition():  # noqa: ASYNC110 -- see above; pytest's timeout is the ceiling
        await asyncio.sleep(0.005)


def arrived(count: int) -> Callable[[list[Exchange]], bool]:
    """Return a condition for `ModelServer.until`: that many requests have arrived."""
    return lambda calls: len(calls) >= count


class GatewayProcess:
    """`agl gateway` for the model `policy` in a folder, on one port; started, killed and started again."""

    process: subprocess.Popen[str]

    def __init__(self, folder: Path, upstream: str, *options: str, store: str = "memory") -> None:
        command = [sys.executable, "-m", "agentlightning.cli", "gateway", "--upstream", upstream, "--model", "policy"]
        self._command = [*command, "--store", store, "--port", str(free_port()), *options]
        self._folder = folder

    async def start(self) -> str:
        """Return the base URL of the attempt that this process made, without `v1`."""
        environment = {name: value for name, value in os.environ.items() if name != "AGL_TOKEN"}
        output: Json = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}

        def begun() -> str:
            self.process = subprocess.Popen(self._command, cwd=self._folder, env=environment, **output)
            assert self.process.stdout is not None
            return self.process.stdout.readline()

        return (await asyncio.to_thread(begun)).strip().partition("=")[2].removesuffix("/v1")

    async def end(self, signal_number: int = signal.SIGINT) -> None:
        self.process.send_signal(signal_number)
        await asyncio.to_thread(self.process.communicate, timeout=30)
