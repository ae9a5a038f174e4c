"""The format-only control: the same adapters, trained by imitation to answer with any one of the kinds.

Its labels are random, so it learns the possible replies, but not the right one. GRPO's gain above it is more than the
form of the reply.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.nn.functional import cross_entropy

from agentlightning.engine.chat import ChatFormat
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.training.learner.policy import Policy
from bench.pretrained.agent import is_right
from bench.pretrained.training import LORA, SETTINGS
from bench.pretrained.words import KINDS, Item

ROWS: Final = 16
"""Rows per optimizer step."""


def format_only(
    model: Path, train_items: Sequence[Item], held_out: Sequence[Item], *, seed: int = 0
) -> tuple[float, float]:
    """Teach the form in as many optimizer steps as GRPO takes; return held-out accuracy, sampled and greedy."""
    policy, draw = Policy.load(model, lora=LORA, seed=seed), random.Random(f"format only {seed}")
    steps: int = SETTINGS["max_steps"]
    rate: float = SETTINGS["learning_rate"]
    optimizer: Any = torch.optim.AdamW(
        [p for p in policy.model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        for _ in range(ROWS):
            loss = _loss(policy, draw.choice(train_items), draw.choice(KINDS)) / ROWS
            loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return accuracy(policy, held_out, 1.0, seed), accuracy(policy, held_out, 0.0, seed)


def _loss(policy: Policy, item: Item, reply: str) -> torch.Tensor:
    """Return the mean negative log-likelihood of the reply and its end, in nats."""
    prompt = ChatFormat(policy.tokenizer).prompt_ids(item["messages"], None)
    reply_ids = [*policy.tokenizer(reply, add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id]
    tokens = torch.tensor([prompt + reply_ids])
    logits = cast("Any", policy.model)(input_ids=tokens).logits[0, -len(reply_ids) - 1 : -1]  # (T, V)
    return cross_entropy(logits.float(), torch.tensor(reply_ids))


def accuracy(policy: Policy, items: Sequence[Item], temperature: float, seed: int = 0) -> float:
    """Return the share of right replies, decoded in this process by the engine's decoder."""
    chat, draw = ChatFormat(policy.tokenizer), random.Random(f"control {seed}")
    length = SETTINGS["max_completion_length"]
    completions = [
        Completion(chat.prompt_ids(item["messages"], None), length, temperature, seed=draw.getrandbits(60))
        for item in items
    ]
    generate(Decoder(policy.model, policy.eos_ids), completions)
    tokenizer = cast("Any", policy.tokenizer)
    replies: list[str] = [tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in completions]
    return sum(is_right(reply, item["answer"]) for reply, item in zip(replies, items, strict=True)) / len(items)
