"""`batch_query`: a batch is sent at once, in order, each entry in a rollout of its own; no entry is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from tests.stubs.model_server import Fault, ModelServer


@pytest.fixture
def store() -> InMemoryLightningStore:
    return InMemoryLightningStore()


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def proxy(model: ModelServer, store: InMemoryLightningStore) -> LLMProxy:
    return LLMProxy(model_list=[model.entry("policy")], store=store)


def said(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["message"]["content"] for answer in answers]


async def test_every_form_of_an_entry_is_asked_and_answers_come_in_order(
    proxy: LLMProxy, model: ModelServer, store: InMemoryLightningStore
) -> None:
    message = {"role": "user", "content": "b"}
    batch = ["a", [message], {"messages": [{"role": "user", "content": "c"}], "max_tokens": 5}]
    assert said(await proxy.batch_query(batch)) == ["you said a", "you said b", "you said c"]
    assert not proxy.is_running(), "it was started for the time"
    assert [call.request.get("max_tokens") for call in model.calls].count(5) == 1
    rollouts = (await store.query_rollouts()).items
    assert sorted(rollout.status for rollout in rollouts) == ["succeeded"] * 3
    for rollout in rollouts:
        assert rollout.metadata == {"batch_query": True}
        [attempt] = (await store.query_attempts(rollout.rollout_id)).items
        assert (attempt.outcome, attempt.outcome_reason) == ("unscored", "no_reward")
        assert (await store.query_spans(rollout.rollout_id)).total == 2, "the call is recorded like any other"


async def test_a_gateway_that_runs_goes_on_and_the_model_may_be_chosen(proxy: LLMProxy, model: ModelServer) -> None:
    proxy.update_model_list([model.entry("one"), model.entry("two")])
    await proxy.start()
    try:
        assert said(await proxy.batch_query(["a"] * 100, model="two")) == ["you said a"] * 100
        assert {call.request["model"] for call in model.calls} == {"two"}
        assert said(await proxy.batch_query([{"messages": [{"role": "user", "content": "b"}], "model": "one"}]))
        with pytest.raises(RuntimeError, match=r"1 of 1 queries failed; the first: Multiple models found"):
            await proxy.batch_query(["a"])
        assert proxy.is_running()
    finally:
        await proxy.stop()


async def test_with_a_token_each_call_has_the_key_of_its_attempt(
    proxy: LLMProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_TOKEN", "a-token-for-this-test-alone")
    assert said(await proxy.batch_query(["a"])) == ["you said a"]


async def test_refused_calls_are_told_when_all_have_ended(
    proxy: LLMProxy, model: ModelServer, store: InMemoryLightningStore
) -> None:
    model.faults = [Fault(400, b'{"error": {"message": "too long"}}')]
    with pytest.raises(RuntimeError, match=r"1 of 3 queries failed; the first: status 400: .*too long"):
        await proxy.batch_query(["a", "b", "c"])
    rollouts = (await store.query_rollouts()).items
    assert sorted(rollout.status for rollout in rollouts) == ["failed", "succeeded", "succeeded"]


async def test_a_model_that_does_not_answer_is_waited_for_so_long_and_no_longer(
    proxy: LLMProxy, model: ModelServer, store: InMemoryLightningStore
) -> None:
    model.hold()
    with pytest.raises(TimeoutError, match=r"2 of 2 queries failed; the first: no reply within 0\.2 seconds"):
        await proxy.batch_query(["a", "b"], timeout=0.2)
    model.release()
    assert [rollout.status for rollout in await store.query_rollouts()] == ["failed", "failed"]


@pytest.mark.parametrize("entry", [{"question": "a"}, 1, [], ["a"], None, {"messages": [], "stream": True}])
async def test_an_entry_that_is_no_request_is_named_and_nothing_is_asked(
    entry: Any, proxy: LLMProxy, model: ModelServer, store: InMemoryLightningStore
) -> None:
    with pytest.raises(ValueError, match="entry 1 of the batch"):
        await proxy.batch_query(["a", entry])
    assert (model.calls, (await store.query_rollouts()).total) == ([], 0)


async def test_what_is_missing_is_said(store: InMemoryLightningStore) -> None:
    with pytest.raises(ValueError, match="has no store"):
        await LLMProxy().batch_query(["a"])
    with pytest.raises(ValueError, match="timeout must be above 0"):
        await LLMProxy(store=store).batch_query(["a"], timeout=0)
    assert await LLMProxy(store=store).batch_query([]) == []
