"""Preference pairs from real rollouts: the pairs, the excluded rollouts with their counts, and the file for TRL."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import BadRequestError
from agentlightning.training.preferences import Conversation, pair_of, preference_pairs, write_pairs


def _conversation(name: str, reward: float, question: str = "q") -> Conversation:
    reply = [{"role": "assistant", "content": name}]
    return Conversation(name, reward, [{"role": "user", "content": question}], reply, None)


def test_the_best_stands_against_the_worst() -> None:
    pair = pair_of([_conversation("middle", 0.5), _conversation("best", 1.0), _conversation("worst", 0.0)], 0.2)
    assert pair == {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "best"}],
        "rejected": [{"role": "assistant", "content": "worst"}],
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
        "chosen_rollout": "best",
        "rejected_rollout": "worst",
    }


@pytest.mark.parametrize(
    ("rewards", "question", "margin", "reason"),
    [
        ([1.0], "q", 0.0, "too_few"),
        ([1.0, 1.0], "q", 0.0, "tie"),
        ([1.0, 0.5], "q", 0.5, "tie"),
        ([1.0, 0.0], "something else", 0.0, "prompts_differ"),
    ],
)
def test_what_cannot_be_compared_has_a_reason(rewards: list[float], question: str, margin: float, reason: str) -> None:
    first, *others = [_conversation(str(number), reward) for number, reward in enumerate(rewards)]
    others = [_conversation(each.rollout_id, each.reward, question) for each in others]
    assert pair_of([first, *others], margin) == reason


async def test_rollouts_of_a_run_become_pairs_and_crashes_are_counted(untrained_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.algorithm.parts import ask, fit, say

    numbers = itertools.count()
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(f"{task}, and the key is sk-abcdefghijklmnopqrstuvwxyz123456")], tools=[weather])
        number = next(numbers)
        if number % 4 == 3:
            raise RuntimeError("crashed")
        return 1.0 if task == "tie" else float(number % 4)

    store = agl.InMemoryLightningStore()
    settings: dict[str, Any] = {"max_steps": 1, "store": store, "output_dir": tmp_path / "run", "trainer_runner": None}
    await asyncio.to_thread(fit, agent, ["one", "tie"], model=untrained_model, **settings)
    with pytest.raises(BadRequestError, match="margin must be at least 0; got -1"):
        await preference_pairs(store, margin=-1)
    pairs = await preference_pairs(store)
    assert pairs.excluded == {"no_reward": 2, "tie": 1}
    path = tmp_path / "pairs.jsonl"
    write_pairs(pairs, path)
    (pair,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (2.0, 0.0)
    assert [message["role"] for message in pair["chosen"]] == ["assistant"]
    assert pair["tools"][0]["function"]["name"] == "weather"
    assert "sk-abcdef" not in path.read_text()
    with pytest.raises(BadRequestError, match="already exists"):
        write_pairs(pairs, path)


def test_trl_takes_a_pair_for_a_conversation(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl.data_utils", reason="trl is in an environment of its own: make test-trl")
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]

    pair = pair_of([_conversation("best", 1.0), _conversation("worst", 0.0)], 0.0)
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(pair) + "\n")
    (row,) = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert trl.is_conversational(row)
    assert trl.maybe_extract_prompt(dict(row))["chosen"] == [{"role": "assistant", "content": "best"}]
