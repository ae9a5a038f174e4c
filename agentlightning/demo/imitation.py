"""Warm start of the demo's policy: imitation of conversations with and without the calculator.

Reinforcement learning can only reinforce behavior that the policy already samples. Therefore, the model first imitates
conversations that use the calculator, until it copies numbers. Then, with a falling learning rate, it imitates a
mixture in which most conversations answer directly with the first number of the expression, which is always wrong. As a
result, about a quarter of the model's samples use the calculator, and its greedy answers are always wrong. The model
is measured on separate tasks, never on training or held-out tasks. The result does not depend on time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.demo import settings
from agentlightning.demo.calculator import TOOLS
from agentlightning.demo.measurement import Measured, measure
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.demo.tasks import Task, draw_imitation_task
from agentlightning.engine.chat import Reply, ToolCall, message_body, messages_for_template
from agentlightning.engine.torch_setup import one_thread
from agentlightning.training.learner.policy import Policy

Progress = Callable[[int, Measured], None]
"""Called with the number of steps and the measurement on warm-start tasks, sampled at temperature 1."""


def make_policy(
    folder: str | Path, tasks: Iterable[Task] = (), *, seed: int = 0, on_progress: Progress | None = None
) -> Measured:
    """Create the demo's model, train it (25 to 40 CPU seconds), and write it with its tokenizer to the folder.

    The same seed and tasks give the same weights on the same machine. `Policy.load(folder)` and the `from_pretrained`
    of transformers can load the folder. Returns the measurement on warm-start tasks.

    Args:
        tasks: Tasks of the demo. Only the words of their questions are used, for the vocabulary.

    Raises:
        RuntimeError: The required accuracy was not reached.
    """
    tokenizer = make_tokenizer(task["question"] for task in tasks)
    model = make_model(tokenizer, seed)
    with one_thread():
        measurement = WarmStart(model, tokenizer, seed=seed, on_progress=on_progress).run()
    Policy(model, tokenizer).save(folder)
    return measurement


class WarmStart:
    """Trainer of one model by imitation. The same seed gives the same weights."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int = 0,
        on_progress: Progress | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._random = random.Random(f"imitation {seed}")
        self._on_progress = on_progress
        self._own_tasks = [draw_imitation_task(self._random)[0] for _ in range(settings.IMITATION_MEASURED_TASKS)]
        self._steps = 0
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.IMITATION_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
        )

    def run(self) -> Measured:
        """Train until the model has the required accuracy, and return its last measurement.

        Raises:
            RuntimeError: The required accuracy is not reached after `IMITATION_MAX_STEPS` steps.
        """
        while self._measure().accuracy_with_tool < settings.SKILL_BEFORE_SETTLING:
            self._steps_at(settings.IMITATION_LEARNING_RATE, 50, shown=1.0)
        for remaining in range(settings.SETTLING_STEPS, 0, -1):
            rate = settings.IMITATION_LEARNING_RATE * remaining / settings.SETTLING_STEPS
            self._steps_at(rate, 1, shown=1.0 if remaining > settings.MIXTURE_STEPS else settings.SHARE_SHOWING_TOOL)
        low, high = settings.ACCURACY_AT_START
        while not low <= (measurement := self._measure()).accuracy <= high or self._greedy() > settings.GREEDY_AT_START:
            self._steps_at(settings.IMITATION_LEARNING_RATE / 10, 25, shown=settings.SHARE_SHOWING_TOOL)
        return measurement

    def _greedy(self) -> float:
        return measure(self._model, self._tokenizer, self._own_tasks, temperature=0.0).accuracy

    def _measure(self) -> Measured:
        measurement = measure(self._model, self._tokenizer, self._own_tasks, seed=self._steps)
        if self._on_progress is not None:
            self._on_progress(self._steps, measurement)
        if self._steps >= settings.IMITATION_MAX_STEPS:
            raise RuntimeError(f"The warm start missed its target accuracy after {self._steps} steps: {measurement}")
        return measurement

    def _steps_at(self, learning_rate: float, steps: int, *, shown: float) -> None:
        """Run training steps on new conversations. The share `shown` of them uses the tool."""
        for _ in range(steps):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, (self._steps + 1) / 50)
            imitate(self._model, self._tokenizer, self._optimizer, self._conversations(shown), tools=TOOLS)
            self._steps += 1

    def _conversations(self, shown: float) -> list[list[dict[str, Any]]]:
        conversations: list[list[dict[str, Any]]] = []
        for _ in range(settings.IMITATION_BATCH):
            shows_tool = self._random.random() < shown
            task, expression = draw_imitation_task(self._random)
            conversations.append(shown_messages(task, expression) if shows_tool else guessed_messages(task, expression))
        return conversations


def learn_by_imitation(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[int], Sequence[list[dict[str, Any]]]],
    *,
    steps: int,
    settling: int,
    tools: list[Any] | None = None,
) -> None:
    """Train a model on conversations. Its learning rate falls to 0 in the last `settling` steps.

    Args:
        draw: Returns the conversations of a step, from the number of steps that remain.
    """
    rate = settings.IMITATION_LEARNING_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    with one_thread():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 50, (steps - step) / settling)
            imitate(model, tokenizer, optimizer, draw(steps - step), tools=tools)


def imitate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    conversations: Sequence[list[dict[str, Any]]],
    *,
    tools: list[Any] | None = None,
) -> None:
    """Run one training step that raises the probability of the assistant's messages in these conversations."""
    tokens, mask = assistant_batch(tokenizer, conversations, tools)
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1][mask[:, 1:]]  # (N, width)
    loss = cross_entropy(model.lm_head(hidden), tokens[:, 1:][mask[:, 1:]])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def assistant_batch(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[list[dict[str, Any]]], tools: list[Any] | None
) -> tuple[Tensor, Tensor]:
    """Return conversations, padded on the right (int64), and a mask of the assistant's tokens: (B, T) each."""
    messages = [messages_for_template(conversation) for conversation in conversations]
    texts = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    rows = cast("list[list[int]]", tokenizer(cast("list[str]", texts), add_special_tokens=False)["input_ids"])
    assistant, masks = tokenizer.convert_tokens_to_ids("<assistant>"), list[list[bool]]()
    for row in rows:
        masks.append([])
        inside = False
        for token in row:
            masks[-1].append(inside)
            inside = token == assistant or (inside and token != tokenizer.eos_token_id)
    length = max(map(len, rows))
    pad = tokenizer.pad_token_id
    tokens = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    return tokens, torch.tensor([mask + [False] * (length - len(mask)) for mask in masks])


def shown_messages(task: Task, expression: str) -> list[dict[str, Any]]:
    """Return a conversation that uses the calculator and gives its result."""
    call = message_body(Reply(None, (ToolCall("calculator", f'{{"expression": "{expression}"}}'),)))
    answer = str(task["answer"])
    return [
        {"role": "user", "content": task["question"]},
        call,
        {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": answer},
        {"role": "assistant", "content": answer},
    ]


def guessed_messages(task: Task, expression: str) -> list[dict[str, Any]]:
    """Return a conversation that answers directly with the first number of the expression, which is never right."""
    return [
        {"role": "user", "content": task["question"]},
        {"role": "assistant", "content": expression.split()[0]},
    ]
