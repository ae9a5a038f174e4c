"""What a run keeps an eye on: rollouts without a trainable call, and tokens that drift."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.errors import NoTrainableCallError, TooMuchDriftError
from agentlightning.training.drift_guard import DriftGuard
from agentlightning.training.ledger import RolloutRecord, read_rollout
from agentlightning.types import Attempt, Rollout, Span
from tests.adapter.span_maker import chat, gateway_call, reward
from tests.algorithm.parts import ask, fit, metrics_of, say, two_turns


def record(*spans: Span, outcome: str = "scored") -> RolloutRecord:
    rollout = Rollout(rollout_id="ro", input="task", start_time=0.0, mode="train", status="succeeded")
    attempt = Attempt(rollout_id="ro", attempt_id="at", sequence_id=1, start_time=0.0, status="succeeded")
    attempt.outcome = outcome  # type: ignore[assignment]
    return read_rollout(rollout, [attempt], [*spans, reward("r", None, 99, 1.0, sequence_id=99)])


def good() -> RolloutRecord:
    return record(*gateway_call("c", 1, [1], [2]))


def untrainable() -> RolloutRecord:
    return record(chat("seen", None, 1, 2, response_id="x", sequence_id=1))


def drifted() -> RolloutRecord:
    return record(*gateway_call("a", 1, [1, 2], [3, 4, 5]), *gateway_call("b", 2, [1, 2, 3, 45, 6, 7], [8]))


def test_a_first_step_without_any_trainable_call_ends_the_run_and_says_what_to_try() -> None:
    with pytest.raises(ValueError, match="None of the 2 rollouts") as raised:
        DriftGuard().untrainable([untrainable(), untrainable()])
    assert isinstance(raised.value, NoTrainableCallError)
    assert "1 model call seen by the tracer only" in str(raised.value)
    assert "llm.get_base_url(" in str(raised.value)


def test_some_rollouts_without_a_trainable_call_are_reported_once() -> None:
    guard = DriftGuard()
    assert guard.untrainable([good()]) is None
    report = guard.untrainable([untrainable(), good(), untrainable()])
    assert report is not None
    assert report.startswith("2 of 3 rollouts with a reward")
    assert "seen by the tracer only" in report
    assert guard.untrainable([untrainable()]) is None


def test_rollouts_that_failed_are_told_of_elsewhere() -> None:
    assert DriftGuard().untrainable([record(outcome="infrastructure_fault")]) is None


def test_the_drift_rate_is_that_of_the_whole_run() -> None:
    guard = DriftGuard()
    assert guard.drift_rate == 0.0
    guard.count_drift([good(), good()])
    guard.count_drift([drifted()])
    assert (guard.turns, guard.drifts, guard.drift_rate) == (4, 1, 0.25)


def test_a_run_beyond_its_limit_ends_with_an_example() -> None:
    guard = DriftGuard(max_drift=0.35, decode=lambda ids: "".join(chr(96 + id) for id in ids))
    guard.count_drift([good(), drifted()])
    with pytest.raises(TooMuchDriftError, match=r"2 of 5 turns .* \(40.0%, max_drift=0.35\)") as raised:
        guard.count_drift([drifted()])
    assert "1 2 3 | 4 5   'abcde'" in str(raised.value)
    assert "1 2 3 | 45 6 7" in str(raised.value)


def test_an_agent_that_calls_no_model_ends_the_run_in_its_first_step(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def silent(task: str, llm: agl.LLM) -> float:
        return 1.0

    told = r"no model call was seen at all: give the agent's client base_url=llm\.endpoint"
    with pytest.raises(NoTrainableCallError, match=told):
        fit(silent, ["a"], model=untrained_model, output_dir=tmp_path)


def test_an_agent_that_goes_silent_later_is_reported_and_the_run_goes_on(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @agl.rollout
    def sometimes(task: str, llm: agl.LLM) -> float:
        if task == "silent":
            return 0.5
        ask(llm, [say(task)])
        return 1.0

    with caplog.at_level(logging.WARNING):
        result = fit(sometimes, ["silent", "one"], model=untrained_model, output_dir=tmp_path)
    assert len(result.metrics) == 2
    told = [line.getMessage() for line in caplog.records if "no model call that can be trained" in line.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1: 4 of 8 rollouts")


@pytest.fixture(scope="module")
def forgetful_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose chat template leaves out what the assistant said."""
    folder = tmp_path_factory.mktemp("forgetful")
    tokenizer = make_tokenizer()
    turn = "<{{ m.role }}>{{ m.content if m.role == 'user' }}"
    tokenizer.chat_template = "{%- for m in messages %}" + turn + "{%- endfor %}<assistant>"
    make_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_run_that_allows_no_drift_ends_before_it_learns_from_it(forgetful_model: Path, tmp_path: Path) -> None:
    with pytest.raises(TooMuchDriftError, match=r"template, after \d+ equal tokens"):
        fit(two_turns, ["one"], model=forgetful_model, output_dir=tmp_path, max_drift=0.2)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_drift_rate_is_among_the_metrics(forgetful_model: Path, tmp_path: Path) -> None:
    result = fit(two_turns, ["one"], model=forgetful_model, output_dir=tmp_path)
    assert [line["drift_rate"] for line in metrics_of(result)] == [0.5, 0.5]
    assert [line["seams"]["template"] for line in metrics_of(result)] == [4, 4]


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "much"])
def test_a_limit_that_is_no_share_is_refused_by_name(value: object) -> None:
    with pytest.raises(agl.BadRequestError, match=r"max_drift must be a number of at least 0 and at most 1; got"):
        agl.GRPO(model="m", max_drift=value)
