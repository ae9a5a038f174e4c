"""Serves the model of VERL to the gateway, once in each agent loop worker, and tells the bridge where."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from agentlightning.engine.chat_server import ChatServer, ServedAs

_started: asyncio.Future[None] | None = None
"""Of this process, in which every session makes an agent loop of its own."""


async def serve(bridge: Any, client: Any, tokenizer: Any, link: Any) -> None:
    """Serve once in this process, and tell the bridge where."""
    global _started
    if _started is None:
        _started = asyncio.ensure_future(_serve(bridge, client, tokenizer, link))
    await asyncio.shield(_started)


async def _serve(bridge: Any, client: Any, tokenizer: Any, link: Any) -> None:
    served = ServedAs(
        model_name=link.model_name,
        eos_ids=frozenset(link.eos_ids),
        vocabulary=link.vocabulary,
        context_length=link.context_length,
        max_new_tokens=link.max_new_tokens,
        seed=link.seed,
        by="agl.VERL",
    )
    server = ChatServer(client, tokenizer, served, token=await bridge.token.remote())
    node = ray.util.get_node_ip_address()
    await server.start("127.0.0.1" if node == link.node else node)
    await bridge.announce.remote(server.base_url)
