"""Spans that a client sends are not sent back: the answer names the stored ones and the changes to them."""

from __future__ import annotations

import json
import math
from typing import Any

import aiohttp
import pytest
from typing_extensions import override

import agentlightning as agl
from agentlightning.semconv import STALE
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.http.span_changes import spans_of_answer
from tests.store.conftest import Serve
from tests.store.parts import span_of


class Stamping(agl.InMemoryLightningStore):
    """A user's store, whose answers contain copies that differ from the spans sent."""

    @override
    async def add_many_spans(self, spans: Any) -> list[agl.Span]:
        return [span.model_copy(update={"name": "stamped"}) for span in await super().add_many_spans(spans)]


@pytest.fixture(params=[agl.InMemoryLightningStore, Stamping])
async def both(
    request: pytest.FixtureRequest, serve: Serve
) -> tuple[agl.LightningStoreServer, agl.LightningStoreClient]:
    return await serve(request.param())


async def test_what_is_answered_is_what_is_stored(
    both: tuple[agl.LightningStoreServer, agl.LightningStoreClient],
) -> None:
    server, client = both
    claim = await client.start_rollout("task")
    late = await client.start_rollout("another")
    await client.update_attempt(late.rollout_id, late.attempt.attempt_id, status="succeeded")
    first_span = span_of(claim, number=1, attributes={"text": "Grüße"})
    assert await client.add_span(first_span) is not None
    sent = [
        span_of(claim, number=2),
        first_span,
        span_of(claim, attributes={"ids": [1, 2], "odd": math.inf}),
        span_of(late, number=1),
        span_of(claim, number=7),
    ]
    answer = await client.add_many_spans(sent)
    stored = [*await client.query_spans(claim.rollout_id), *await client.query_spans(late.rollout_id)]
    by_id = {each.span_id: each for each in stored}
    assert [each.span_id for each in answer] == [sent[i].span_id for i in (0, 2, 3, 4)]
    assert [each.sequence_id for each in answer] == [2, 3, 1, 7]
    assert [STALE in each.attributes for each in answer] == [False, False, True, False]
    if isinstance(server.store, Stamping):
        assert {each.name for each in answer} == {"stamped"}
    else:
        assert answer == [by_id[each.span_id] for each in answer]
        assert answer[0] is sent[0]
    assert await client.add_span(first_span) is None
    assert await client.add_many_spans([first_span]) == []
    assert await client.add_many_spans(tuple(sent)) == []
    assert sent[2].sequence_id == -1, "what was given stays as it was"


async def test_who_does_not_ask_for_changes_gets_the_spans(
    both: tuple[agl.LightningStoreServer, agl.LightningStoreClient],
) -> None:
    server, client = both
    claim = await client.start_rollout("task")
    first, second = span_of(claim), span_of(claim)
    url = server.endpoint + PREFIX + "/spans/batch"
    async with aiohttp.ClientSession() as session:
        body: dict[str, Any] = {"spans": [first.model_dump(mode="json"), second.model_dump(mode="json")]}
        async with session.post(url, json=body) as plain:
            content = await plain.read()
        assert [each["sequence_id"] for each in json.loads(content)] == [1, 2]
        assert spans_of_answer([first, second], content) is None, "the answer of a server that knows no other"
        body["spans"] = [{**body["spans"][0], "span_id": "0" * 15 + "7"}]
        async with session.post(url, json=body, headers={"x-agl-answer": "changes"}) as reply:
            assert (await reply.read()).startswith(b'{"stored":[')
        async with session.post(url, json=body, headers={"x-agl-answer": "something else"}) as plain:
            assert await plain.json() == []
