"""The game of the demo's agent, played straight on a model: to measure the warm start in a fraction of a second.

It gives what `agent.calc_agent` gives through a server (a test compares them), for many tasks at a time. Training and
the figures of the report do not use it: they go through the whole production path.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.algorithm.grpo.chat import ChatFormat, message_body
from agentlightning.algorithm.grpo.decode import Completion, Decoder, generate
from agentlightning.demo.agent import is_right
from agentlightning.demo.calculator import TOOLS, run_tool
from agentlightning.demo.settings import MAX_NEW_TOKENS, MAX_TURNS
from agentlightning.demo.tasks import Task


@dataclass(frozen=True, slots=True)
class Measured:
    """How a policy did on some tasks.

    Attributes:
        accuracy: share of the tasks answered right.
        tool_use: share of the tasks where it called the tool.
        accuracy_with_tool: share answered right of those; 0 without any.
    """

    accuracy: float
    tool_use: float
    accuracy_with_tool: float


@dataclass(slots=True)
class _Game:
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
    """Play each task once and return how many came out right."""
    games = [_Game(task, [{"role": "user", "content": task["question"]}]) for task in tasks]
    decoder = Decoder(model, [tokenizer.eos_token_id])
    chat_format = ChatFormat(tokenizer)
    seeds = random.Random(seed)
    for _ in range(MAX_TURNS):
        open_games = [game for game in games if not game.over]
        completions = [
            Completion(
                chat_format.prompt_ids(game.messages, TOOLS), MAX_NEW_TOKENS, temperature, seed=seeds.getrandbits(63)
            )
            for game in open_games
        ]
        generate(decoder, completions)
        for game, completion in zip(open_games, completions, strict=True):
            _take_turn(game, completion, chat_format)
    used_tool = [game for game in games if game.turns > 1]
    return Measured(
        accuracy=sum(game.right for game in games) / len(games),
        tool_use=len(used_tool) / len(games),
        accuracy_with_tool=sum(game.right for game in used_tool) / max(1, len(used_tool)),
    )


def _take_turn(game: _Game, completion: Completion, chat_format: ChatFormat) -> None:
    ended = completion.finish_reason == "stop"
    reply = chat_format.reply(completion.token_ids[:-1] if ended else completion.token_ids, with_tools=True)
    message = message_body(reply)
    game.turns += 1
    game.messages.append(message)
    if not reply.tool_calls:
        game.over = True
        game.right = is_right(reply.content or "", game.task["answer"])
    for call in message.get("tool_calls", ()):
        result = run_tool(call["function"]["name"], call["function"]["arguments"])
        game.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
