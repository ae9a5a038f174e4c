"""Causes of a run without learning: no trainable or scored call, refused calls, too many rows, tokens that drift."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.errors import NoScoredRolloutError, NoTrainableCallError, TooMuchDriftError
from tests.algorithm.parts import ask, fit, metrics_of, refused, rollouts_of, say, two_turns
from tests.stubs.model_server import ModelServer

SMALL: dict[str, Any] = {"max_steps": 1, "batch_size": 1, "num_generations": 2}
_rewards = iter(range(10_000))


# --- trainable calls -------------------------------------------------------------------------------------------------


def test_a_group_that_a_cache_answered_in_part_compares_the_others_and_says_once_what_to_do(
    untrained_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns, rewards = itertools.cycle(["cached", "call", "call", "cached"]), itertools.cycle([0.0, 1.0])

    @agl.rollout
    def cached(task: str, llm: agl.LLM) -> float:
        if next(turns) == "cached":
            return 100.0
        ask(llm, [say(task)])
        return next(rewards)

    with caplog.at_level(logging.WARNING):
        result = fit(cached, ["a"], model=untrained_model, output_dir=tmp_path, batch_size=1, scale_rewards="none")
    first, _ = result.metrics
    assert (first.calls_trained, first.rollouts_excluded, first.mean_reward) == (2, {"no_call": 2}, 0.5)
    lines = [line.getMessage() for line in caplog.records if "no model call can be used" in line.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("step 1: 2 of 4 rollouts")
    assert "enable_disk_cache=False" in lines[0]


class Listener(logging.Handler):
    """Records the warnings about an agent that bypasses the gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.reported = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "no model call through the gateway" in record.getMessage():
            self.texts.append(record.getMessage())
            self.reported.set()


@pytest.fixture
def listener() -> Iterator[Listener]:
    logger, handler = logging.getLogger("agentlightning.training.context"), Listener()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_an_agent_that_calls_no_model_is_reported_at_its_first_rollout_and_ends_the_run(
    untrained_model: Path, tmp_path: Path, listener: Listener
) -> None:
    first = iter([True])

    @agl.rollout
    def elsewhere(task: str) -> float:
        if not next(first, False):
            assert listener.reported.wait(30), "nothing was said while rollouts were open"
        return 1.0

    text = r"no model call was recorded: pass base_url=llm\.endpoint"
    with pytest.raises(
        NoTrainableCallError, match=f"No rollout with a reward in the first step \\(of 8\\)(.|\\n)*{text}"
    ):
        fit(elsewhere, ["a", "b"], model=untrained_model, output_dir=tmp_path)
    [report] = listener.texts
    assert "llm: agl.LLM" in report
    assert "OPENAI_BASE_URL" in report


def test_an_agent_whose_client_goes_to_the_model_server_itself_is_told_that_its_call_was_seen(
    untrained_model: Path, tmp_path: Path, listener: Listener
) -> None:
    openai: Any = pytest.importorskip("openai", reason="openai is not installed")

    with ModelServer(lambda request: "42") as server:

        @agl.rollout
        def direct(task: str) -> float:
            with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task}])
            return 1.0

        with pytest.raises(NoTrainableCallError, match="seen by the tracer only"):
            fit(direct, ["a"], model=untrained_model, output_dir=tmp_path)
    [report] = listener.texts
    assert "its tracer saw 1, sent elsewhere" in report


# --- refused calls ---------------------------------------------------------------------------------------------------


@agl.rollout
def swallows(task: str, llm: agl.LLM) -> float:
    """An agent whose framework swallows a refusal and continues with an empty text."""
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
    output = capsys.readouterr().out
    assert "rollouts 8 done 0 failed (not trained: refused_call 4)" in output
    assert output.count("4 of 8 rollouts had a permanently refused call") == 1
    assert "gpt-unknown" in output
    for rollout in await rollouts_of(store):
        [attempt] = await store.query_attempts(rollout.rollout_id)
        reason = "refused_call" if rollout.input == "refused" else None
        assert (attempt.status, attempt.outcome, attempt.outcome_reason) == ("succeeded", "scored", reason)


def test_a_setting_trains_them(untrained_model: Path, tmp_path: Path) -> None:
    result = fit(swallows, ["refused"], model=untrained_model, output_dir=tmp_path, refused_calls="train", **SMALL)
    assert result.metrics[0].rollouts_excluded == {}
    assert result.metrics[0].mean_reward == 0.0


_SCRIPT = """url=$OPENAI_BASE_URL/chat/completions
post() { curl -s -o /dev/null "$url" -H "authorization: Bearer $OPENAI_API_KEY" -H "content-type: application/json" \\
-d '{"model": "'$1'", "messages": [{"role": "user", "content": "a"}]}'; }
post policy
post gpt-unknown
echo 0.0
"""
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.mark.parametrize(
    "agent", [swallows, pytest.param(agl.CommandAgent(["bash", "-c", _SCRIPT], reward={0: 0.0}), marks=needs_curl)]
)
def test_a_run_whose_every_rollout_was_refused_ends_with_an_error(
    untrained_model: Path, tmp_path: Path, agent: Any
) -> None:
    with pytest.raises(NoScoredRolloutError, match=r"of 2, could be used .*: 2 refused_call.*gpt-unknown"):
        fit(agent, ["refused"], model=untrained_model, output_dir=tmp_path, **SMALL)
    assert (tmp_path / "model").is_dir()


def test_a_smoke_test_without_any_reward_says_so_and_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    @agl.rollout
    def broken(task: str) -> float:
        raise ValueError("the tool is missing")

    with caplog.at_level(logging.WARNING):
        agl.Trainer(algorithm="baseline", strategy="shm", initial_resources={}).fit(broken, train_dataset=["a"])
    messages = [line.getMessage() for line in caplog.records if line.getMessage().startswith("no rollout has a reward")]
    assert len(messages) == 1
    assert "1 infrastructure_fault" in messages[0]
    assert "ValueError: the tool is missing" in messages[0]


# --- rows ------------------------------------------------------------------------------------------------------------


@agl.rollout
def loops(task: str, llm: agl.LLM) -> float:
    """An agent whose calls do not continue each other: each begins a row."""
    for number in range({"short": 2, "long": 3, "longest": 5}[task]):
        ask(llm, [say(f"{task} {number}")])
    return 1.0 + next(_rewards)


@pytest.mark.parametrize("limit", [2, None])
async def test_rows_beyond_the_limit_are_excluded_with_a_reason_and_reported_once(
    untrained_model: Path, tmp_path: Path, limit: int | None
) -> None:
    store, tasks = agl.InMemoryLightningStore(), ["short", "long", "longest"]
    settings: dict[str, Any] = {"batch_size": 3, "num_generations": 2, "max_rows_per_rollout": limit, "store": store}
    where: dict[str, Any] = {"model": untrained_model, "output_dir": tmp_path, "trainer_run_id": "rows"}
    result = await asyncio.to_thread(fit, loops, tasks, **settings, **where)
    for figures in result.metrics:
        assert figures.calls_captured == 20
        assert figures.calls_trained == (20 if limit is None else 12)
        assert figures.calls_excluded == ({} if limit is None else {"row_limit": 8})
    texts = [each.data["text"] for each in await store.query_run_records("rows") if each.name == "row_limit"]
    assert len(texts) == (0 if limit is None else 1)
    for text in texts:
        assert text.startswith("step 1: 4 of 6 rollouts had more token rows than max_rows_per_rollout=2.")
        assert re.search(r"The largest, rollout ro-\w+, has 5 rows", text)


def test_supervised_fine_tuning_has_the_same_limit(untrained_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "max_completion_length": 4, "progress": "none", "output_dir": tmp_path}
    algorithm = agl.SFT(model=untrained_model, top_share=1.0, max_rows_per_rollout=2, **settings)
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", store=agl.InMemoryLightningStore())
    trainer.fit(loops, train_dataset=["longest"])
    [figures] = trainer.result.metrics
    assert (figures.calls_trained, figures.calls_excluded) == (4, {"row_limit": 6})


# --- drift -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forgetful_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose chat template drops the assistant's messages."""
    folder = tmp_path_factory.mktemp("forgetful")
    tokenizer = make_tokenizer()
    turn = "<{{ m.role }}>{{ m.content if m.role == 'user' }}"
    tokenizer.chat_template = "{%- for m in messages %}" + turn + "{%- endfor %}<assistant>"
    make_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_drift_is_among_the_metrics_and_ends_a_run_beyond_its_limit_before_it_learns(
    forgetful_model: Path, tmp_path: Path
) -> None:
    @agl.rollout
    def drifts_later(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        if (rollout.metadata or {})["step"] == 1:
            return float(len(ask(llm, [say(task)])["content"]))
        return two_turns(task, llm)

    settings: dict[str, Any] = {"model": forgetful_model, "output_dir": tmp_path, "batch_size": 1}
    with pytest.raises(TooMuchDriftError, match=r"4 of 12 turns .* \(33.3%, max_drift=0.3\)") as raised:
        fit(drifts_later, ["one"], max_drift=0.3, **settings)
    assert re.search(r"template, after \d+ equal tokens", str(raised.value))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    result = fit(drifts_later, ["one"], max_drift=0.4, **{**settings, "output_dir": tmp_path / "more"})
    assert [(line["drift_rate"], line["seams"]["template"]) for line in metrics_of(result)] == [(0.0, 0), (4 / 12, 4)]
