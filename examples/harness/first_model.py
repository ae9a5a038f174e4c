"""A small model that solves some tasks and fails on most, from which training selects.

It is the demo's model with the vocabulary of these tasks. It first imitates conversations that solve them. Then, while
the learning rate falls, it mostly imitates wrong ones: it does not look for the name of the file, or counts something
else. It never sees a task of training or of the evaluation.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

from counting import FIRST, FLAGS, SECOND, SYSTEM, Task, draw

from agentlightning.demo.imitation import learn_by_imitation
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.training.learner.policy import Policy

END: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which mini-swe-agent ends."""
NOT_FOUND: Final = "/bin/sh: 1: cannot open file.txt: No such file"
TOOLS: Final = [{"type": "function", "function": {"name": "bash"}}]

STEPS: Final = 900
SETTLING: Final = 200  # the last steps, in which the learning rate falls to nothing
MIXED: Final = 120  # the last steps, in which most conversations are wrong
SHARE_LOOKING: Final = 0.4
SHARE_RIGHT: Final = 0.5  # of the commands after a look
BATCH: Final = 32


def make_first_model(folder: Path, seed: int = 0, steps: int = STEPS) -> None:
    """Write the model and its tokenizer to a folder."""
    rng = random.Random(f"first model {seed}")
    names = [f"{first}-{second}.txt" for first in FIRST.split() for second in SECOND.split()]
    tasks = [Task(unit, name, "") for name in names for unit in FLAGS]
    conversations = [_messages(task, right, right) for task in tasks for right in (True, False)]
    tokenizer = make_tokenizer(text for conversation in conversations for text in _texts(conversation))
    model = make_model(tokenizer, seed)

    def conversation(is_right: bool) -> list[dict[str, Any]]:
        task = draw("shown", rng)
        return _messages(task, is_right or rng.random() < SHARE_LOOKING, is_right or rng.random() < SHARE_RIGHT)

    def draw_conversations(remaining: int) -> list[list[dict[str, Any]]]:
        return [conversation(remaining > MIXED) for _ in range(BATCH)]

    learn_by_imitation(model, tokenizer, draw_conversations, steps=steps, settling=SETTLING, tools=TOOLS)
    Policy(model, tokenizer).save(folder)


def _texts(conversation: list[dict[str, Any]]) -> list[str]:
    calls = [call["function"] for message in conversation for call in message.get("tool_calls", [])]
    contents = [message["content"] for message in conversation if message["content"]]
    return [*contents, *(f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}' for call in calls)]


def _messages(task: Task, looks: bool, right: bool) -> list[dict[str, Any]]:
    """Return a conversation, as mini-swe-agent would make it."""
    unit = task.unit if right else {"words": "lines", "lines": "characters", "characters": "words"}[task.unit]
    count = Task(unit, task.file if looks else "file.txt", "").command
    turns = [("ls", f"{task.file}\n")] if looks else []
    turns.append((count, "" if looks else f"{NOT_FOUND}\n"))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.instruction},
    ]
    for number, (command, output) in enumerate([*turns, (END, "")]):
        call = {"name": "bash", "arguments": json.dumps({"command": command})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": output})
    return messages[:-1]
