"""The warm start: its examples, the same result for the same seed, and its error when it does not succeed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from agentlightning.demo import imitation, settings
from agentlightning.demo.agent import calc_agent
from agentlightning.demo.calculator import TOOLS
from agentlightning.demo.imitation import assistant_batch, guessed_messages, make_policy, shown_messages
from agentlightning.demo.measurement import measure
from agentlightning.demo.model import make_tokenizer
from agentlightning.demo.tasks import draw_imitation_task, make_tasks
from agentlightning.engine.engine import InferenceEngine
from agentlightning.training.learner.policy import Policy
from agentlightning.types import LLM


def test_what_is_shown_is_right_and_what_is_guessed_is_wrong() -> None:
    rng = random.Random(0)
    for _ in range(100):
        task, expression = draw_imitation_task(rng)
        shown, guessed = shown_messages(task, expression), guessed_messages(task, expression)
        assert [message["role"] for message in shown] == ["user", "assistant", "tool", "assistant"]
        assert shown[-1]["content"] == str(task["answer"])
        assert [message["role"] for message in guessed] == ["user", "assistant"]
        assert guessed[-1]["content"] != str(task["answer"])


def test_only_what_the_assistant_says_is_imitated() -> None:
    tokenizer = make_tokenizer()
    conversations = [shown_messages(*draw_imitation_task(random.Random(seed))) for seed in range(32)]
    tokens, masks = assistant_batch(tokenizer, conversations, TOOLS)
    taught = tokenizer.decode(tokens[0][masks[0]])
    assert taught.startswith("<tool_call>")
    assert taught.count("<eos>") == 2
    assert "<user>" not in taught
    assert "<tool>" not in taught
    assert not masks[tokens == tokenizer.pad_token_id].any()


def test_the_same_seed_gives_the_same_weights(quick_settings: None, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_policy(tmp_path / folder, seed=3)
    one, other = (LlamaForCausalLM.from_pretrained(tmp_path / folder).state_dict() for folder in ("a", "b"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.heavy
def test_a_start_that_does_not_come_about_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "IMITATION_MAX_STEPS", 50)
    with pytest.raises(RuntimeError, match="after 50 steps: Measured"):
        make_policy(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_the_agent_gets_through_the_engine_what_is_measured_without_it(
    quick_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(settings, "SETTLING_STEPS", 120)
    monkeypatch.setattr(settings, "SHARE_SHOWING_TOOL", 0.6)
    reports: list[Any] = []
    make_policy(tmp_path, on_progress=lambda steps, measured: reports.append((steps, measured)))
    assert [steps for steps, _ in reports] == [0, 120]
    policy = Policy.load(tmp_path)
    tasks = make_tasks(0, held_out=32)[1]
    measured = measure(policy.model, policy.tokenizer, tasks, temperature=0.0)

    engine = InferenceEngine(policy, max_new_tokens=settings.MAX_COMPLETION_LENGTH)
    engine.start()
    llm = LLM(endpoint=engine.base_url, model=engine.model_name, sampling_parameters={"temperature": 0.0})
    rewards: list[float] = []
    used_tool = 0
    for task in tasks:
        before = engine.stats().completions
        rewards.append(calc_agent(task, llm))
        used_tool += engine.stats().completions - before > 1
    engine.stop()
    assert used_tool > 0
    assert (sum(rewards) / len(tasks), used_tool / len(tasks)) == (measured.accuracy, measured.tool_use)


@pytest.fixture
def quick_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm start of ten steps that is content with anything."""
    monkeypatch.setattr(imitation.settings, "SKILL_BEFORE_SETTLING", 0.0)
    monkeypatch.setattr(imitation.settings, "SETTLING_STEPS", 10)
    monkeypatch.setattr(imitation.settings, "ACCURACY_AT_START", (0.0, 1.0))
    monkeypatch.setattr(imitation.settings, "GREEDY_AT_START", 1.0)
