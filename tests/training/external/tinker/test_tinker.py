"""agl.Tinker through its real client, against a service on this machine that computes with a small model."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter.calls.calls import model_calls
from agentlightning.base.process_secrets import secret
from agentlightning.errors import BadRequestError, EngineError
from agentlightning.training.result import GRPOResult
from tests.algorithm.parts import save_untrained_model

pytest.importorskip("tinker", reason="the package tinker is not installed: pip install 'agl-framework[tinker]'")

from tests.training.external.tinker.stub_service import KEY, MODEL, StubService

# the client leaves the connection of its first question open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained_model(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture
def service(model: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[StubService]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = StubService(model)
    with service.serving():
        yield service
    gc.collect()  # while the warning above is known


@agl.rollout
def says(task: dict[str, str], llm: agl.LLM) -> float:
    """Call the model once; the reward is 1 if the reply begins with one of a third of the words."""
    import openai

    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "unused") as client:
        messages: Any = [{"role": "user", "content": task["question"]}]
        reply = client.chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
    return float((reply.choices[0].message.content or "").strip()[:1] in tuple("aeiot0123"))


def train(
    service: StubService,
    folder_of_model: Path,
    folder: Path,
    *,
    store: agl.LightningStore | None = None,
    **settings: Any,
) -> GRPOResult:
    small: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "num_generations": 4, "learning_rate": 1e-3}
    chosen = {**small, "max_completion_length": 2, "progress": "none", "output_dir": folder, **settings}
    chosen = {"model": MODEL, "tokenizer": str(folder_of_model), "base_url": service.url, "rank": 8, **chosen}
    trainer = agl.Trainer(algorithm=agl.Tinker(**chosen), strategy="shm", store=store, run_id="a-run")
    trainer.fit(says, train_dataset=[{"question": str(number)} for number in range(4)])
    return trainer.result


async def test_the_tokens_that_the_service_sampled_are_those_that_it_learns_from(
    service: StubService, model: Path, tmp_path: Path
) -> None:
    store = agl.InMemoryLightningStore()
    result = train(service, model, tmp_path / "run", store=store, max_steps=1, num_generations=16)
    assert result.steps == 1
    (rows,) = service.rows
    drawn = {(*one["prompt"], *one["tokens"]): one["logprobs"] for one in service.sampled}
    for row in rows:
        whole = (row["tokens"][0], *row["target_tokens"])
        logprobs = drawn[whole]
        assert row["logprobs"][-len(logprobs) :] == pytest.approx(logprobs, rel=1e-6)
        assert not any(row["advantages"][: -len(logprobs)]), "nothing is learned from the prompt"
        assert len(set(row["advantages"][-len(logprobs) :])) == 1
    [step] = result.metrics
    assert step.update["first_ratio_error"] < 1e-4, "sampler and learner are the same weights"
    rollouts = await store.query_rollouts()
    calls = [call for one in rollouts for call in model_calls(await store.query_spans(one.rollout_id))]
    assert {call.weight_version for call in calls} == {0}
    assert {(*call.prompt_token_ids, *call.completion_token_ids) for call in calls} <= set(drawn)


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 0.001}])
def test_the_service_samples_as_the_settings_say(
    service: StubService, model: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    train(service, model, tmp_path / "run", max_steps=1, **setting)
    replies = {tuple(one["prompt"]): set[tuple[int, ...]]() for one in service.sampled}
    for one in service.sampled:
        replies[tuple(one["prompt"])].add(tuple(one["tokens"]))
    assert [len(texts) for texts in replies.values()] == [1, 1], "one token is likeliest"


@pytest.mark.slow
def test_rewards_rise(service: StubService, model: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 12, "batch_size": 4, "num_generations": 16, "learning_rate": 1e-2}
    result = train(service, model, tmp_path / "run", **settings)
    rewards = [step.mean_reward or 0.0 for step in result.metrics]
    assert sum(rewards[-3:]) / 3 >= rewards[0] + 0.3
    assert service.asked.count("optim_step") == result.steps
    place = json.loads((tmp_path / "run/model/tinker.json").read_text())
    assert place["sampler"].startswith("tinker://")


def test_a_run_goes_on_from_the_state_that_the_service_keeps(service: StubService, model: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    train(service, model, tmp_path / "run", store=store, num_generations=16, max_steps=1)
    states = set(service.states)
    result = train(service, model, tmp_path / "run", store=store, num_generations=16, max_steps=2)
    assert [step.step for step in result.metrics] == [1, 2]
    assert len(states) == 1
    assert (service.asked.count("load_weights"), service.ended) == (1, ["success", "success"])
    assert result.steps == 2
    service.states.clear()
    with pytest.raises(BadRequestError, match=r"the Tinker service did not return its state 'tinker://"):
        train(service, model, tmp_path / "run", store=store, num_generations=16, max_steps=3)


def test_the_key_leaves_the_environment_that_agents_inherit(service: StubService) -> None:
    agl.Tinker(MODEL, base_url=service.url)
    assert "TINKER_API_KEY" not in os.environ
    assert secret("TINKER_API_KEY") == KEY


@pytest.mark.parametrize(
    ("key", "settings", "error", "says"),
    [
        (None, {}, BadRequestError, "set the environment variable TINKER_API_KEY"),
        ("tml-another-key", {}, BadRequestError, "TINKER_API_KEY"),
        ("no key at all", {}, BadRequestError, "TINKER_API_KEY"),
        (KEY, {"model": "no/model"}, BadRequestError, "does not train model='no/model': .*unknown base model no/model"),
        (
            KEY,
            {"base_url": "http://127.0.0.1:9", "connect_seconds": 1},  # nobody listens there
            EngineError,
            r"\(http://127\.0\.0\.1:9\) did not respond within connect_seconds=1",
        ),
    ],
)
def test_a_run_that_the_service_does_not_begin_says_why(
    service: StubService,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    settings: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    if key is not None:
        monkeypatch.setenv("TINKER_API_KEY", key)
    with pytest.raises(error, match=says):
        train(service, model, tmp_path / "run", **settings)
    assert "forward_backward" not in service.asked


def test_a_step_that_the_service_fails_ends_the_run_and_its_session_and_says_at_what(
    service: StubService, model: Path, tmp_path: Path
) -> None:
    service.fails = lambda kind: "out of memory" if kind == "forward_backward" else None
    with pytest.raises(EngineError, match=r"failed during forward_backward: .*out of memory"):
        train(service, model, tmp_path / "run", num_generations=16)
    assert service.ended == ["errored"]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"learning_rat": 1e-4}, TypeError, "Did you mean 'learning_rate'"),
        ({"temperature": 0.5}, TypeError, "Tinker has no setting 'temperature'"),
        ({"min_p": 0.5}, TypeError, "Tinker has no setting 'min_p'"),
        ({"repetition_penalty": 1.5}, TypeError, "Tinker has no setting 'repetition_penalty'"),
        ({"top_k": -1}, BadRequestError, "top_k must be a whole number of at least 0"),
        ({"use_vllm": True}, TypeError, "Tinker has no setting 'use_vllm'"),
        ({"rank": 0}, BadRequestError, "rank"),
    ],
)
def test_a_setting_that_the_service_cannot_honour_is_refused(
    settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        agl.Tinker(model=MODEL, **settings)
