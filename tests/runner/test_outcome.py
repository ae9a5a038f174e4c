"""Every way in which an agent can end, and the state of the attempt in the store."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy
import pytest
from opentelemetry import trace as trace_api

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.emitter import emit_reward, find_final_reward, get_rewards_from_span
from agentlightning.errors import PolicyFault, RewardError
from agentlightning.litagent import LitAgent, llm_rollout, rollout
from agentlightning.runner.outcome import describe
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.trainer import Trainer
from agentlightning.types import LLM, AttemptedRollout, RolloutConfig, Span, SpanCoreFields, TraceStatus, Triplet


async def rewards(store: InMemoryLightningStore, attempted: AttemptedRollout) -> list[float]:
    spans = await store.query_spans(attempted.rollout_id)
    return [
        span.attributes["agentlightning.reward.0.value"]  # type: ignore[misc] -- a number
        for span in spans
        if "agentlightning.reward.0.value" in span.attributes
    ]


def said(attempted: AttemptedRollout) -> tuple[Any, ...]:
    attempt = attempted.attempt
    return attempted.status, attempt.status, attempt.outcome, attempt.outcome_reason


SCORED = ("succeeded", "succeeded", "scored", None)
UNSCORED = ("succeeded", "succeeded", "unscored", "no_reward")


def fault(reason: str) -> tuple[Any, ...]:
    return ("failed", "failed", "infrastructure_fault", reason)


@pytest.mark.parametrize("value", [0.5, 1, True, numpy.float32(0.5), 0])
async def test_a_number_is_the_reward(store: InMemoryLightningStore, serve: Any, value: Any) -> None:
    (finished,) = await serve(rollout(lambda task: value), "x")
    assert said(finished) == SCORED
    assert finished.attempt.error is None
    assert await rewards(store, finished) == [float(value)]


@pytest.mark.parametrize("value", [{"style": 0.2, "reward": 0.5}, {"reward": 0.5}, {"primary": 0.5, "style": 1}])
async def test_rewards_by_name_have_one_to_learn_from(
    store: InMemoryLightningStore, serve: Any, value: dict[str, float]
) -> None:
    (finished,) = await serve(rollout(lambda task: value), "x")
    assert said(finished) == SCORED
    assert await rewards(store, finished) == [0.5]
    [span] = await store.query_spans(finished.rollout_id)
    assert {one.name: one.value for one in get_rewards_from_span(span)} == value


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        ({"accuracy": 0.5}, 0.5),
        ({"style": 1.0, "accuracy": 0.25}, 0.25),
        ({"style": 0.75, "reward": 0.5}, "a dict of 'reward'; expected one of 'accuracy', 'style'"),
        ({"accuracy": 0.5, "answer": 8}, "a dict of 'answer'; expected one of 'accuracy', 'style'"),
        ({"style": 1.0}, "the rewards 'style' without 'accuracy'"),
    ],
)
def test_declared_dimensions_are_rewards_and_the_first_is_learnt_from(returned: dict[str, float], reward: Any) -> None:
    store = InMemoryLightningStore()
    trainer = Trainer(store=store, strategy="shm", progress="none", reward_dimensions=["accuracy", "style"])
    evaluation = trainer.evaluate(rollout(lambda task: returned), ["x"])
    if isinstance(reward, float):
        assert evaluation.rewards == [reward]
        return
    attempt = asyncio.run(store.get_latest_attempt(evaluation.tasks[0].rollouts[0].rollout_id))
    assert attempt is not None
    assert attempt.error is not None
    assert reward in attempt.error.message


def test_a_reward_fn_may_give_one_reward_of_any_name() -> None:
    trainer = Trainer(strategy="shm", progress="none", reward_fn=lambda output, task: {"exact": output["answer"] / 8})
    assert trainer.evaluate(rollout(lambda task: {"answer": 8}), ["x"]).rewards == [1.0]


@pytest.mark.parametrize(
    ("names", "error"), [("accuracy", TypeError), ([1], TypeError), (["a", "a"], ValueError), ([""], ValueError)]
)
def test_names_of_rewards_that_cannot_be_are_refused(names: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="reward_dimensions must be"):
        Trainer(reward_dimensions=names)


async def test_returned_triplets_are_the_calls_that_are_trained(store: InMemoryLightningStore, serve: Any) -> None:
    returned = [
        Triplet(
            prompt={"token_ids": [1, 2]},
            response={"token_ids": [3], "token_logprobs": [-0.5]},
            metadata={"finish_reason": "stop", "weight_version": 7},
        ),
        Triplet(prompt={"token_ids": [1, 2, 3, 4]}, response={"token_ids": [5, 6]}, reward=0.5),
        Triplet(prompt="what is it", response="a bird", reward=1.0),
    ]
    (finished,) = await serve(rollout(lambda task: returned), "x")
    assert said(finished) == SCORED
    spans = list(await store.query_spans(finished.rollout_id))
    assert find_final_reward(spans) == 1.0
    read = TracerTraceToTriplet().adapt(spans)
    assert [one.reward for one in read] == [None, 0.5, 1.0]
    assert [one.prompt["token_ids"] for one in read] == [[1, 2], [1, 2, 3, 4], []]
    assert read[0].response["token_logprobs"] == [-0.5]
    assert (read[0].metadata["finish_reason"], read[0].metadata["weight_version"]) == ("stop", 7)
    assert read[2].prompt["raw_content"] == [{"role": "user", "content": "what is it"}]
    assert read[2].response["raw_content"] == [{"role": "assistant", "content": "a bird"}]


async def test_emitted_rewards_count_and_the_returned_one_comes_last(store: InMemoryLightningStore, serve: Any) -> None:
    @rollout
    async def agent(task: float | None) -> float | None:
        emit_reward(0.1)
        trace_api.get_tracer("mine").start_span("work").end()
        return task

    finished = await serve(agent, None, 0.9)
    assert [said(one) for one in finished] == [SCORED] * 2
    assert [await rewards(store, one) for one in finished] == [[0.1], [0.1, 0.9]]


async def test_a_truth_value_is_a_reward_with_one_warning(
    store: InMemoryLightningStore, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    finished = await serve(rollout(lambda task: task == "yes"), "yes", "no", "yes")
    assert [await rewards(store, one) for one in finished] == [[1.0], [0.0], [1.0]]
    (line,) = [record for record in caplog.records if "The reward is not a number" in record.getMessage()]
    assert "True is used as 1. Return a float." in line.getMessage()


async def test_none_and_no_reward_is_unscored_with_one_warning(
    store: InMemoryLightningStore, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        finished = await serve(rollout(lambda task: None), "x", "y", "z")
    assert [said(one) for one in finished] == [UNSCORED] * 3
    assert caplog.text.count("no_reward") == 1


async def test_a_reward_that_somebody_else_stored_counts(store: InMemoryLightningStore, serve: Any) -> None:
    @rollout
    async def agent(task: str, rollout: AttemptedRollout) -> None:
        elsewhere = Span.from_core_fields(
            emit_reward(0.75, propagate=False),
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=-1,
        )
        await store.add_span(elsewhere)

    (finished,) = await serve(agent, "x")
    assert said(finished) == SCORED


async def test_a_crash_is_a_failed_attempt_with_its_traceback_and_no_reward(
    store: InMemoryLightningStore, serve: Any
) -> None:
    @rollout
    def agent(task: str) -> float:
        if task == "emits":
            emit_reward(0.5)
        raise ZeroDivisionError("by my own fault")

    finished, late = await serve(agent, "x", "emits")
    assert said(finished) == said(late) == fault("exception")
    error = finished.attempt.error
    assert error is not None
    assert (error.type, error.message) == ("ZeroDivisionError", "by my own fault")
    assert error.traceback is not None
    assert 'raise ZeroDivisionError("by my own fault")' in error.traceback
    first = error.traceback.splitlines()[1]
    assert __file__ in first, "it begins in the agent's code, not in ours"
    assert [await rewards(store, one) for one in (finished, late)] == [[], [0.5]], "what it had emitted is kept"


async def test_secrets_in_an_exception_are_hidden_before_it_is_stored(
    store: InMemoryLightningStore, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", "correct-horse-battery")

    @rollout
    def agent(task: str) -> float:
        raise ConnectionError(
            "https://u:hunter22@db?token=abcdefgh refuses " + "-".join(("correct", "horse", "battery"))
        )

    (finished,) = await serve(agent, "x")
    error = finished.attempt.error
    assert error is not None
    assert error.message == "https://u:[hidden]@db?token=[hidden] refuses [hidden]"
    assert error.traceback is not None
    assert not any(secret in error.traceback for secret in ("correct-horse", "hunter22", "abcdefgh"))  # nor its source


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def test_a_long_traceback_is_trimmed_and_a_broken_message_is_survived() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("é" * 100_000)

    try:
        deep(50)
    except ValueError as error:
        described = describe(error)
    assert len((described.traceback or "").encode()) <= 8192
    assert len(described.message.encode()) <= 4096
    assert describe(Broken()).message == "(its message cannot be read)"


@pytest.mark.parametrize(
    ("value", "reason", "text"),
    [
        (float("nan"), "invalid_reward", "finite"),
        (float("-inf"), "invalid_reward", "finite"),
        (numpy.float64("nan"), "invalid_reward", "finite"),
        (1e200, "invalid_reward", "the reward 1e+200; expected a finite number of at most 1e+15 in magnitude ("),
        (numpy.float32(-1e30), "invalid_reward", "at most 1e+15 in magnitude"),
        (10**400, "invalid_reward", "the reward inf"),
        ({"reward": 1.0, "style": -1e308}, "invalid_reward", "1e+15 in magnitude, got: -1e+308; scale or clip it"),
        ({"reward": 1.0, "style": 10**400}, "invalid_reward", "got: inf"),
        ([Triplet(prompt="p", response="r", reward=1e200)], "invalid_reward", "a triplet (number 0)"),
        ("1.0", "invalid_result", "returned a str ('1.0')"),
        ({"answer": "4"}, "invalid_result", "reward_fn"),
        ({}, "invalid_result", "reward_fn"),
        (
            {"right": 1.0, "style": 0.5},
            "invalid_result",
            "a dict of 'right', 'style'; expected",
        ),
        ({"answer": 8}, "invalid_result", "a dict of 'answer'; expected 'reward' or 'primary'"),
        ({"Reward": 1}, "invalid_result", "a dict of 'Reward'"),
        ({"reward": 1.0, "style": float("nan")}, "invalid_reward", "must be finite"),
        ([Triplet(prompt="p", response="r", reward=float("inf"))], "invalid_reward", "a triplet (number 0)"),
        ([Triplet(prompt="p", response="r"), 1.0], "invalid_result", "a list of Triplet, float"),
        ([1.0, 2.0], "invalid_result", "a list of float, float"),
        ([Span.from_attributes(attributes={}), 1.0], "invalid_result", "a list of Span, float"),
        ([Span.from_attributes(attributes={}, rollout_id="another")], "invalid_result", "belongs to rollout 'another'"),
    ],
)
async def test_what_is_no_reward_is_a_fault_with_a_clear_error(
    store: InMemoryLightningStore, serve: Any, value: Any, reason: str, text: str
) -> None:
    (finished,) = await serve(rollout(lambda task: value), "x")
    assert said(finished) == fault(reason)
    assert finished.attempt.error is not None
    assert text in finished.attempt.error.message
    assert await rewards(store, finished) == []


async def test_a_policy_fault_earns_exactly_its_reward(store: InMemoryLightningStore, serve: Any) -> None:
    @rollout
    def agent(task: str) -> float:
        emit_reward(0.9)
        raise PolicyFault("called a tool that does not exist", reward=-0.5)

    (finished,) = await serve(agent, "x")
    assert said(finished) == ("failed", "failed", "policy_fault", "policy_fault")
    assert await rewards(store, finished) == [0.9, -0.5]
    assert finished.attempt.error is not None
    assert finished.attempt.error.message == "called a tool that does not exist"


async def test_exceptions_may_be_declared_the_fault_of_the_policy(store: InMemoryLightningStore, serve: Any) -> None:
    @rollout
    def agent(task: type[Exception]) -> float:
        raise {"json": ValueError, "unicode": UnicodeError, "key": KeyError}[str(task)]("x")

    finished = await serve(agent, "json", "unicode", "key", policy_faults={ValueError: 0.0, UnicodeError: -1.0})
    assert [one.attempt.outcome for one in finished] == ["policy_fault", "policy_fault", "infrastructure_fault"]
    assert [await rewards(store, one) for one in finished] == [[0.0], [-1.0], []]


@pytest.mark.parametrize(
    "emitted",
    [
        *({"reward": reward} for reward in (1e16, 10**400, float("nan"), "good", {"style": 1.0})),
        *({"reward": 1.0, "target": target} for target in ("call", "agent", "everything")),
        {"reward": 1.0, "attributes": {"score": None}},
    ],
    ids=str,
)
async def test_a_reward_that_is_refused_is_no_fault_of_the_policy_by_a_class_above(
    serve: Any, emitted: dict[str, Any]
) -> None:
    @rollout
    def agent(task: str) -> None:
        emit_reward(**emitted)

    for named in (ValueError, TypeError, Exception):
        (finished,) = await serve(agent, "x", policy_faults={named: 0.0})
        assert said(finished) == fault("exception")
    (finished,) = await serve(agent, "x", policy_faults={RewardError: -1.0})
    assert finished.attempt.outcome == "policy_fault"


@pytest.mark.parametrize("reward", [float("nan"), 1e200, 10**400])
async def test_a_policy_fault_or_reward_fn_with_an_impossible_reward_is_an_invalid_reward(
    store: InMemoryLightningStore, serve: Any, reward: float
) -> None:
    @rollout
    def agent(task: str) -> Any:
        if task == "text":
            return task
        raise PolicyFault("x", reward=reward)

    finished = await serve(agent, "x", "text", reward_fn=lambda output: reward)
    assert [said(one) for one in finished] == [fault("invalid_reward")] * 2
    assert [await rewards(store, one) for one in finished] == [[], []]
    assert "reward_fn" in (finished[1].attempt.error.message if finished[1].attempt.error else "")


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), BaseException("odd")])
async def test_no_exception_class_whatever_is_a_success(serve: Any, error: BaseException, in_thread: bool) -> None:
    def sync_agent(task: str) -> float:
        raise error

    async def async_agent(task: str) -> float:
        await asyncio.sleep(0)
        raise error

    (first, second) = await serve(rollout(sync_agent if in_thread else async_agent), "x", "y")
    assert said(first) == said(second) == fault("exception")


async def test_an_agent_that_cancels_itself_ends_itself_and_not_the_runner(serve: Any) -> None:
    @rollout
    async def agent(task: str) -> float:
        if task == "x":
            raise asyncio.CancelledError
        return 1.0

    first, second = await serve(agent, "x", "y")
    assert said(first) == ("failed", "failed", "cancelled", "cancelled")
    assert said(second) == SCORED


async def test_an_async_agent_is_cancelled_at_its_time_limit(serve: Any) -> None:
    ended = asyncio.Event()

    @rollout
    async def agent(task: str) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    (finished,) = await serve(agent, "x", config=RolloutConfig(timeout_seconds=0.05))
    assert said(finished) == ("failed", "timeout", "cancelled", "timeout")
    assert ended.is_set()


async def test_a_sync_agent_in_a_thread_past_its_time_limit_is_left_behind_with_a_warning(
    store: InMemoryLightningStore, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    release, late = threading.Event(), threading.Event()

    @rollout
    def agent(task: str) -> float:
        release.wait(30)
        try:
            emit_reward(1.0)
        except RuntimeError:
            late.set()
        return 1.0

    with caplog.at_level(logging.WARNING):
        (finished,) = await serve(agent, "x", config=RolloutConfig(timeout_seconds=0.05), concurrency=2)
    release.set()
    assert said(finished) == ("failed", "timeout", "cancelled", "timeout")
    assert "abandoned" in caplog.text
    assert await asyncio.to_thread(late.wait, 10)
    assert await rewards(store, finished) == []


async def test_a_time_limit_may_be_retried(store: InMemoryLightningStore, serve: Any) -> None:
    attempts: list[str] = []

    @rollout
    async def agent(task: str, rollout: AttemptedRollout) -> float:
        attempts.append(rollout.attempt.attempt_id)
        if len(attempts) == 1:
            await asyncio.Event().wait()
        return 1.0

    config = RolloutConfig(timeout_seconds=0.05, max_attempts=2, retry_condition=["timeout"])
    (finished,) = await serve(agent, "x", config=config, max_rollouts=2)
    first, second = await store.query_attempts(finished.rollout_id)
    assert [first.attempt_id, second.attempt_id] == attempts
    assert (first.outcome, second.outcome, finished.status) == ("cancelled", "scored", "succeeded")


async def test_missing_resources_fail_the_attempt_with_that_reason(store: InMemoryLightningStore, serve: Any) -> None:
    @llm_rollout
    def agent(task: str, llm: LLM) -> float:
        return 1.0

    (finished,) = await serve(agent, "x")
    assert said(finished) == fault("missing_resources")
    unknown = await store.enqueue_rollout(input="y", resources_id="rs-unknown")
    await serve(rollout(lambda task: 1.0), "z")
    missing = await store.get_rollout_by_id(unknown.rollout_id)
    assert isinstance(missing, AttemptedRollout)
    assert missing.attempt.outcome_reason == "missing_resources"


async def test_a_class_agent_may_say_that_it_needs_no_resources(serve: Any) -> None:
    class Agent(LitAgent[str]):
        needs_resources = False

        def rollout(self, task: str, resources: Any, rollout: Any) -> float:
            return float(resources == {})

    (finished,) = await serve(Agent(), "x")
    assert said(finished) == SCORED


async def test_the_agent_gets_the_version_that_the_rollout_was_made_with(
    store: InMemoryLightningStore, serve: Any
) -> None:
    models: list[str] = []

    @llm_rollout
    def agent(task: str, llm: LLM) -> float:
        models.append(llm.model)
        return 1.0

    made = await store.add_resources({"llm": LLM(endpoint="http://x", model="one")})
    await store.enqueue_rollout(input="old")
    await store.update_resources(made.resources_id, {"llm": LLM(endpoint="http://x", model="two")})
    await store.enqueue_rollout(input="new")
    await serve(agent, "third", "fourth")
    await serve(agent, "fifth", "sixth")
    assert models == ["one", "two", "two", "two"]


async def test_returned_spans_are_stored_as_the_attempts_own(store: InMemoryLightningStore, serve: Any) -> None:
    @rollout
    def core(task: str) -> Any:
        return [
            SpanCoreFields(
                name="mine",
                status=TraceStatus(status_code="OK"),
                attributes={"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5},
                start_time=1.0,
                end_time=2.0,
            )
        ]

    @rollout
    def otel(task: str) -> Any:
        span = trace_api.get_tracer("mine").start_span("mine")
        span.end()
        return [span]

    (scored,) = await serve(core, "x")
    assert said(scored) == SCORED
    (unscored,) = await serve(otel, "x")
    assert said(unscored) == UNSCORED
    for finished in (scored, unscored):
        assert [span.name for span in await store.query_spans(finished.rollout_id)] == ["mine"]


class Judge:
    """A reward function as an object."""

    def __call__(self, output: Any, expected: Any) -> float:
        return float(output == expected["answer"])


async def by_name(*, spans: list[Span], task: Any, output: Any, rollout: AttemptedRollout) -> float:
    assert rollout.input == task
    return len(spans) + float(output == task["answer"])


def by_place(reply: Any, row: Any, /) -> float:
    return float(reply == row["answer"])


@pytest.mark.parametrize("reward_fn", [Judge(), by_name, by_place])
async def test_a_reward_fn_scores_what_is_no_reward(store: InMemoryLightningStore, serve: Any, reward_fn: Any) -> None:
    agent = rollout(lambda task: task["said"])
    good, bad = await serve(agent, {"said": "4", "answer": "4"}, {"said": "5", "answer": "4"}, reward_fn=reward_fn)
    assert said(good) == said(bad) == SCORED
    assert [await rewards(store, good), await rewards(store, bad)] == [[1.0], [0.0]]


async def test_a_reward_fn_is_not_asked_about_numbers_none_and_spans(serve: Any) -> None:
    def never(output: Any, task: Any) -> float:
        raise AssertionError(output)

    finished = await serve(rollout(lambda task: {"n": 1.0, "none": None}[task]), "n", "none", reward_fn=never)
    assert [one.attempt.outcome for one in finished] == ["scored", "unscored"]


@pytest.mark.parametrize("value", [1e200, -1e308, float("nan")])
async def test_a_reward_too_large_that_nothing_could_refuse_is_a_fault(serve: Any, value: float) -> None:
    """A program in another language emits the reward, through a tracer of its own."""

    @rollout
    def agent(task: str) -> None:
        attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
        trace_api.get_tracer("theirs").start_span("agentlightning.annotation", attributes=attributes).end()

    (finished,) = await serve(agent, "x")
    assert said(finished) == fault("invalid_reward")
    assert "at most 1e+15 in magnitude" in (finished.attempt.error.message if finished.attempt.error else "")


async def test_a_reward_fn_that_gives_a_text_is_a_fault(serve: Any) -> None:
    (finished,) = await serve(rollout(lambda task: "text"), "x", reward_fn=lambda output: "good")
    assert said(finished) == fault("invalid_reward")
    assert "reward_fn" in (finished.attempt.error.message if finished.attempt.error else "")


async def test_a_reward_fn_may_give_none_or_a_policy_fault(store: InMemoryLightningStore, serve: Any) -> None:
    def reward_fn(output: str) -> None:
        if output == "bad":
            raise PolicyFault("not even JSON", reward=-1.0)

    finished = await serve(rollout(lambda task: task), "text", "bad", reward_fn=reward_fn)
    assert [one.attempt.outcome for one in finished] == ["unscored", "policy_fault"]
    assert await rewards(store, finished[1]) == [-1.0]
