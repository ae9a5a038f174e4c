"""Budgets of rollouts: the refusal of a call past one names it, and the attempt has it as its reason."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.llm_proxy import GatewayLimits
from agentlightning.runner import LitAgentRunner
from agentlightning.tracer.otel import OtelTracer
from agentlightning.training.ledger import read_rollout
from agentlightning.types import AttemptedRollout
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import Fault, ModelServer


async def test_a_rollout_that_has_used_up_its_tokens_makes_no_further_call() -> None:
    async with GatewayHarness(limits=GatewayLimits(tokens_per_rollout=10)) as harness:
        attempt, other = await harness.attempt(), await harness.attempt()
        answers = [await harness.ask("one two three four five six", of=attempt) for _ in range(3)]
        assert [status for status, _ in answers] == [200, 429, 429]
        error = answers[1][1]["error"]
        assert error["code"] == "budget_exhausted"
        assert "of 10 (tokens)" in error["message"]
        assert len(harness.model.calls) == 1
        assert await harness.states(attempt) == ["ok", "refused", "refused"]
        assert (await harness.ask(of=other))[0] == 200


async def test_every_attempt_of_a_rollout_draws_on_the_same_budget() -> None:
    async with GatewayHarness(limits=GatewayLimits(tokens_per_rollout=10)) as harness:
        first = await harness.attempt()
        await harness.ask("one two three four five six", of=first)
        await harness.store.update_attempt(first.rollout_id, "latest", status="failed")
        again = await harness.store.start_attempt(first.rollout_id)
        assert (await harness.ask(of=again))[0] == 429


async def test_a_budget_in_money_counts_by_the_prices_of_the_model() -> None:
    model = ModelServer(answer=lambda request: "a b c d")
    async with GatewayHarness(model, limits=GatewayLimits(cost_per_rollout=1.0)) as harness:
        entry = model.entry("policy", input_cost_per_token=0.0, output_cost_per_token=0.2)
        harness.proxy.update_model_list([entry])
        assert [(await harness.ask())[0] for _ in range(3)] == [200, 200, 429]


async def test_an_engine_without_token_ids_is_counted_by_what_it_says() -> None:
    async with GatewayHarness(ModelServer(tokens=False), limits=GatewayLimits(tokens_per_rollout=5)) as harness:
        assert [(await harness.ask())[0] for _ in range(2)] == [200, 429]


async def test_all_prompts_of_a_call_count_and_each_only_once() -> None:
    async with GatewayHarness(limits=GatewayLimits(tokens_per_rollout=30)) as harness:
        body = {"model": "policy", "prompt": ["a b c d e f"] * 4}
        twice, once = await harness.attempt(), await harness.attempt()
        choices = [
            {"index": i, "token_ids": [1], "prompt_token_ids": [1] * 10, "text": "x", "finish_reason": "stop"}
            for i in range(4)
        ]
        for attempt, fields, status in ((twice, {"prompt": ["a", "b"], "n": 2}, 200), (once, {}, 429)):
            harness.model.faults.append(Fault(body=json.dumps({"id": "c", "choices": choices}).encode()))
            url = harness.url("/completions", of=attempt)
            assert (await harness.post(url, {**body, **fields}))[0] == 200
            assert (await harness.post(url, body))[0] == status


@pytest.mark.parametrize("wrong", [{"tokens_per_rollout": 0}, {"cost_per_rollout": -1.0}])
def test_a_bound_must_be_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GatewayLimits(**wrong)


def test_a_price_must_be_a_number() -> None:
    from agentlightning.llm_proxy import LLMProxy

    entry = ModelServer().entry("policy", input_cost_per_token="cheap")
    with pytest.raises(ValueError, match="input_cost_per_token must be a number"):
        LLMProxy(model_list=[entry])


# --- what becomes of the attempt -------------------------------------------------------------------------------------


def openai_agent(raise_as: type[Exception] | None = None) -> Any:
    """Return an agent that asks three times; `raise_as` hides its library's error behind one of its own."""

    async def ask(task: str, llm: agl.LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "any", max_retries=0) as client:
            try:
                for _ in range(3):
                    await client.chat.completions.create(
                        model=llm.model, messages=[{"role": "user", "content": "one two three four five"}]
                    )
            except openai.OpenAIError:
                if raise_as is None:
                    raise
            if raise_as is not None:
                raise raise_as("the model does not answer")
        return 1.0

    return agl.rollout(ask)


async def rollout_of(harness: GatewayHarness, agent: Any) -> AttemptedRollout:
    resources = await harness.store.add_resources({"llm": harness.proxy.as_resource()})
    made = await harness.store.enqueue_rollout(input="x", mode="train", resources_id=resources.resources_id)
    runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), max_rollouts=1)
    with runner.run_context(agent=agent, store=harness.store):
        await runner.iter()
    rollout = await harness.store.get_rollout_by_id(made.rollout_id)
    assert isinstance(rollout, AttemptedRollout)
    return rollout


@pytest.mark.parametrize("raise_as", [None, RuntimeError])
async def test_an_attempt_that_ends_because_of_its_budget_says_so(raise_as: type[Exception] | None) -> None:
    async with GatewayHarness(limits=GatewayLimits(tokens_per_rollout=10)) as harness:
        rollout = await rollout_of(harness, openai_agent(raise_as))
        assert (rollout.attempt.outcome, rollout.attempt.outcome_reason) == ("infrastructure_fault", "budget")
        spans = await harness.spans(rollout)
        record = read_rollout(rollout, [rollout.attempt], spans)
        assert list(record.exclusions.values()) == ["budget", "budget"]
        assert "allow more tokens" in str(record.explain())


async def test_an_attempt_that_fails_within_its_budget_does_not_blame_it() -> None:
    async with GatewayHarness(limits=GatewayLimits(tokens_per_rollout=1000)) as harness:
        rollout = await rollout_of(harness, openai_agent(RuntimeError))
        assert rollout.attempt.outcome_reason == "exception"


async def test_a_refused_call_of_an_attempt_that_went_on_without_it_is_excluded_for_the_budget() -> None:
    async def resigned(task: str, llm: agl.LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="any", max_retries=0) as client:
            for _ in range(2):
                with contextlib.suppress(openai.RateLimitError):
                    await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
        return 1.0

    async with GatewayHarness(limits=GatewayLimits(tokens_per_rollout=1)) as harness:
        rollout = await rollout_of(harness, agl.rollout(resigned))
        assert rollout.attempt.outcome == "scored"
        spans = await harness.spans(rollout)
        record = read_rollout(rollout, [rollout.attempt], spans)
        assert len(record.samples) == 1
        assert list(record.exclusions.values()) == ["budget"]
        assert TracerTraceToTriplet().explain(spans).counts() == {"budget": 1}
