"""Searches for a prompt: APO, GEPA, and random prompts with the same number of rollouts."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import agentlightning as agl
from agentlightning.llm_proxy import LLMProxy
from bench.prompts.critic import edited

Method = Literal["apo", "gepa"]
BUDGET: Final = 2200
"""Most scores that GEPA may request, including repeated ones; APO's settings need 2,100 to 2,500 rollouts."""
RANDOM_BUDGET: Final = 2520
"""Rollouts of the random search if no other search ran with its seed: as many as the largest one."""
APO_SETTINGS: Final[dict[str, Any]] = {
    "gradient_batch_size": 10,
    "val_batch_size": 120,  # all of them: results of the beam are reused
    "beam_width": 2,
    "branch_factor": 2,
    "beam_rounds": 8,
}
GEPA_SETTINGS: Final[dict[str, Any]] = {
    "max_metric_calls": BUDGET,
    "reflection_minibatch_size": 10,
    "candidate_selection_strategy": "current_best",
}


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    template: str
    score: float
    """Reward of the best prompt on the validation tasks."""
    rollouts: int
    model_calls: int
    """Model calls of the critic."""
    seconds: float


@contextmanager
def scripted_critic(seed: int) -> Generator[agl.LLM]:
    """Start the critic in a separate process."""
    command = [sys.executable, "-m", "bench.prompts.critic", str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield agl.LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="scripted")
        finally:
            process.stdin.close()
            process.wait(10)


@dataclass(frozen=True)
class Bench:
    """An agent with its tasks, and the settings of its runs."""

    agent: Any
    train: Sequence[Any]
    validation: Sequence[Any]
    gateway: LLMProxy | None = None
    concurrency: int = 48

    def _resources(self, template: str) -> dict[str, Any]:
        prompt = agl.PromptTemplate(template=template, engine="f-string")
        return {"prompt": prompt, **({} if self.gateway is None else {"llm": self.gateway.as_resource()})}

    def _trainer(self, template: str, algorithm: Any = None) -> agl.Trainer:
        return agl.Trainer(
            algorithm=algorithm,
            initial_resources=self._resources(template),
            llm_proxy=self.gateway,
            strategy="shm",
            n_runners=1,
            runner={"concurrency": self.concurrency},
            progress="none",
        )

    def accuracy(self, template: str, tasks: Sequence[Any]) -> float:
        """Return the mean reward of a prompt.

        Raises:
            RuntimeError: a rollout has no reward.
        """
        result = self._trainer(template).evaluate(self.agent, list(tasks))
        rewards = [each.reward for each in result.rollouts if each.reward is not None]
        if len(rewards) != len(tasks):
            raise RuntimeError(f"only {len(rewards)} of {len(tasks)} rollouts earned a reward: {result}")
        return sum(rewards) / len(rewards)

    def search(self, method: Method, template: str, seed: int, **settings: Any) -> Found:
        """Search from a prompt with the scripted critic."""
        with scripted_critic(seed) as critic:
            algorithm: Any
            if method == "apo":
                algorithm = agl.APO[Any](critic, seed=seed, **{**APO_SETTINGS, **settings})
            else:
                algorithm = agl.GEPA[Any](critic, seed=seed, **{**GEPA_SETTINGS, **settings})
            trainer, began = self._trainer(template, algorithm), time.monotonic()
            trainer.fit(self.agent, train_dataset=list(self.train), val_dataset=list(self.validation))
        result = trainer.result
        return Found(
            template=result.best_prompt.template,
            score=result.best.score or 0.0,
            rollouts=result.rollouts,
            model_calls=result.bill.calls,
            seconds=time.monotonic() - began,
        )

    def random_search(self, template: str, seed: int, rollouts: int) -> Found:
        """Return the best of prompts with random training tasks as examples, with at most this number of rollouts.

        Each prompt has one to ten random examples and runs on all validation tasks; no failure is read.
        """
        rng, began, best = random.Random(f"random search {seed}"), time.monotonic(), (-1.0, template)
        count = rollouts // len(self.validation)
        for _ in range(count):
            drawn = rng.sample(list(self.train), rng.randint(1, 10))
            examples = [f"User: {task['text']}\nAssistant: {task['language']}\n" for task in drawn]
            candidate = edited(template, examples, rng)
            best = max(best, (self.accuracy(candidate, self.validation), candidate))
        return Found(best[1], best[0], count * len(self.validation), 0, time.monotonic() - began)
