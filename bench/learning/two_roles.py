"""Two agents of one rollout learn in one run: a planner writes an expression, a solver works it out with a calculator.

Each has its own policy and learns from its own calls; both start from the same small model, which has a right and a
wrong habit in either role. Only the answer is rewarded: the planner gets no feedback about its plan.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import agentlightning as agl
from agentlightning.demo import settings
from agentlightning.demo.agent import is_right
from agentlightning.demo.calculator import TOOLS, run_tool
from agentlightning.demo.imitation import shown_messages
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.demo.tasks import Task, draw_imitation_task, make_tasks
from agentlightning.engine.chat import messages_for_template
from agentlightning.engine.torch_setup import one_thread
from agentlightning.training.learner.policy import Policy
from bench.demo_grpo import demo_grpo

ROLES: Final = ["planner", "solver"]
STEPS: Final = 20
SKILL_STEPS, SETTLING_STEPS, MIXTURE_STEPS = 500, 200, 120
SHARE_RIGHT: Final = 0.45
"""Share of right conversations in the mixture, in either role."""


@dataclass(frozen=True)
class Outcome:
    """Held-out accuracy of both together, and the seconds of training."""

    before: float
    after: float
    seconds: float


@agl.rollout
def plan_and_solve(task: Task, planner: agl.LLM, solver: agl.LLM) -> float:
    """Run the agent: two roles, each with its own model."""
    plan = _ask(planner, [{"role": "user", "content": task["question"]}])
    messages: list[Any] = [{"role": "user", "content": plan.content or "?"}]
    for _ in range(settings.MAX_TURNS):
        reply = _ask(solver, messages, tools=TOOLS)
        if not reply.tool_calls:
            return 1.0 if is_right(reply.content or "", task["answer"]) else 0.0
        messages.append(reply)
        for call in reply.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def _ask(llm: agl.LLM, messages: list[Any], **more: Any) -> Any:
    client = _client().with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
    reply = client.chat.completions.create(
        model=llm.model, messages=messages, **more, **cast("Any", llm.sampling_parameters)
    )
    return reply.choices[0].message


@functools.cache
def _client() -> Any:
    """Return the one client: its copies share connections and TLS settings, which take 50 ms to make."""
    import openai

    return openai.OpenAI(base_url="http://127.0.0.1/", api_key="unused")


def train_two(folder: Path, seed: int, *, steps: int = STEPS, lora: dict[str, Any] | None = None) -> Outcome:
    """Make the first model, train both roles, and return the outcome."""
    make_first(folder / "model", seed)
    train, held_out = make_tasks(seed, held_out=128)
    trainer = agl.Trainer(
        algorithm=demo_grpo(
            model=folder / "model",
            policies=ROLES,
            lora=lora,
            max_steps=steps,
            minibatch_rollouts=settings.MINIBATCH_ROLLOUTS,
            learning_rate=settings.LEARNING_RATE if lora is None else 10 * settings.LEARNING_RATE,
            lr_scheduler_type="linear",
            seed=seed,
            output_dir=folder / "run",
        ),
        store=agl.InMemoryLightningStore(),
        strategy="shm",
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 16},
    )
    trainer.fit(plan_and_solve, train_dataset=train, val_dataset=held_out)
    result = trainer.result
    first, last = result.evaluation("sampled", last=False), result.evaluation("sampled", last=True)
    return Outcome(first.accuracy, last.accuracy, result.train_seconds)


def make_first(folder: Path, seed: int) -> None:
    """Write the model that both roles start from. It imitates right examples of both roles, then mostly wrong ones."""
    rng = random.Random(f"two roles {seed}")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    rate = settings.IMITATION_LEARNING_RATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    assistant, end = tokenizer.convert_tokens_to_ids("<assistant>"), tokenizer.eos_token_id
    with one_thread():
        for step in range(SKILL_STEPS + SETTLING_STEPS):
            remaining = SKILL_STEPS + SETTLING_STEPS - step
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 50, remaining / SETTLING_STEPS)
            right = 1.0 if remaining > MIXTURE_STEPS else SHARE_RIGHT
            tokens, mask = _batch(tokenizer, rng, right, assistant, end)
            hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1][mask[:, 1:]]  # (N, width)
            loss = cross_entropy(model.lm_head(hidden), tokens[:, 1:][mask[:, 1:]])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    Policy(model, tokenizer).save(folder)


def _batch(tokenizer: Any, rng: random.Random, right: float, assistant: int, end: int) -> tuple[Tensor, Tensor]:
    """Return conversations of both roles, padded on the right, and a mask of the assistant's tokens: (B, T) each."""
    rows: list[list[int]] = []
    for place in range(settings.IMITATION_BATCH):
        task, expression = draw_imitation_task(rng)
        is_right_one, first = rng.random() < right, expression.split()[0]
        planner = place % 2 == 0
        if planner:
            answer = expression if is_right_one else first
            shown = [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": answer}]
        elif is_right_one:
            shown = [{"role": "user", "content": expression}, *shown_messages(task, expression)[1:]]
        else:
            shown = [{"role": "user", "content": expression}, {"role": "assistant", "content": first}]
        tools = None if planner else TOOLS
        text = tokenizer.apply_chat_template(messages_for_template(shown), tools=tools, tokenize=False)
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    masks: list[list[bool]] = []
    for row in rows:
        masks.append([])
        inside = False
        for token in row:
            masks[-1].append(inside)
            inside = token == assistant or (inside and token != end)
    length = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    return tokens, torch.tensor([mask + [False] * (length - len(mask)) for mask in masks])
