"""Preference pairs: the best and the worst rollout of each task, in TRL's conversational format with tools.

A pair is `prompt`, `chosen` and `rejected`, each a list of messages, and `tools` if the agent offered any, with the
rewards and the rollouts. Pairs exclude rollouts that failed, have no reward, or are held out. Secrets are hidden.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from agentlightning.adapter.messages import Message, TraceToMessages
from agentlightning.base.private_files import open_private
from agentlightning.base.terminal import json_text
from agentlightning.errors import BadRequestError
from agentlightning.store.base import FINISHED, LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.store.rules.values import to_json
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.utils.masking import masked

PairExclusion = Literal["no_reward", "no_conversation", "several_conversations", "too_few", "tie", "prompts_differ"]
"""Reasons why a rollout or a task is in no pair.

For a rollout: it failed or has no reward; its calls were recorded without text; its calls do not continue each other.
For a task: fewer than two rollouts remain; the rewards of best and worst do not differ by more than the margin; best
and worst have different prompts."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One rollout in a form that can be compared."""

    rollout_id: str
    reward: float
    prompt: list[Message]
    """The messages before the first reply."""
    answer: list[Message]
    """The messages from the first reply on, including tool results."""
    tools: list[Any] | None


@dataclass
class Pairs:
    """The pairs of a store."""

    pairs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The pairs, in the order of the first rollouts of their tasks."""
    excluded: Counter[str] = field(default_factory=Counter[str])
    """Number of rollouts (the first three reasons) and tasks (the others) without a pair, by `PairExclusion`."""


async def preference_pairs(store: LightningStore, *, margin: float = 0.0) -> Pairs:
    """Return the pairs of all finished training rollouts of a store, at most one for each task.

    Args:
        margin: the rewards of best and worst must differ by more than this.

    Raises:
        BadRequestError: the margin is negative.
    """
    if not margin >= 0:
        raise BadRequestError(f"margin must be at least 0; got {margin!r}")
    result, by_task = Pairs(), dict[str, list[Conversation]]()
    async for page in pages_of(store.query_rollouts, sort_by="start_time"):
        for rollout in page:
            if rollout.mode in ("val", "test") or rollout.status not in FINISHED:
                continue
            conversations = by_task.setdefault(json.dumps(to_json(rollout.input), sort_keys=True), [])
            conversation = _conversation_of(await evidence(store, rollout))
            if isinstance(conversation, str):
                result.excluded[conversation] += 1
            else:
                conversations.append(conversation)
    for conversations in by_task.values():
        pair = pair_of(conversations, margin)
        if isinstance(pair, str):
            result.excluded[pair] += 1
        else:
            result.pairs.append(pair)
    return result


def pair_of(conversations: Sequence[Conversation], margin: float) -> dict[str, Any] | PairExclusion:
    """Return the pair of one task, or the reason why it has none. The first rollout of equal reward is used."""
    if len(conversations) < 2:
        return "too_few"
    best = max(conversations, key=lambda each: each.reward)
    worst = min(conversations, key=lambda each: each.reward)
    if not best.reward - worst.reward > margin:
        return "tie"
    if (best.prompt, best.tools) != (worst.prompt, worst.tools):
        return "prompts_differ"
    pair: dict[str, Any] = {"prompt": best.prompt, "chosen": best.answer, "rejected": worst.answer}
    if best.tools:
        pair["tools"] = best.tools
    rewards = {"chosen_reward": best.reward, "rejected_reward": worst.reward}
    return masked({**pair, **rewards, "chosen_rollout": best.rollout_id, "rejected_rollout": worst.rollout_id})


def _conversation_of(record: Evidence) -> Conversation | PairExclusion:
    """Return the messages of a rollout, or the reason why it cannot be compared."""
    if record.reward is None:
        return "no_reward"
    calls = [call for call in TraceToMessages().adapt(record.counted) if call["messages"]]
    if not calls:
        return "no_conversation"
    prompt, tools, whole = calls[0]["messages"][:-1], calls[0]["tools"], calls[-1]["messages"]
    for earlier, later in itertools.pairwise(call["messages"] for call in calls):
        if later[: len(earlier)] != earlier:
            return "several_conversations"
    if not prompt or whole[-1].get("role") != "assistant":
        return "no_conversation"
    messages, first = list(map(_for_templates, whole)), len(prompt)
    tools = list(tools) if tools else None
    return Conversation(record.rollout.rollout_id, record.reward, messages[:first], messages[first:], tools)


def _for_templates(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as objects instead of text, for chat templates."""
    calls = cast("list[dict[str, Any]]", message.get("tool_calls") or [])
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _with_object(call["function"])} for call in calls]}


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):  # the model wrote no JSON: keep the text
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function


def write_pairs(result: Pairs, path: Path) -> None:
    """Write the pairs as JSON Lines, in a file that only its owner can read.

    Raises:
        BadRequestError: the file already exists.
    """
    if path.exists():
        raise BadRequestError(f"{str(path)!r} already exists. Choose another file")
    with open_private(path, "w") as file:
        for pair in result.pairs:
            file.write(json_text(json.dumps(pair, ensure_ascii=False)) + "\n")
