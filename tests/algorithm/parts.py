"""Small real parts for the tests of whole GRPO runs: an untrained model, agents that call it, and ways to run them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter.calls.calls import ModelCall, model_calls
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.engine.served import dtype_of
from agentlightning.errors import BadRequestError
from agentlightning.store import LightningStore
from agentlightning.training.result import GRPOResult
from agentlightning.types import Rollout

SMALL = {
    "max_steps": 2,
    "batch_size": 2,
    "num_generations": 4,
    "learning_rate": 1e-3,
    "max_completion_length": 4,
    "progress": "none",
}
"""Settings of a run that takes a second."""


def _has_bfloat16() -> bool:
    try:
        dtype_of("cpu", bf16=True)
    except BadRequestError:
        return False
    return True


needs_bfloat16 = pytest.mark.skipif(
    not _has_bfloat16(),
    reason="this processor has no bfloat16 instructions: bf16=True is refused (test_precision.py tests the arithmetic)",
)


def save_untrained_model(folder: Path) -> Path:
    """Write the demo's model as it is made, with its tokenizer."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ask(llm: agl.LLM, messages: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Make one model call, as a client would, and return the assistant's message.

    Raises:
        urllib.error.HTTPError: the gateway answered with an error.
    """
    body = {"model": llm.model, "messages": list(messages), **llm.sampling_parameters, **fields}
    request = urllib.request.Request(
        f"{llm.endpoint}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        error.close()
        raise


def say(text: str) -> dict[str, str]:
    """A message of the user."""
    return {"role": "user", "content": text}


@agl.rollout
def wants_digits(task: str, llm: agl.LLM) -> float:
    """An agent that an untrained model can please: the reward is the share of digits in the reply."""
    reply = ask(llm, [say(task)])["content"]
    return sum(character.isdigit() for character in reply) / max(1, len(reply))


@agl.rollout
def two_turns(task: str, llm: agl.LLM) -> float:
    """An agent with two calls, the second of which continues the first."""
    messages: list[dict[str, Any]] = [say(task)]
    messages.append(ask(llm, messages))
    messages.append(say("go on"))
    reply = ask(llm, messages)["content"]
    return float(len(reply))


def fit(agent: Any, tasks: Sequence[Any], *, store: LightningStore | None = None, **settings: Any) -> GRPOResult:
    """Run GRPO with threads of this process and return its result. Settings of the Trainer begin with `trainer_`."""
    trainer_settings = {key.removeprefix("trainer_"): value for key, value in settings.items() if "trainer_" in key}
    grpo_settings = {key: value for key, value in settings.items() if "trainer_" not in key}
    val_dataset = grpo_settings.pop("val_dataset", None)
    trainer = agl.Trainer(
        algorithm=agl.GRPO(**{**SMALL, **grpo_settings}),
        **{
            "strategy": "shm",
            "store": store or agl.InMemoryLightningStore(),
            "runner": {"type": "agentlightning.LitAgentRunner", "concurrency": 4},
            **trainer_settings,
        },
    )
    trainer.fit(agent, train_dataset=tasks, val_dataset=val_dataset)
    return trainer.result


async def rollouts_of(store: LightningStore, mode: str = "train") -> list[Rollout]:
    """Return the rollouts of a mode in the order in which they were made."""
    return [rollout for rollout in await store.query_rollouts() if rollout.mode == mode]


async def calls_of(store: LightningStore, rollouts: Sequence[Rollout]) -> list[ModelCall]:
    """Return every model call that the store holds of the rollouts."""
    return [call for rollout in rollouts for call in model_calls(list(await store.query_spans(rollout.rollout_id)))]


def metrics_of(result: GRPOResult) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]


def refused(llm: agl.LLM, messages: Sequence[dict[str, Any]], **fields: Any) -> int:
    """Make a call that is refused, and return its HTTP status."""
    try:
        ask(llm, messages, **fields)
    except urllib.error.HTTPError as error:
        return error.code
    raise AssertionError("the call was answered")
