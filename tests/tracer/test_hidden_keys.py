"""Keys that are known by their shape reach no store with the spans of an agent."""

from __future__ import annotations

import json
from typing import Any

import agentlightning as agl
from agentlightning.semconv import HIDDEN_KEYS
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer

KEY = "sk-" + "a1B2c3D4e5F6g7H8i9J0" * 2


@agl.rollout
def careless(task: str) -> float:
    agl.emit_message(f"the key is {KEY}")
    agl.emit_annotation({"argv": ["--key", KEY], "token_ids": [1, 2, 3], "plain": "text"})
    agl.emit_object({"headers": {"Authorization": f"Bearer {KEY}"}})
    with agl.operation(name="call") as op:
        op.set_input(KEY)
    try:
        with agl.operation(name="failing"):
            raise ValueError(KEY)
    except ValueError as error:
        agl.emit_exception(error)
    raise RuntimeError(f"refused: {KEY}")


async def test_no_span_and_no_error_of_an_agent_holds_a_key_and_the_spans_say_where() -> None:
    store = InMemoryLightningStore()
    made = await store.enqueue_rollout(input="x")
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(OtelTracer(), max_rollouts=1)
    with runner.run_context(agent=careless, store=store):
        await runner.iter()
    spans = list(await store.query_spans(made.rollout_id))
    attempt = await store.get_latest_attempt(made.rollout_id)
    text = json.dumps([each.model_dump() for each in (*spans, attempt) if each is not None])
    await store.close()
    assert len(spans) == 6
    assert KEY not in text
    note = next(span for span in spans if "token_ids" in span.attributes)
    assert note.attributes["token_ids"] == [1, 2, 3]
    assert note.attributes["plain"] == "text"
    assert note.attributes[HIDDEN_KEYS] == ["argv"]
    assert all(span.attributes.get(HIDDEN_KEYS) for span in spans)
