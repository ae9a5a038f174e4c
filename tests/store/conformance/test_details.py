"""Outlines of spans, one span, versions of resources and texts of tokens, in every store."""

from __future__ import annotations

from uuid import uuid4

import prometheus_client
import pytest

from agentlightning.errors import BadRequestError
from agentlightning.semconv import STALE, LightningCallAttributes
from agentlightning.store import metrics
from agentlightning.store.base import LightningStore
from agentlightning.store.metrics import MOST_SERIES
from agentlightning.types import LLM, Span, SpanOutline, TraceStatus
from tests.store.parts import required, span_of


async def test_outlines_are_spans_without_attributes(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    ids = started.rollout_id, started.attempt.attempt_id
    call = {
        LightningCallAttributes.CALL_ID.value: "call-1",
        LightningCallAttributes.STATE.value: "ok",
        LightningCallAttributes.PROMPT_TOKENS.value: 12,
        LightningCallAttributes.COMPLETION_TOKENS.value: 5,
        LightningCallAttributes.WEIGHT_VERSION.value: 3,
        "gen_ai.request.model": "policy",
        "text": "x" * 100_000,
    }
    failed = TraceStatus(status_code="ERROR", description="it broke " * 100)
    await store.add_many_spans(
        [
            span_of(started, "root", start_time=1.0, end_time=None, span_id="a" * 16),
            span_of(started, "raw_gen_ai_request", attributes=call, parent_id="a" * 16, start_time=2.0, end_time=3.5),
            span_of(started, "search", attributes={"gen_ai.operation.name": "execute_tool"}, status=failed),
            span_of(started, "planner", attributes={"openinference.span.kind": "AGENT"}),
            span_of(started, "agentlightning.reward", attributes={"agentlightning.reward.0.value": 1.0}),
        ]
    )
    page = await store.query_span_outlines(ids[0], ids[1])
    assert page.total == 5
    spans = await store.query_spans(ids[0], ids[1])
    for outline, span in zip(page, spans, strict=True):
        same = set(SpanOutline.model_fields) & set(Span.model_fields) - {"attributes", "kind"}
        assert {name: getattr(outline, name) for name in same} == {name: getattr(span, name) for name in same}
        assert outline.status_code == span.status.status_code
        assert outline.attributes == len(span.attributes)
        assert not outline.stale
    assert [outline.kind for outline in page] == ["other", "call", "tool", "agent", "reward"]
    first_outline = page[1]
    assert (first_outline.call_id, first_outline.call_state, first_outline.model) == ("call-1", "ok", "policy")
    assert (first_outline.tokens_in, first_outline.tokens_out, first_outline.weight_version) == (12, 5, 3)
    assert page[0].end_time == spans[0].end_time
    assert page[2].status_description == ("it broke " * 100)[:200]


async def test_outlines_come_in_pages_and_by_attempt(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    rollout_id, first = started.rollout_id, started.attempt.attempt_id
    await store.add_many_spans([span_of(started) for _ in range(5)])
    await store.update_attempt(rollout_id, first, status="failed")
    second = await store.start_attempt(rollout_id)
    await store.add_many_spans([span_of(second), span_of(started)])
    whole = await store.query_span_outlines(rollout_id)
    assert [outline.sequence_id for outline in whole] == [1, 2, 3, 4, 5, 6, 7]
    assert [outline.stale for outline in whole] == [False] * 6 + [True]
    page = await store.query_span_outlines(rollout_id, first, limit=2, offset=3)
    assert [outline.sequence_id for outline in page] == [4, 5]
    assert (page.total, page.limit, page.offset) == (6, 2, 3)
    assert [outline.sequence_id for outline in await store.query_span_outlines(rollout_id, "latest")] == [6]
    assert len(await store.query_span_outlines("unknown")) == 0
    assert len(await store.query_span_outlines(rollout_id, "unknown")) == 0
    assert (await store.query_spans(rollout_id, first))[-1].attributes[STALE] is True


async def test_a_span_by_its_ids(store: LightningStore) -> None:
    started = await store.start_rollout("x")
    ids = started.rollout_id, started.attempt.attempt_id
    await store.add_many_spans([span_of(started, span_id=f"{number:016x}") for number in range(1, 4)])
    span = await store.get_span(*ids, f"{2:016x}")
    assert span == (await store.query_spans(*ids))[1]
    assert await store.get_span(*ids, f"{9:016x}") is None
    assert await store.get_span(ids[0], "unknown", f"{2:016x}") is None
    assert await store.get_span("unknown", ids[1], f"{2:016x}") is None


async def test_the_versions_of_a_set_of_resources(store: LightningStore) -> None:
    llm = LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="sk-not-to-be-shown")
    published = await store.add_resources({"main_llm": llm})
    for number in range(2, 8):
        await store.update_resources(
            published.resources_id, {"main_llm": llm.model_copy(update={"model": f"m{number}"})}
        )
    await store.add_resources({})
    page = await store.query_resource_versions(published.resources_id, limit=3)
    assert [update.version for update in page] == [7, 6, 5]
    assert page.total == 7
    assert all(update.resources["main_llm"].api_key is None for update in page)  # type: ignore[union-attr]
    resources = required(await store.get_resources_by_id(published.resources_id, 7))
    assert resources.resources["main_llm"].api_key == "sk-not-to-be-shown"  # type: ignore[union-attr]
    rest = await store.query_resource_versions(published.resources_id, sort_order="asc", limit=2, offset=1)
    assert [(update.version, update.resources["main_llm"].model) for update in rest] == [(2, "m2"), (3, "m3")]  # type: ignore[union-attr]
    assert len(await store.query_resource_versions(published.resources_id, offset=7)) == 0
    assert (await store.query_resource_versions("unknown")).total == 0


async def test_tokens_as_texts(store: LightningStore) -> None:
    name = "f" * 64
    await store.add_vocabulary(name, ["a", " b", "\\xe2\\x82", "", "\\n", "\u20ac"])
    texts = required(await store.get_token_texts(name, [5, 2, 3, 0, 6, -1, 4, 0]))
    assert [(token.id, token.text, token.partial) for token in texts] == [
        (5, "\u20ac", False),
        (2, "\\xe2\\x82", True),
        (3, "", False),
        (0, "a", False),
        (6, None, False),
        (-1, None, False),
        (4, "\\n", False),
        (0, "a", False),
    ]
    assert await store.get_token_texts(name, []) == []
    assert await store.get_token_texts("0" * 64, [1]) is None


@pytest.mark.parametrize(("limit", "offset"), [(0, 0), (-1, 0), (20_001, 0), (1, -1)])
async def test_pages_out_of_range_are_refused(store: LightningStore, limit: int, offset: int) -> None:
    wrong = "offset" if offset else "limit"
    with pytest.raises(BadRequestError, match=f"{wrong} must be .*; got {offset or limit}"):
        await store.query_span_outlines("x", limit=limit, offset=offset)
    with pytest.raises(BadRequestError, match=f"{wrong} must be .*; got {offset or limit}"):
        await store.query_resource_versions("x", limit=limit, offset=offset)
    with pytest.raises(BadRequestError, match="'asc' or 'desc'"):
        await store.query_resource_versions("x", sort_order="down")  # type: ignore[arg-type]


async def test_metrics_of_programs_are_histograms_with_the_same_tags_each_time(store: LightningStore) -> None:
    name = f"seconds_{uuid4().hex}"
    await store.observe_metric(name, 0.5, {"status": "ok"})
    await store.record_metric(name, 1.5, {"status": "ok"})
    await store.observe_metric(name, 4, {"status": "error"})

    def total(status: str) -> float | None:
        return prometheus_client.REGISTRY.get_sample_value(f"{name}_sum", {"status": status})

    assert (total("ok"), total("error")) == (2.0, 4.0)
    for wrong, text in (
        (lambda: store.observe_metric(name, 1.0), r"must have the tags \['status'\]; got \[\]"),
        (lambda: store.observe_metric("no name", 1.0), "'no name' is not a valid name"),
        (lambda: store.observe_metric(name, 1.0, {"a b": "c"}), "'a b' is not a valid name"),
    ):
        with pytest.raises(BadRequestError, match=text):
            await wrong()


async def test_tags_have_a_bounded_number_of_values(store: LightningStore) -> None:
    name = f"bounded_{uuid4().hex}"
    for number in range(MOST_SERIES):
        metrics.observe(name, 1.0, {"task": str(number)})
    with pytest.raises(BadRequestError, match=r"Too many metrics or tag values.* Use fewer values"):
        await store.observe_metric(name, 1.0, {"task": "another"})
    await store.observe_metric(name, 1.0, {"task": "1"})
