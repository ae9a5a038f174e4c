"""Runs of GRPO that differ in one setting, from the same small model with random weights and on the same tasks.

The model replies with one token. What a run has learned is an exact probability, not an estimate from samples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch

import agentlightning as agl
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.engine.chat import ChatFormat
from agentlightning.evaluation.statistics import Interval, difference_interval
from agentlightning.training.learner.policy import Policy
from agentlightning.training.result import GRPOResult

SETTINGS: Final[dict[str, Any]] = {
    **{"max_steps": 24, "batch_size": 4, "num_generations": 8, "learning_rate": 1e-3, "max_completion_length": 1},
    **{"alarms": "none", "progress": "none"},
}


def train_each(
    agent: Any, tasks: Sequence[Any], seed: int, variants: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[GRPOResult, Path]]:
    """Yield the result of a run with each of the settings, and the folder of its model, which exists until the next."""
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        Policy(make_model(tokenizer, seed), tokenizer).save(Path(folder) / "model")
        for number, settings in enumerate(variants):
            run = Path(folder) / str(number)
            trainer = agl.Trainer(
                algorithm=agl.GRPO(
                    **{**SETTINGS, "model": Path(folder) / "model", "seed": seed, "output_dir": run, **settings}
                ),
                store=agl.InMemoryLightningStore(),
                strategy="shm",
                runner={"type": "agentlightning.LitAgentRunner", "concurrency": 16},
            )
            trainer.fit(agent, train_dataset=tasks)
            yield cast("GRPOResult", trainer.result), run / "model"


def probability(model: Path, questions: Sequence[str], right: str) -> float:
    """Return the mean probability that the reply to a question is one of the characters of `right`."""
    policy = Policy.load(model)
    chat_format, total = ChatFormat(policy.tokenizer), 0.0
    ids = cast("list[int]", policy.tokenizer.convert_tokens_to_ids(list(right)))
    with torch.no_grad():
        for question in questions:
            prompt = torch.tensor([chat_format.prompt_ids([{"role": "user", "content": question}], None)])
            likely = cast("Any", policy.model)(input_ids=prompt).logits[0, -1].float().softmax(-1)  # (V,)
            total += float(likely[ids].sum())
    return total / len(questions)


def difference(values: Sequence[tuple[float, float]]) -> Interval:
    """Return the mean difference of the second from the first values, with its 95 % interval over the seeds (Student's
    t)."""
    return difference_interval([second - first for first, second in values], 1.0, is_binary=False)
