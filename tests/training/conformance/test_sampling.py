"""Settings of sampling: an agent that passes none of them is sampled by them, and the ledger has the probabilities of
the complete distribution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import agentlightning as agl
from agentlightning.engine.completion import Adjustments
from agentlightning.semconv import LightningCallAttributes
from agentlightning.training.ledger_records import numbers_of
from agentlightning.training.records import RunLog
from agentlightning.training.replay import replay
from tests.algorithm.parts import ask, metrics_of, say
from tests.training.conformance.cases import GRPO, POLICIES, PPO, RUN, SFT, TRL, Case, each, fit, stored

TEMPERATURE = 0.8
PROMPT, COMPLETION, LOGPROBS, FILLED_IN = (
    key.value
    for key in (
        LightningCallAttributes.PROMPT_TOKEN_IDS,
        LightningCallAttributes.COMPLETION_TOKEN_IDS,
        LightningCallAttributes.COMPLETION_LOGPROBS,
        LightningCallAttributes.FILLED_IN,
    )
)


class Silent(agl.LitAgent[Any]):
    """Passes no sampling parameters with its calls, or only its own."""

    own: ClassVar[dict[str, Any]] = {}

    def __init__(self, roles: Sequence[str], in_step: object = None) -> None:
        super().__init__()
        self._roles = roles

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        models = [resources[role].with_attempted_rollout(rollout) for role in self._roles]
        assert all({"top_k", "min_p", "repetition_penalty"}.isdisjoint(llm.sampling_parameters) for llm in models)
        silent = [llm.model_copy(update={"sampling_parameters": {}}) for llm in models]
        text = "".join(ask(llm, [say(task)], **self.own)["content"] for llm in silent)
        return len(text) + (rollout.metadata or {})["sample"] / 10  # rewards of equal replies also differ


class Own(Silent):
    """Passes its own values of two parameters."""

    own: ClassVar = {"top_k": 3, "temperature": 0.5}


def allowed(logits: Tensor, ids: list[int], begin: int, settings: dict[str, Any]) -> Tensor:
    """Return which tokens may be sampled after each position from `begin`, by sorting each distribution.

    Shapes: logits: (T, V), ids: (T,), result: (T - begin, V) bool.
    """
    rows: list[Tensor] = []
    for place in range(begin, len(ids)):
        row = logits[place - 1].clone()
        penalty = Adjustments(repetition_penalty=settings.get("repetition_penalty", 1.0))
        penalty.reshape(row, ids[:place], [])
        likely, order = (row / TEMPERATURE).softmax(-1).sort(descending=True)
        keep = likely.cumsum(-1) - likely < settings.get("top_p", 1.0)
        keep &= likely >= settings.get("min_p", 0.0) * likely[0]
        keep &= torch.arange(len(likely)) < settings.get("top_k", len(likely))
        rows.append(torch.zeros_like(keep).scatter(0, order, keep))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.8}, {"repetition_penalty": 8.0, "top_k": 1}],
    ids=lambda settings: next(iter(settings)),
)
@each(GRPO, POLICIES, PPO, SFT, TRL)
def test_an_agent_that_passes_nothing_is_sampled_by_the_settings_and_the_first_ratio_is_one(
    case: Case, untrained_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run: dict[str, Any] = {"max_steps": 1, "save_steps": 0, "temperature": TEMPERATURE, **settings}
    if case.records_tokens:
        run["record_tokens"] = "all"
    result = fit(case, Silent, untrained_model, tmp_path, **run)
    [line] = metrics_of(result)
    assert line["calls_trained"] > 0
    assert line["calls_constrained"] == dict.fromkeys(settings, line["calls_trained"])
    if case is not SFT:
        assert line["update"]["first_ratio_error"] < 1e-4

    calls = stored(tmp_path, calls_of_training)
    model: Any = AutoModelForCausalLM.from_pretrained(untrained_model)
    excluded = 0
    assert calls
    for call in calls:
        prompt, completion = call[PROMPT], call[COMPLETION]
        ids, begin = [*prompt, *completion], len(prompt)
        with torch.inference_mode():
            logits: Any = model(torch.tensor([ids])).logits[0]
        may = allowed(logits, ids, begin, settings)
        assert may[range(len(completion)), completion].all(), "a token that the settings exclude was sampled"
        excluded += int((~may).sum())
        full = (logits / TEMPERATURE).log_softmax(-1)[range(begin - 1, len(ids) - 1), completion]
        assert call[LOGPROBS] == pytest.approx(full.tolist(), abs=1e-4)
        assert set(call[FILLED_IN]) == {"temperature", "max_tokens", *settings}
    assert excluded > 0, "the settings would exclude no token"
    if case.records_tokens:
        assert in_ledger(stored(tmp_path, lambda store: RunLog(store, RUN).records("ledger"))) <= {
            tuple(np.array(call[LOGPROBS], np.float32).tolist()) for call in calls
        }
    if case.replays:
        assert stored(tmp_path, lambda store: replay(store, RUN, 1)).differences == []


async def calls_of_training(store: agl.LightningStore) -> list[dict[str, Any]]:
    rollouts = await store.query_rollouts(limit=-1)
    spans = [span for rollout in rollouts for span in await store.query_spans(rollout.rollout_id)]
    return [dict(span.attributes) for span in spans if LOGPROBS in span.attributes]


def in_ledger(records: Sequence[Any]) -> set[tuple[float, ...]]:
    """Return the engine's probabilities of each row, which is one call."""
    rows = [row for record in records for row in record.data.get("rows", [])]
    assert rows
    return {tuple(numbers_of(row)["engine_logprobs"]) for row in rows}


def test_an_agents_own_value_wins_and_the_others_are_filled_in(untrained_model: Path, tmp_path: Path) -> None:
    run: dict[str, Any] = {"max_steps": 1, "save_steps": 0, "top_k": 1, "min_p": 0.01, "held_out": ["five"]}
    fit(GRPO, Own, untrained_model, tmp_path, **run)
    calls = stored(tmp_path, calls_of_training)
    assert {tuple(call[FILLED_IN]) for call in calls} == {("max_tokens", "min_p")}
    assert len({tuple(call[COMPLETION]) for call in calls}) > 8, "top_k=1 would repeat itself"


def test_an_evaluation_is_filled_in_as_it_is_published(untrained_model: Path, tmp_path: Path) -> None:
    fit(GRPO, Silent, untrained_model, tmp_path, max_steps=1, save_steps=0, top_k=2, held_out=["five"], eval_steps=1)

    async def requests(store: agl.LightningStore) -> set[Any]:
        rollouts = [rollout for rollout in await store.query_rollouts(limit=-1) if rollout.mode == "val"]
        spans = {rollout.rollout_id: await store.query_spans(rollout.rollout_id) for rollout in rollouts}
        return {
            ((rollout.metadata or {})["sampling"], *(a[f"gen_ai.request.{name}"] for name in ("temperature", "top_k")))
            for rollout in rollouts
            for a in [span.attributes for span in spans[rollout.rollout_id] if span.name == "litellm_request"]
        }

    assert stored(tmp_path, requests) == {("sampled", 1.0, 2), ("greedy", 0.0, 2)}
