"""What keeps a run from learning: rollouts without a trainable or a scored call, refused calls, tokens that drift."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.errors import NoScoredRolloutError, NoTrainableCallError, TooMuchDriftError
from agentlightning.training.ledger import RolloutRecord, read_rollout
from agentlightning.training.run_checks import DriftGuard
from agentlightning.types import Attempt, Outcome, Rollout, Span
from tests.adapter.span_maker import chat, gateway_call, reward
from tests.algorithm.parts import ask, fit, metrics_of, refused, rollouts_of, say, two_turns
from tests.stubs.model_server import ModelServer

SMALL: dict[str, Any] = {"max_steps": 1, "batch_size": 1, "num_generations": 2}
_rewards = iter(range(10_000))


def record(*spans: Span, outcome: Outcome = "scored") -> RolloutRecord:
    rollout = Rollout(rollout_id="ro", input="task", start_time=0.0, mode="train", status="succeeded")
    fields: dict[str, Any] = {"sequence_id": 1, "start_time": 0.0, "status": "succeeded", "outcome": outcome}
    attempt = Attempt(rollout_id="ro", attempt_id="at", **fields)
    return read_rollout(rollout, [attempt], [*spans, reward("r", None, 99, 1.0, sequence_id=99)])


def good() -> RolloutRecord:
    return record(*gateway_call("c", 1, [1], [2]))


def untrainable() -> RolloutRecord:
    return record(chat("seen", None, 1, 2, response_id="x", sequence_id=1))


def drifted() -> RolloutRecord:
    return record(*gateway_call("a", 1, [1, 2], [3, 4, 5]), *gateway_call("b", 2, [1, 2, 3, 45, 6, 7], [8]))


# --- trainable calls -------------------------------------------------------------------------------------------------


def test_a_first_step_without_any_trainable_call_ends_the_run_and_says_what_to_try() -> None:
    with pytest.raises(ValueError, match="None of the 2 rollouts") as raised:
        DriftGuard().untrainable([untrainable(), untrainable()])
    assert isinstance(raised.value, NoTrainableCallError)
    assert "1 model call seen by the tracer only" in str(raised.value)
    assert "llm.get_base_url(" in str(raised.value)


def test_some_rollouts_without_a_trainable_call_are_reported_once_and_failed_ones_not_at_all() -> None:
    guard = DriftGuard()
    assert guard.untrainable([good()]) is None
    assert guard.untrainable([record(outcome="infrastructure_fault")]) is None
    report = guard.untrainable([untrainable(), good(), untrainable()])
    assert report is not None
    assert report.startswith("2 of 3 rollouts with a reward")
    assert "seen by the tracer only" in report
    assert guard.untrainable([untrainable()]) is None


def test_an_agent_that_calls_no_model_ends_the_run_in_its_first_step(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def silent(task: str, llm: agl.LLM) -> float:
        return 1.0

    told = r"no model call was seen at all: give the agent's client base_url=llm\.endpoint"
    with pytest.raises(NoTrainableCallError, match=told):
        fit(silent, ["a"], model=untrained_model, output_dir=tmp_path)


def test_a_cache_that_answers_is_reported_once_with_what_to_do_and_the_run_goes_on(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @agl.rollout
    def cached(task: str, llm: agl.LLM) -> float:
        if task == "call":
            ask(llm, [say(task)])
        return next(_rewards) % 3

    with caplog.at_level(logging.WARNING):
        result = fit(cached, ["call", "cached"], model=untrained_model, output_dir=tmp_path)
    assert len(result.metrics) == 2
    told = [line.getMessage() for line in caplog.records if "no model call that can be trained" in line.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1: 4 of 8 rollouts")
    assert "enable_disk_cache=False" in told[0]


def test_a_group_that_loses_members_compares_those_that_are_left(untrained_model: Path, tmp_path: Path) -> None:
    turns = iter(["cached", "call", "call", "cached"])
    rewards = iter([0.0, 1.0])

    @agl.rollout
    def cached(task: str, llm: agl.LLM) -> float:
        if next(turns) == "cached":
            return 100.0
        ask(llm, [say(task)])
        return next(rewards)

    settings: dict[str, Any] = {"max_steps": 1, "batch_size": 1, "scale_rewards": "none"}
    result = fit(cached, ["a"], model=untrained_model, output_dir=tmp_path, **settings)
    [figures] = result.metrics
    assert (figures.calls_trained, figures.rollouts_excluded) == (2, {"no_call": 2})
    assert figures.mean_reward == 0.5


def test_an_agent_that_goes_past_the_gateway_is_reported_at_its_first_rollout(
    untrained_model: Path, tmp_path: Path
) -> None:
    told = threading.Event()
    texts: list[str] = []
    first = iter([True])

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no model call through the gateway" in record.getMessage():
                texts.append(record.getMessage())
                told.set()

    @agl.rollout
    def elsewhere(task: str) -> float:
        if not next(first, False):
            assert told.wait(30), "nothing was said while rollouts were open"
        return 1.0

    logger = logging.getLogger("agentlightning.training.context")
    listener = Listener()
    logger.addHandler(listener)
    try:
        with pytest.raises(NoTrainableCallError):
            fit(elsewhere, ["a", "b"], model=untrained_model, output_dir=tmp_path)
    finally:
        logger.removeHandler(listener)
    assert len(texts) == 1
    assert "llm: agl.LLM" in texts[0]
    assert "OPENAI_BASE_URL" in texts[0]


def test_an_agent_whose_client_goes_to_the_model_server_itself_is_told_that_its_call_was_seen(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    openai: Any = pytest.importorskip("openai", reason="openai is not installed")

    with ModelServer(lambda request: "42") as server:

        @agl.rollout
        def direct(task: str) -> float:
            with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task}])
            return 1.0

        with caplog.at_level(logging.WARNING), pytest.raises(NoTrainableCallError, match="seen by the tracer only"):
            fit(direct, ["a"], model=untrained_model, output_dir=tmp_path)
    told = [line.getMessage() for line in caplog.records if "no model call through the gateway" in line.getMessage()]
    assert len(told) == 1
    assert "its tracer saw 1, which went elsewhere" in told[0]


# --- refused calls ---------------------------------------------------------------------------------------------------


@agl.rollout
def swallows(task: str, llm: agl.LLM) -> float:
    """An agent whose framework takes a refusal in and goes on with an empty text."""
    reply = ask(llm, [say("a")])["content"]
    if task == "refused":
        assert refused(llm, [say(reply), say("b")], model="gpt-unknown") == 404
        return 0.0
    return 1.0 + next(_rewards) % 3


async def test_a_rollout_that_took_a_refusal_in_is_not_trained_and_says_so_everywhere(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = agl.InMemoryLightningStore()
    settings: dict[str, Any] = {"store": store, "max_steps": 1, "progress": "plain"}
    result = await asyncio.to_thread(
        fit, swallows, ["refused", "fine"], model=untrained_model, output_dir=tmp_path, **settings
    )
    [figures] = result.metrics
    assert figures.rollouts_excluded == metrics_of(result)[0]["rollouts_excluded"] == {"refused_call": 4}
    assert figures.calls_excluded["refused_call"] == figures.calls_excluded["refused"] == 4
    assert figures.mean_reward >= 1.0
    told = capsys.readouterr().out
    assert "rollouts 8 done 0 failed (not trained: refused_call 4)" in told
    assert told.count("4 of 8 rollouts had a model call that was refused for good") == 1
    assert "gpt-unknown" in told
    for rollout in await rollouts_of(store):
        [attempt] = await store.query_attempts(rollout.rollout_id)
        reason = "refused_call" if rollout.input == "refused" else None
        assert (attempt.status, attempt.outcome, attempt.outcome_reason) == ("succeeded", "scored", reason)


def test_a_setting_trains_them(untrained_model: Path, tmp_path: Path) -> None:
    result = fit(swallows, ["refused"], model=untrained_model, output_dir=tmp_path, refused_calls="train", **SMALL)
    assert result.metrics[0].rollouts_excluded == {}
    assert result.metrics[0].mean_reward == 0.0


def test_a_run_whose_every_rollout_was_refused_ends_with_an_error(untrained_model: Path, tmp_path: Path) -> None:
    with pytest.raises(NoScoredRolloutError, match=r"of 16 rollouts 16 refused_call.*gpt-unknown"):
        fit(swallows, ["refused"], model=untrained_model, output_dir=tmp_path, batch_size=2, num_generations=8)
    assert (tmp_path / "model").is_dir()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_program_that_takes_a_refusal_in_is_not_trained_either(untrained_model: Path, tmp_path: Path) -> None:
    script = (
        "url=$OPENAI_BASE_URL/chat/completions\n"
        'post() { curl -s -o /dev/null "$url" -H "authorization: Bearer $OPENAI_API_KEY" '
        '-H "content-type: application/json" -d "$1"; }\n'
        'post \'{"model": "policy", "messages": [{"role": "user", "content": "a"}]}\'\n'
        'post \'{"model": "nobody", "messages": [{"role": "user", "content": "b"}]}\'\n'
        "echo 0.0\n"
    )
    agent = agl.CommandAgent(["bash", "-c", script], reward={0: 0.0})
    with pytest.raises(NoScoredRolloutError, match=r"of 2 rollouts 2 refused_call"):
        fit(agent, ["x"], model=untrained_model, output_dir=tmp_path, **SMALL)


def test_a_smoke_test_without_any_reward_says_so_and_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    @agl.rollout
    def broken(task: str) -> float:
        raise ValueError("the tool is missing")

    with caplog.at_level(logging.WARNING):
        agl.Trainer(algorithm="baseline", strategy="shm", initial_resources={}).fit(broken, train_dataset=["a"])
    told = [line.getMessage() for line in caplog.records if line.getMessage().startswith("no rollout has a reward")]
    assert len(told) == 1
    assert "1 infrastructure_fault" in told[0]
    assert "ValueError: the tool is missing" in told[0]


# --- drift -----------------------------------------------------------------------------------------------------------


def test_a_run_whose_whole_drift_rate_is_beyond_its_limit_ends_with_an_example() -> None:
    guard = DriftGuard(max_drift=0.35, decode=lambda ids: "".join(chr(96 + id) for id in ids))
    assert guard.drift_rate == 0.0
    guard.count_drift([good(), drifted()])
    assert (guard.turns, guard.drifts) == (3, 1)
    with pytest.raises(TooMuchDriftError, match=r"2 of 5 turns .* \(40.0%, max_drift=0.35\)") as raised:
        guard.count_drift([drifted()])
    assert "1 2 3 | 4 5   'abcde'" in str(raised.value)
    assert "1 2 3 | 45 6 7" in str(raised.value)


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
    assert [(line["drift_rate"], line["seams"]["template"]) for line in metrics_of(result)] == [(0.5, 4)] * 2


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "much"])
def test_a_limit_that_is_no_share_is_refused_by_name(value: object) -> None:
    with pytest.raises(agl.BadRequestError, match=r"max_drift must be a number of at least 0 and at most 1; got"):
        agl.GRPO(model="m", max_drift=value)
