"""The whole path of one rollout, on one page. Read this first.

A task becomes a rollout; a runner runs it with an agent; the gateway records the model calls with their tokens; the
spans become triplets and token rows; the ledger says what became of each call. Memory store, a stub model, no training.
"""

from __future__ import annotations

import json
import urllib.request

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.litagent import rollout
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.training.ledger import Ledger, read_rollout
from agentlightning.types import LLM
from tests.stubs.model_server import ModelServer


@rollout
def agent(task: str, llm: LLM) -> float:
    """An agent: two model calls, the second with the whole conversation so far; then it says how well it did."""
    messages = [{"role": "user", "content": task}]
    for _ in range(2):
        body = json.dumps({"model": llm.model, "messages": messages}).encode()
        request = urllib.request.Request(
            f"{llm.endpoint}/chat/completions", body, {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": "go on"})
    return 1.0


async def test_one_rollout_from_task_to_token_rows() -> None:
    store = InMemoryLightningStore()
    with ModelServer() as model:
        # 1. The algorithm publishes resources and enqueues a task.
        proxy = LLMProxy(store=store, model_list=[model.entry("m")])
        await proxy.start()
        await store.add_resources({"main_llm": proxy.as_resource()})
        queued = await store.enqueue_rollout("hello", mode="train")
        assert queued.status == "queuing"

        # 2. A runner claims it and runs it with the agent.
        runner = LitAgentRunner[str](OtelTracer(), max_rollouts=1)
        with runner.run_context(agent=agent, store=store):
            await runner.iter()
        await proxy.stop()

    # 3. The rollout has ended, and its attempt says how.
    [done] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=0)
    [attempt] = await store.query_attempts(queued.rollout_id)
    assert (done.status, attempt.status, attempt.outcome) == ("succeeded", "succeeded", "scored")

    # 4. Its spans: two for each call at the gateway, one for the reward.
    spans = list(await store.query_spans(queued.rollout_id))
    names = ["litellm_request", "raw_gen_ai_request"] * 2 + ["agentlightning.annotation"]
    assert sorted(span.name for span in spans) == sorted(names)

    # 5. Spans become triplets, with exactly the tokens that the model consumed and produced.
    triplets = TracerTraceToTriplet().adapt(spans)
    replies = [call.reply for call in model.calls if call.reply is not None]
    produced = [reply["choices"][0]["token_ids"] for reply in replies]
    assert [t.prompt["token_ids"] for t in triplets] == [reply["prompt_token_ids"] for reply in replies]
    assert [t.response["token_ids"] for t in triplets] == produced
    assert [t.reward for t in triplets] == [None, 1.0]

    # 6. Triplets become token rows, and the ledger accounts for every call.
    record = read_rollout(done, [attempt], spans)
    ledger = Ledger(step=1)
    ledger.add(record)
    for row, sample in enumerate(record.samples):
        assert len(sample.token_ids) == len(sample.mask) == len(sample.logprobs)
        ledger.train(sample, row=row, advantage=1.0)
    summary = ledger.close()
    assert (summary.captured, summary.trained, summary.excluded) == (2, 2, {})
    assert summary.trained_tokens == sum(len(token_ids) for token_ids in produced)
