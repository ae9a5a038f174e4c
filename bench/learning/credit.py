"""Rewards of calls (`turn_advantage_weight`) against the reward of the rollout alone, with an equal number of rollouts.

The policy is a small model with random weights. An agent makes two calls: the first reply must be a digit, the second
one a letter. The reward of the rollout is the sum over its calls. In `emitted`, the agent also emits the reward of each
call; in `lucky`, the reward of the second call does not depend on its reply, so that it only adds noise to the first.
The result is the mean probability of a right reply over prompts that no task has.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch

import agentlightning as agl
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.demo.tasks import make_tasks
from agentlightning.engine.chat import ChatFormat
from agentlightning.evaluation.statistics import Interval, difference_interval
from agentlightning.training.learner.policy import Policy
from bench.learning.game_policy import ask

Kind = Literal["emitted", "lucky"]
KINDS: Final[tuple[Kind, ...]] = ("emitted", "lucky")
STEPS: Final = 24
SETTINGS: Final[dict[str, Any]] = {"batch_size": 4, "num_generations": 8, "learning_rate": 1e-3}
RIGHT: Final = ("0123456789", "abcdefghijklmnopqrstuvwxyz")
"""Right replies of the first and of the second call."""
_LUCK: Final = 4.0


@agl.rollout
def two_calls(task: dict[str, Any], llm: agl.LLM) -> float:
    """Make both calls, emit the reward of each, and return their sum."""
    rewards: list[float] = []
    for turn, right in enumerate(RIGHT):
        reply = ask(llm, [{"role": "user", "content": f"{turn} {task['question']}"}])
        lucky = task["kind"] == "lucky" and turn == 1
        rewards.append(_LUCK * random.random() if lucky else float(reply != "" and reply in right))
        agl.emit_reward(rewards[-1])
    return sum(rewards)


@dataclass(frozen=True)
class Pair:
    """Results of one seed: probability of a right reply at the end, without and with the rewards of calls."""

    rollout: float
    calls: float


def compare(kind: Kind, seed: int) -> Pair:
    """Train twice from the same model, on the same tasks."""
    train, held_out = make_tasks(seed, train=24, held_out=64)
    tasks = [{**task, "kind": kind} for task in train]
    tokenizer = make_tokenizer()
    values: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        Policy(make_model(tokenizer, seed), tokenizer).save(Path(folder) / "model")
        for weight in (0.0, 1.0):
            random.seed(seed)
            run = Path(folder) / str(weight)
            settings = {**SETTINGS, "turn_advantage_weight": weight, **({"turn_gamma": 0.0} if weight else {})}
            trainer = agl.Trainer(
                algorithm=agl.GRPO(
                    model=Path(folder) / "model",
                    max_steps=STEPS,
                    max_completion_length=1,
                    alarms="none",
                    progress="none",
                    seed=seed,
                    output_dir=run,
                    **settings,
                ),
                store=agl.InMemoryLightningStore(),
                strategy="shm",
                runner={"type": "agentlightning.LitAgentRunner", "concurrency": 16},
            )
            trainer.fit(two_calls, train_dataset=tasks)
            turns = (0,) if kind == "lucky" else (0, 1)
            values.append(_value(run / "model", [task["question"] for task in held_out], turns))
    return Pair(*values)


def difference(pairs: Sequence[Pair]) -> Interval:
    """Return the mean difference of the values, with its 95 % interval over the seeds (Student's t)."""
    return difference_interval([pair.calls - pair.rollout for pair in pairs], 1.0, is_binary=False)


def _value(model: Path, questions: Sequence[str], turns: Sequence[int]) -> float:
    """Return the mean probability that the replies of these turns are right."""
    policy = Policy.load(model)
    chat_format = ChatFormat(policy.tokenizer)
    total = 0.0
    with torch.no_grad():
        for turn in turns:
            right = cast("list[int]", policy.tokenizer.convert_tokens_to_ids(list(RIGHT[turn])))
            for question in questions:
                message = {"role": "user", "content": f"{turn} {question}"}
                prompt = torch.tensor([chat_format.prompt_ids([message], None)])
                likely = cast("Any", policy.model)(input_ids=prompt).logits[0, -1].float().softmax(-1)  # (V,)
                total += float(likely[right].sum())
    return total / (len(turns) * len(questions))
