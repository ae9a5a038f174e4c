"""How the rollouts of whole runs ended: refused calls, rewards without a call, and runs that learned nothing."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import NoScoredRolloutError, NoTrainableCallError
from tests.algorithm.parts import ask, fit, metrics_of, refused, rollouts_of, say
from tests.stubs.model_server import ModelServer

_rewards = iter(range(10_000))


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
    assert figures.rollouts_excluded == {"refused_call": 4}
    assert figures.calls_excluded["refused_call"] == figures.calls_excluded["refused"] == 4
    assert figures.mean_reward >= 1.0
    assert metrics_of(result)[0]["rollouts_excluded"] == {"refused_call": 4}
    told = capsys.readouterr().out
    assert "rollouts 8 done 0 failed (not trained: refused_call 4)" in told
    assert told.count("4 of 8 rollouts had a model call that was refused for good") == 1
    assert "gpt-unknown" in told
    for rollout in await rollouts_of(store):
        [attempt] = await store.query_attempts(rollout.rollout_id)
        reason = "refused_call" if rollout.input == "refused" else None
        assert (attempt.status, attempt.outcome, attempt.outcome_reason) == ("succeeded", "scored", reason)


def test_a_setting_trains_them(untrained_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"refused_calls": "train", "max_steps": 1, "batch_size": 1, "num_generations": 2}
    result = fit(swallows, ["refused"], model=untrained_model, output_dir=tmp_path, **settings)
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
        fit(agent, ["x"], model=untrained_model, output_dir=tmp_path, max_steps=1, batch_size=1, num_generations=2)


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


def test_a_cache_that_answers_is_told_once_with_what_to_do(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @agl.rollout
    def cached(task: str, llm: agl.LLM) -> float:
        if task == "call":
            ask(llm, [say(task)])
        return next(_rewards) % 3

    with caplog.at_level(logging.WARNING):
        fit(cached, ["call", "cached"], model=untrained_model, output_dir=tmp_path)
    told = [line.getMessage() for line in caplog.records if "no model call that can be trained" in line.getMessage()]
    assert len(told) == 1
    assert "enable_disk_cache=False" in told[0]


def test_an_agent_that_goes_past_the_gateway_is_told_of_at_its_first_rollout(
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
