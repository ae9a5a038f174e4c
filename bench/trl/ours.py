"""Our side: decoder, chat format, advantages and `Policy.update` in one process, without store, gateway and runners.

python -m bench.trl.ours FOLDER SEED STEPS
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.demo.agent import is_right
from agentlightning.demo.calculator import TOOLS, run_tool
from agentlightning.demo.measurement import measure
from agentlightning.demo.settings import MAX_COMPLETION_LENGTH, MAX_TURNS
from agentlightning.demo.tasks import Task
from agentlightning.engine.chat import ChatFormat, message_body
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.losses.advantages import rollout_advantages
from agentlightning.training.tasks import batch_iter_over_dataset
from bench.trl.shared import GROUP, LEARNING_RATE, TASKS, Run, cpu_seconds, tasks_of_demo


@dataclass
class Episode:
    task: Task
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    rows: list[Sample] = field(default_factory=list[Sample])
    reward: float | None = None

    def take(self, completion: Completion, chat_format: ChatFormat) -> None:
        """Add a completed call to its row, or to a new one if the prompt does not continue the last row's tokens, and
        run the tool."""
        if not self.rows or completion.prompt_ids[: len(self.rows[-1].token_ids)] != self.rows[-1].token_ids:
            self.rows.append(Sample(f"{id(self)}", "a", [], [], [], ["c"], [0]))
        row = self.rows[-1]
        prompt = completion.prompt_ids[len(row.token_ids) :]
        row.token_ids.extend([*prompt, *completion.token_ids])
        row.mask.extend([0] * len(prompt) + [1] * len(completion.token_ids))
        row.logprobs.extend([0.0] * len(prompt) + completion.logprobs)
        ended = completion.finish_reason == "stop"
        reply = chat_format.reply(completion.token_ids[:-1] if ended else completion.token_ids, with_tools=True)
        message = message_body(reply)
        self.messages.append(message)
        if not reply.tool_calls:
            self.reward = float(is_right(reply.content or "", self.task["answer"]))
        for call in message.get("tool_calls", ()):
            result = run_tool(call["function"]["name"], call["function"]["arguments"])
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def play(tasks: list[Task], decoder: Decoder, chat_format: ChatFormat, seeds: random.Random) -> list[Episode]:
    """Run a group of episodes for each task."""
    episodes = [Episode(task, [{"role": "user", "content": task["question"]}]) for task in tasks for _ in range(GROUP)]
    for _ in range(MAX_TURNS):
        running = [episode for episode in episodes if episode.reward is None]
        completions = [
            Completion(
                chat_format.prompt_ids(episode.messages, TOOLS), MAX_COMPLETION_LENGTH, 1.0, seed=seeds.getrandbits(63)
            )
            for episode in running
        ]
        generate(decoder, completions)
        for episode, completion in zip(running, completions, strict=True):
            episode.take(completion, chat_format)
    return episodes


def train(folder: str, seed: int, steps: int) -> Run:
    """Train for some steps and return the run's figures."""
    torch.set_num_threads(1)
    train_tasks, held_out = tasks_of_demo()
    policy = Policy.load(folder, learning_rate=LEARNING_RATE, seed=seed, max_tokens_per_forward=1 << 15)
    before = measure(policy.model, policy.tokenizer, held_out, seed=seed).accuracy
    decoder, chat_format = Decoder(policy.model, policy.eos_ids), ChatFormat(policy.tokenizer)
    batches, seeds = batch_iter_over_dataset(train_tasks, TASKS, random.Random(seed)), random.Random(seed)
    began, curve = cpu_seconds(), list[float]()
    for step in range(steps):
        episodes = play(next(batches), decoder, chat_format, seeds)
        rewards = [episode.reward or 0.0 for episode in episodes]
        advantages = rollout_advantages(rewards, [number // GROUP for number in range(len(rewards))])
        rate = LEARNING_RATE * (1 - step / steps)
        rows = [(row, a) for episode, a in zip(episodes, advantages, strict=True) for row in episode.rows]
        policy.update(
            [row for row, _ in rows], [a for _, a in rows], UpdateSettings(num_iterations=2, learning_rate=rate)
        )
        curve.append(sum(rewards) / len(rewards))
    spent = cpu_seconds() - began
    after = measure(policy.model, policy.tokenizer, held_out, seed=seed).accuracy
    return Run("ours", seed, spent, before, after, curve)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).print()
