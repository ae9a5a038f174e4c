"""TRL's side: `GRPOTrainer` with the demo's tool as a function.

python -m bench.trl.theirs FOLDER SEED STEPS
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agentlightning.demo.agent import is_right
from agentlightning.demo.calculator import calculate
from agentlightning.demo.measurement import measure
from agentlightning.demo.settings import EPSILON, EPSILON_HIGH, MAX_COMPLETION_LENGTH, MAX_TURNS
from bench.trl.shared import GROUP, LEARNING_RATE, TASKS, Run, cpu_seconds, tasks_of_demo

CALL = {
    "open": "<tool_call>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {"tool_calls": CALL, "content": {"close_pattern": r"<eos>\s*", "content": "text"}},
}


def calculator(expression: str) -> str:
    """Work out an expression with + - * / and parentheses.

    Args:
        expression: for example 34 + 5
    """
    return calculate(expression)


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each conversation whose last message is the right answer."""
    ends = [messages[-1] for messages in completions]
    return [
        float(end["role"] == "assistant" and not end.get("tool_calls") and is_right(end.get("content") or "", right))
        for end, right in zip(ends, answer, strict=True)
    ]


def train(folder: str, seed: int, steps: int) -> Run:
    """Train for some steps and return the run's figures."""
    torch.set_num_threads(1)
    train_tasks, held_out = tasks_of_demo()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = measure(model.eval(), tokenizer, held_out, seed=seed).accuracy
    data = [
        {"prompt": [{"role": "user", "content": task["question"]}], "answer": str(task["answer"])}
        for task in train_tasks
    ]
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            seed=seed,
            max_steps=2 * steps,
            num_iterations=2,
            per_device_train_batch_size=TASKS * GROUP,
            gradient_accumulation_steps=1,
            num_generations=GROUP,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="linear",
            adam_beta2=0.99,
            weight_decay=0.0,
            warmup_steps=0,
            max_grad_norm=1.0,
            epsilon=EPSILON,
            epsilon_high=EPSILON_HIGH,
            beta=0.0,
            temperature=1.0,
            max_completion_length=4 * MAX_COMPLETION_LENGTH,
            max_tool_calling_iterations=MAX_TURNS - 1,
            loss_type="dapo",
            scale_rewards="group",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            tools=[calculator],
        )
        began = cpu_seconds()
        trainer.train()
        spent = cpu_seconds() - began
    curve = [line["reward"] for line in trainer.state.log_history if "reward" in line][::2]
    after = measure(trainer.model.eval(), tokenizer, held_out, seed=seed).accuracy
    return Run("theirs", seed, spent, before, after, curve)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).print()
