"""Every server of ours, by name, small and real, for tests that walk over all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.utils.server_launcher import PythonServerLauncherArgs

Serve = Callable[[Path], AbstractAsyncContextManager[tuple[int, list[str]]]]
"""Serves for the body; gives the port and the paths that take a body, `/health` left out."""


@asynccontextmanager
async def _store(folder: Path) -> AsyncGenerator[tuple[int, list[str]]]:
    from agentlightning.store.client_server import LightningStoreServer

    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    await server.start()
    try:
        yield server.server_launcher.port, ["/v1/agl/rollouts", "/v1/traces", "/v1/metrics", "/v1/logs"]
    finally:
        await server.stop()


@asynccontextmanager
async def _gateway(folder: Path) -> AsyncGenerator[tuple[int, list[str]]]:
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.llm_proxy.access.address import ROUTES

    store = InMemoryLightningStore()
    parameters = {"model": "hosted_vllm/policy", "api_base": "http://127.0.0.1:9/v1"}
    proxy = LLMProxy(model_list=[{"model_name": "policy", "litellm_params": parameters}], store=store)
    await proxy.start()
    try:
        attempt = await store.start_rollout(input={})
        base = f"/rollout/{attempt.rollout_id}/attempt/{attempt.attempt.attempt_id}/v1"
        yield (
            proxy.server_launcher.port,
            [f"{base}/{route}" for route, verbs in ROUTES.items() if "POST" in verbs and "<" not in route],
        )
    finally:
        await proxy.stop()


@asynccontextmanager
async def _engine(folder: Path) -> AsyncGenerator[tuple[int, list[str]]]:
    from agentlightning.demo.model import make_model, make_tokenizer
    from agentlightning.engine.engine import InferenceEngine
    from agentlightning.engine.torch_setup import no_progress_bar
    from agentlightning.training.learner.policy import Policy

    tokenizer = make_tokenizer()
    with no_progress_bar():
        cast(Any, make_model(tokenizer, seed=0)).save_pretrained(folder)
    cast(Any, tokenizer).save_pretrained(folder)
    engine = InferenceEngine(Policy.load(folder, learning_rate=1e-3), max_batch=2, max_new_tokens=4)
    engine.start()
    try:
        yield int(engine.base_url.split(":")[2].split("/")[0]), ["/v1/chat/completions"]
    finally:
        engine.stop()


@asynccontextmanager
async def _verl_chat(folder: Path) -> AsyncGenerator[tuple[int, list[str]]]:
    from agentlightning.demo.model import make_tokenizer
    from agentlightning.engine.chat_server import ChatServer
    from agentlightning.engine.service import ServedAs

    class Client:
        """Generates as VERL's client does: tokens in, tokens out."""

        async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            return SimpleNamespace(token_ids=prompt_ids[:1], log_probs=[-1.0], extra_fields={})

    tokenizer: Any = make_tokenizer()
    served = ServedAs("policy", frozenset((tokenizer.eos_token_id,)), len(tokenizer), 256, 4, 0, "agl.VERL")
    server = ChatServer(Client(), tokenizer, served, token=None)
    await server.start("127.0.0.1")
    try:
        yield int(server.base_url.split(":")[2].split("/")[0]), ["/v1/chat/completions"]
    finally:
        server.stop()


@asynccontextmanager
async def _agentops(folder: Path) -> AsyncGenerator[tuple[int, list[str]]]:
    from agentlightning.cli.agentops_server import Traces, agentops_routes
    from agentlightning.cli.serving import app_with_checks, serving

    store = InMemoryLightningStore()
    app = app_with_checks(agentops_routes(store, Traces(store)), "127.0.0.1", open_paths=["/v3/auth/token"])
    async with serving(app, PythonServerLauncherArgs()) as endpoint:
        yield int(endpoint.rsplit(":", 1)[1]), ["/v3/auth/token", "/v1/traces", "/v4/logs/upload/", "/v1/logs"]


@asynccontextmanager
async def _legacy(folder: Path) -> AsyncGenerator[tuple[int, list[str]]]:
    from agentlightning.legacy.server import AgentLightningServer

    server = AgentLightningServer(port=0)
    await server.start()
    try:
        yield int(server.endpoint.rsplit(":", 1)[1]), ["/rollout"]
    finally:
        await server.stop()


EVERY_SERVER: dict[str, Serve] = {
    "store": _store,
    "gateway": _gateway,
    "engine": _engine,
    "verl_chat": _verl_chat,
    "agentops": _agentops,
    "legacy": _legacy,
}
