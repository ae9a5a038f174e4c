"""Runs an agent through a Trainer: gateway, runner, tracer and store are the real ones, the model server is scripted.

Two tasks are run side by side in one process, so every test also shows that their calls are told apart. The gateway
demands the key of the attempt, so every test also shows that the program's own way to send a key is understood.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet, TraceTree, model_calls
from agentlightning.semconv import LightningCallAttributes
from agentlightning.store import LightningStore
from agentlightning.training.ledger import RolloutRecord, read_rollout
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.types import Dataset, EnqueueRolloutRequest, Span
from tests.frameworks.engine import Engine, calculator, said
from tests.pages import DOCS, blocks
from tests.stubs.model_server import Exchange, Json, logprobs_of

TASKS = ("What is 6 times 7?", "What is 8 times 9?")
ADDED = ("return_token_ids", "logprobs")
"""Fields that the gateway adds to a request."""
GUIDES = DOCS / "how-to/frameworks"
COMMANDS = {
    "aider": "aider",
    "claude-code": "claude",
    "codex": "codex",
    "mini-swe-agent": "mini",
    "opencode": "opencode",
    "pi": "pi",
    "qwen-code": "qwen",
}
"""The guides whose agent runs the command of a coding agent."""
_TOKENS = (
    LightningCallAttributes.PROMPT_TOKEN_IDS,
    LightningCallAttributes.COMPLETION_TOKEN_IDS,
    LightningCallAttributes.COMPLETION_LOGPROBS,
)


@dataclass(frozen=True)
class TaskResult:
    """One task that was run: the agent's result, the requests to the model server, the records."""

    task: str
    output: Any
    """Return value of the agent; a number is its reward."""
    exchanges: list[Exchange]
    evidence: Evidence
    record: RolloutRecord

    @property
    def spans(self) -> list[Span]:
        """Spans of the counted attempt, in their order."""
        return self.evidence.counted

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def agents(self, agent_match: str | None = None) -> list[tuple[str, str]]:
        """Return the agent that the adapter names and the system message, for each call that it selects."""
        triplets = TracerTraceToTriplet(agent_match=agent_match).adapt(self.spans)
        return [(t.metadata["agent_name"], said(t.prompt["raw_content"][0])) for t in triplets]

    def tree(self) -> TraceTree:
        """The spans as the adapter sees them."""
        tree = TraceTree.from_spans(self.spans)
        tree.repair_hierarchy()
        return tree

    def above_calls(self) -> list[list[str]]:
        """Return the names of the spans above each model call, the outermost first, in the order of the calls."""
        places: dict[int, list[str]] = {}
        waiting: list[tuple[Any, list[str]]] = [(self.tree(), [])]
        while waiting:
            node, above = waiting.pop()
            if node.span.name == "litellm_request":
                places[node.span.sequence_id] = above
            waiting.extend((child, [*above, node.span.name]) for child in node.children)
        return [places[number] for number in sorted(places)]


def agent_of_guide(guide: str) -> Any:
    """Return the agent of a guide's program, as it is printed; skip the test where its command is not installed."""
    if guide in COMMANDS:
        if guide == "aider" and sys.version_info >= (3, 13):
            pytest.skip("aider needs Python below 3.13")
        if "AGL_TEST_FRAMEWORK" not in os.environ or shutil.which(COMMANDS[guide]) is None:
            pytest.skip(f"{guide} is not installed: make test-frameworks")
    (program,) = blocks(GUIDES / f"{guide}.md")
    names: dict[str, Any] = {}
    exec(compile(program, f"{guide}.md", "exec"), names)
    return names["agent"]


def run_agent(
    agent: Any,
    answer: Callable[[Json], str | Json] = calculator,
    *,
    tasks: Sequence[str] = TASKS,
    direct: bool = True,
    in_order: bool = True,
    refused: int = 0,
    exact: bool = True,
    model: str = "policy",
) -> list[TaskResult]:
    """Run the agent on each task and return what happened, after checking that every call was captured exactly.

    With `direct` the agent is also run against the model server itself: it must ask the same and return the same.
    `in_order` says that it makes one call after the other, so that there is an order to check; `refused` how many calls
    of each task the gateway is to refuse, which the program must get over. Without `exact` neither is checked.
    `model` is its name, from which some programs conclude what the model knows.
    """
    outputs: dict[str, Any] = {}

    def judge(output: Any, task: str) -> float:
        outputs[task] = output
        return 1.0

    with Engine(answer) as engine:
        proxy = agl.LLMProxy(model_list=[engine.entry(model)])
        trainer = agl.Trainer(
            algorithm=_collect, llm_proxy=proxy, strategy="shm", runner={"concurrency": len(tasks)}, reward_fn=judge
        )
        trainer.fit(agent, train_dataset=list(tasks))
        assert engine.trouble == []
        through_gateway = list(engine.calls)
        results = [_result_of(evaluated, outputs, through_gateway, in_order) for evaluated in trainer.result]
        assert len(through_gateway) == sum(len(one.exchanges) for one in results)
        for one in results if exact else ():
            check_capture(one, refused)
        if direct and exact:
            asyncio.run(_check_direct(agent, engine, model, results))
    return results


@agl.algo
async def _collect(*, store: LightningStore, llm_proxy: agl.LLMProxy, train_dataset: Dataset[str]) -> list[Evidence]:
    """An algorithm: runs every task once and returns what was recorded."""
    await llm_proxy.start()
    await store.add_resources({"main_llm": llm_proxy.as_resource()})
    requests = [EnqueueRolloutRequest(input=train_dataset[i], mode="train") for i in range(len(train_dataset))]
    rollouts = await store.enqueue_many_rollouts(requests)
    ended = await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=300)
    await llm_proxy.stop()
    by_id = {rollout.rollout_id: rollout for rollout in ended}
    return [await evidence(store, by_id[rollout.rollout_id]) for rollout in rollouts]


def _result_of(evaluated: Evidence, outputs: dict[str, Any], exchanges: list[Exchange], in_order: bool) -> TaskResult:
    task = evaluated.rollout.input
    assert evaluated.latest is not None
    assert evaluated.latest.outcome == "scored", f"{evaluated.latest.outcome}: {evaluated.latest.error}"
    own = [one for one in exchanges if any(task in said(message) for message in one.request["messages"])]
    record = read_rollout(evaluated.rollout, evaluated.attempts, evaluated.spans)
    if not in_order:
        places = {call.response_id: place for place, call in enumerate(record.calls)}
        own.sort(key=lambda exchange: places.get((exchange.reply or {}).get("id"), -1))
    return TaskResult(task, outputs.get(task, evaluated.reward), own, evaluated, record)


def check_capture(result: TaskResult, refused: int = 0) -> None:
    """Every call once, in the order of the model server, with its tokens: in the spans, the triplets and the rows."""
    replies = [exchange.reply for exchange in result.exchanges if exchange.reply is not None]
    assert replies
    assert len(replies) == len(result.exchanges)
    tokens = [(reply["prompt_token_ids"], reply["choices"][0]["token_ids"]) for reply in replies]

    key = LightningCallAttributes
    raws = result.named("raw_gen_ai_request")
    states = [raw.attributes[key.STATE.value] for raw in raws]
    assert sorted(states) == ["ok"] * len(replies) + ["refused"] * refused
    raws = [raw for raw, state in zip(raws, states, strict=True) if state == "ok"]
    requests = {span.span_id: span for span in result.named("litellm_request")}
    assert len(requests) == len(states)
    above = [requests[raw.parent_id or ""] for raw in raws]
    assert [span.attributes["gen_ai.response.id"] for span in above] == [reply["id"] for reply in replies]
    recorded = [[raw.attributes[name.value] for name in _TOKENS] for raw in raws]
    assert recorded == [[prompt, completion, logprobs_of(completion)] for prompt, completion in tokens]

    calls = [call for call in model_calls(result.spans) if call.state == "ok"]
    assert [(call.prompt_token_ids, call.completion_token_ids) for call in calls] == tokens
    for adapter in (TracerTraceToTriplet(), agl.LlmProxyTraceToTriplet()):
        triplets = adapter.adapt(result.spans)
        assert [(t.prompt["token_ids"], t.response["token_ids"]) for t in triplets] == tokens
        assert [t.reward for t in triplets] == [None] * (len(triplets) - 1) + [1.0]
    assert list(result.record.exclusions.values()) == ["refused"] * refused
    _check_rows(result.record, tokens)


def _check_rows(record: RolloutRecord, tokens: list[tuple[list[int], list[int]]]) -> None:
    """Every call is in one row, and a row is the last prompt of its conversation with the answer to it."""
    number = {call.call_id: place for place, call in enumerate(c for c in record.calls if c.state == "ok")}
    assert sorted(number[call_id] for row in record.samples for call_id in row.call_ids) == list(range(len(tokens)))
    for row in record.samples:
        own = [tokens[number[call_id]] for call_id in row.call_ids]
        assert row.token_ids == own[-1][0] + own[-1][1]
        produced = [token for token, mask in zip(row.token_ids, row.mask, strict=True) if mask]
        assert produced == [token for _, completion in own for token in completion]


async def _check_direct(agent: Any, engine: Engine, model: str, results: list[TaskResult]) -> None:
    """Without the gateway and without a key, the agent asks the model server the same, and returns the same."""
    llm = agl.LLM(endpoint=engine.base_url, model=model)
    for one in results:
        before = len(engine.calls)
        output = await (agent(one.task, llm=llm) if agent.is_async() else asyncio.to_thread(agent, one.task, llm=llm))
        assert one.output == output
        requests = [
            {name: value for name, value in exchange.request.items() if name not in ADDED} for exchange in one.exchanges
        ]
        assert sorted(requests, key=str) == sorted((exchange.request for exchange in engine.calls[before:]), key=str)
