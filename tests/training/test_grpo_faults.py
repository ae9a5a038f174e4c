"""Rewards that a loss cannot be computed from: the step is skipped, or they are excluded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.training.ledger import read_rollout
from agentlightning.training.rollouts import evidence
from agentlightning.types import Span
from tests.algorithm.parts import ask, fit, metrics_of, say

WEIGHT = 1e25
"""With it rewards within their bound are beyond 32-bit floats when they are compared."""
SKIPPED, TAKEN = [1e39, -1e39, 1e39, -1e39], [1.0, 0.0, 1.0, 0.0]
"""The rewards of a step of one group."""


def run(rewards: Iterator[float], model: Path, folder: Path, **settings: Any) -> Any:
    """Train one task with the rewards that the rollouts have one after the other."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> dict[str, float]:
        ask(llm, [say(task)])
        return {"reward": next(rewards) / WEIGHT}

    weighted = {"scale_rewards": "none", "reward_weights": {"reward": WEIGHT}, "batch_size": 1}
    return fit(agent, ["a"], model=model, output_dir=folder, **weighted, **settings)


def test_a_loss_that_is_not_finite_skips_the_step_counts_it_and_the_next_one_has_the_weights_that_are_there(
    untrained_model: Path, tmp_path: Path
) -> None:
    proxy = agl.LLMProxy()
    rewards = itertools.chain(SKIPPED, itertools.cycle(TAKEN))
    result = run(rewards, untrained_model, tmp_path, max_steps=3, trainer_llm_proxy=proxy)
    first, second, _ = metrics_of(result)
    assert (first["update"]["skipped_steps"], first["update"]["loss"]) == (1, None)
    assert first["calls_excluded"] == {"step_skipped": 4}
    assert (second["calls_trained"], second["update"]["steps"]) == (4, 1)
    assert result.steps == proxy.weight_version == 2


def test_a_skipped_step_does_not_count_when_another_one_follows(untrained_model: Path, tmp_path: Path) -> None:
    rewards = iter(SKIPPED + SKIPPED + TAKEN + SKIPPED + SKIPPED)
    assert run(rewards, untrained_model, tmp_path, max_steps=5).steps == 1


async def test_rewards_that_are_too_large_are_left_out_and_the_rest_is_trained(
    untrained_model: Path, tmp_path: Path
) -> None:
    rewards = itertools.cycle([1e308, 1.0, -1e200, 0.0, 10**400, 1.0, float("inf"), 0.0])

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        return next(rewards)

    settings: dict[str, Any] = {"model": untrained_model, "output_dir": tmp_path, "batch_size": 1, "max_steps": 1}
    [line] = metrics_of(await asyncio.to_thread(fit, agent, ["a"], num_generations=8, **settings))
    assert (line["calls_trained"], line["calls_excluded"]) == (4, {"infrastructure_fault": 4})


async def test_a_stored_reward_that_is_too_large_is_left_out_with_a_reason() -> None:
    """A store has such a reward from an older version, or from a program in another language."""
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout("task", mode="train")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1e308}
    await store.add_span(Span.from_attributes(attributes=attributes, rollout_id=ids[0], attempt_id=ids[1]))
    await store.update_attempt(*ids, status="succeeded", outcome="scored")
    rollout = await store.get_rollout_by_id(rollout.rollout_id)
    assert rollout is not None
    rollout_evidence = await evidence(store, rollout)
    assert (rollout_evidence.reward, rollout_evidence.attempts[0].reward) == (None, None)
    assert read_rollout(rollout, rollout_evidence.attempts, rollout_evidence.spans).verdict == "no_reward"
