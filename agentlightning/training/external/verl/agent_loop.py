"""Runs in VERL's agent loop workers: serves the model to the gateway, and returns the rows of each session to VERL."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from agentlightning.engine.chat_server import ChatServer
from agentlightning.engine.service import ServedAs

_started: asyncio.Future[None] | None = None
"""The chat service of this process; every session creates its own agent loop."""


class RowsOfRollouts(AgentLoopBase):
    """A session of VERL, which is a rollout of the store: its rows come from the loop of the run."""

    @override
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Return the rows of a session after its step is collected; an empty list if its rollout is excluded."""
        global _started
        link = self.config.agentlightning_link
        bridge = ray.get_actor(link.bridge, namespace=link.namespace)
        if _started is None:
            _started = asyncio.ensure_future(_serve(bridge, self.server_manager, self.tokenizer, link))
        await asyncio.shield(_started)
        part, index = kwargs["agl_part"], int(kwargs["index"])
        place = index % self.config.data.train_batch_size if part == "train" else index
        step, session = int(kwargs["global_steps"]), int(kwargs["session_id"])
        rows = await bridge.rows.remote(part, step, place, session, str(kwargs["uid"]))
        return [_output(row, step) for row in rows]


def _output(row: dict[str, Any], step: int) -> AgentLoopOutput:
    versions = row["versions"] or [max(0, step - 1)]
    return AgentLoopOutput(
        prompt_ids=row["prompt_ids"],
        response_ids=row["response_ids"],
        response_mask=row["response_mask"],
        response_logprobs=row["logprobs"],
        reward_score=row["reward"],
        num_turns=2 * row["calls"],
        metrics=AgentLoopMetrics(),
        extra_fields={
            "reward_extra_info": {},
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
        },
    )


async def _serve(bridge: Any, client: Any, tokenizer: Any, link: Any) -> None:
    """Serve the model of VERL from this process, and announce the address."""
    fields: dict[str, Any] = {**link.served, "eos_ids": frozenset(link.served.eos_ids)}
    server = ChatServer(client, tokenizer, ServedAs(**fields), token=await bridge.token.remote())
    node = ray.util.get_node_ip_address()
    await server.start("127.0.0.1" if node == link.node else node)
    await bridge.announce.remote(server.base_url)
