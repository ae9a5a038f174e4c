"""Run the demo's agent on a model in this process, to measure the warm start in a fraction of a second.

The result is the same as that of `agent.calc_agent` through a server (a test compares them), for many tasks at a time.
Training and the metrics of the report do not use this module. They use the full production path.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.demo.agent import is_right
from agentlightning.demo.calculator import TOOLS, run_tool
from agentlightning.demo.settings import MAX_COMPLETION_LENGTH, MAX_TURNS
from agentlightning.demo.tasks import Task
from agentlightning.engine.chat import ChatFormat, message_body
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a policy on some tasks."""

    accuracy: float
    """Share of right answers."""
    tool_use: float
    """Share of tasks with a tool call."""
    accuracy_with_tool: float
    """Share of right answers among tasks with a tool call; 0 without any."""


@dataclass(slots=True)
class _Episode:
    task: Task
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    turns: int = 0
    right: bool = False
    over: bool = False


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> Measured:
    """Run each task once and return the shares of right answers and of tool use."""
    episodes = [_Episode(task, [{"role": "user", "content": task["question"]}]) for task in tasks]
    decoder = Decoder(model, [cast("int", tokenizer.eos_token_id)])
    chat_format = ChatFormat(tokenizer)
    seeds = random.Random(seed)
    for _ in range(MAX_TURNS):
        open_episodes = [episode for episode in episodes if not episode.over]
        completions = [
            Completion(
                chat_format.prompt_ids(episode.messages, TOOLS),
                MAX_COMPLETION_LENGTH,
                temperature,
                seed=seeds.getrandbits(63),
            )
            for episode in open_episodes
        ]
        generate(decoder, completions)
        for episode, completion in zip(open_episodes, completions, strict=True):
            whole = completion.finish_reason == "stop"
            reply = chat_format.reply(completion.token_ids[:-1] if whole else completion.token_ids, with_tools=True)
            message = message_body(reply)
            episode.turns += 1
            episode.messages.append(message)
            if not reply.tool_calls:
                episode.over = True
                episode.right = is_right(reply.content or "", episode.task["answer"])
            for call in message.get("tool_calls", ()):
                result = run_tool(call["function"]["name"], call["function"]["arguments"])
                episode.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    used_tool = [episode for episode in episodes if episode.turns > 1]
    return Measured(
        accuracy=sum(episode.right for episode in episodes) / len(episodes),
        tool_use=len(used_tool) / len(episodes),
        accuracy_with_tool=sum(episode.right for episode in used_tool) / max(1, len(used_tool)),
    )
