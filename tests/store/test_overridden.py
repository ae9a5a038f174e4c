"""A subclass of a store that overrides one form of an operation: a caller of the other form reaches the override."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from typing_extensions import override

import agentlightning as agl
from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreThreaded
from agentlightning.store.wrappers import complete, readable_span
from agentlightning.types import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    Event,
    Link,
    Rollout,
    Span,
    SpanContext,
)
from agentlightning.utils.metrics import ConsoleMetricsBackend
from tests.store.conftest import Serve
from tests.store.parts import required, span_of, with_token


class Noting(agl.InMemoryLightningStore):
    """Notes the calls of its overridden operations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls: list[str] = []


class SingleForms(Noting):
    """Overrides the single forms, with the names of the older contract."""

    @override
    async def enqueue_rollout(  # type: ignore[override] -- the form of that contract
        self,
        input: Any,
        mode: Any = None,
        resources_id: Any = None,
        config: Any = None,
        metadata: Any = None,
        **rest: Any,
    ) -> Rollout:
        self.calls.append("enqueue")
        return await super().enqueue_rollout(input, mode, resources_id, config, {"by": "subclass"}, **rest)

    @override
    async def dequeue_rollout(  # type: ignore[override]
        self, worker_id: str | None = None, **rest: Any
    ) -> AttemptedRollout | None:
        claimed = await super().dequeue_rollout(worker_id, **rest)
        if claimed is not None:
            self.calls.append("dequeue")
        return claimed

    @override
    async def add_span(self, span: Span) -> Span | None:
        self.calls.append("span")
        return await super().add_span(span)

    @override
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        self.calls.append("number")
        return await super().get_next_span_sequence_id(rollout_id, attempt_id)


class ManyForms(Noting):
    """Overrides the batches, one of them by the single form of the base class."""

    @override
    async def enqueue_many_rollouts(self, rollouts: Any) -> list[Rollout]:
        self.calls.append("enqueue")
        return await super().enqueue_many_rollouts(rollouts)

    @override
    async def dequeue_many_rollouts(self, *, limit: int = 1, **rest: Any) -> list[AttemptedRollout]:  # type: ignore[override]
        claims = [claim for _ in range(limit) if (claim := await self.dequeue_rollout(**rest)) is not None]
        self.calls += ["dequeue"] * len(claims)
        return claims

    @override
    async def add_many_spans(self, spans: Any) -> list[Span]:
        self.calls += ["span"] * len(spans)
        return await super().add_many_spans(spans)

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Any) -> list[int]:
        self.calls.append("number")
        return await super().get_many_span_sequence_ids(rollout_attempt_ids)


class OtelSpans(Noting):
    """Overrides the one form in which tracers of the older system delivered their spans."""

    @override
    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        assert isinstance(readable_span, ReadableSpan)
        self.calls.append(readable_span.name)
        return await super().add_otel_span(rollout_id, attempt_id, readable_span, sequence_id)


@agl.rollout
def agent(task: int) -> float:
    agl.emit_annotation({"task": task})
    return task / 10


@pytest.mark.parametrize("strategy", ["cs", "shm"])
@pytest.mark.parametrize("kind", [SingleForms, ManyForms, OtelSpans])
def test_fit_calls_what_the_subclass_overrides(kind: type[Noting], strategy: str) -> None:
    store = kind()
    trainer = agl.Trainer(algorithm="baseline", store=store, strategy=strategy, initial_resources={})
    trainer.fit(agent, train_dataset=[1, 2, 3])
    assert trainer.result.rewards == [0.1, 0.2, 0.3]
    if kind is OtelSpans:  # what the agent emitted, and the reward, of each rollout
        assert store.calls.count("agentlightning.annotation") == 6
        return
    assert store.calls.count("dequeue") == 3
    assert store.calls.count("enqueue") == (3 if kind is SingleForms else 1)
    assert store.calls.count("span") >= 6


async def test_both_forms_of_a_server_and_of_threads_reach_the_override(serve: Serve) -> None:
    async def through(store: LightningStore, calls: list[str]) -> None:
        await store.enqueue_rollout(1)
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in (2, 3)])
        first = required(await store.dequeue_rollout("w"))
        assert len(await store.dequeue_many_rollouts(limit=5, worker_id="w")) == 2
        span = span_of(first)
        assert await store.add_span(span) is not None
        assert await store.add_many_spans([span]) == []
        assert calls.count("dequeue") == 3
        assert calls.count("span") == 2
        assert calls.count("enqueue") in (2, 3)
        pair = (first.rollout_id, first.attempt.attempt_id)
        assert await store.get_next_span_sequence_id(*pair) < (await store.get_many_span_sequence_ids([pair]))[0]
        assert calls.count("number") == 2

    for kind in (SingleForms, ManyForms):
        direct = kind()
        await through(complete(direct), direct.calls)
        inside = kind()
        threaded = LightningStoreThreaded(inside)
        await through(threaded, inside.calls)
        await threaded.close()
        served = kind()
        _, client = await serve(served)
        await through(client, served.calls)


async def test_an_override_that_is_set_on_the_store_itself_counts_too() -> None:
    store, names = agl.InMemoryLightningStore(), []
    plain = store.add_span

    async def spy(span: Span) -> Span | None:
        names.append(span.name)
        return await plain(span)

    store.add_span = spy  # type: ignore[method-assign]
    claimed = await store.start_rollout(1)
    await complete(store).add_many_spans([span_of(claimed, "x")])
    assert names == ["x"]


async def test_a_tracker_that_counts_each_operation_hides_no_override() -> None:
    store = SingleForms(tracker=ConsoleMetricsBackend())
    await complete(store).enqueue_many_rollouts([EnqueueRolloutRequest(input=1)])
    assert len(await complete(store).dequeue_many_rollouts(limit=2)) == 1
    assert store.calls == ["enqueue", "dequeue"]


async def test_a_store_in_which_both_forms_are_overridden_keeps_both() -> None:
    class Both(SingleForms):
        @override
        async def add_many_spans(self, spans: Any) -> list[Span]:
            self.calls.append("spans")
            return await super().add_many_spans(spans)

        @override
        async def add_span(self, span: Span) -> Span | None:
            return await super().add_span(span)

    store = Both()
    claimed = await store.start_rollout(1)
    await complete(store).add_many_spans([span_of(claimed)])
    assert store.calls == ["spans"]
    await complete(store).add_span(span_of(claimed))
    assert store.calls == ["spans", "span"]


class Picky(agl.InMemoryLightningStore):
    """Hands out even tasks only, with the names of the older contract; it ends the others."""

    @override
    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:  # type: ignore[override]
        while (claimed := await super().dequeue_rollout(worker_id)) is not None and claimed.input % 2:
            await self.update_rollout(claimed.rollout_id, status="cancelled")
        return claimed


async def test_a_wrong_argument_is_refused_as_by_any_store() -> None:
    with pytest.raises(agl.BadRequestError, match="mode"):
        await complete(SingleForms()).enqueue_rollout("x", mode="lost")  # type: ignore[arg-type]  # pyright: ignore


@pytest.mark.parametrize("through", ["client", "threads"])
async def test_an_override_may_claim_several_times_within_one_call(serve: Serve, through: str) -> None:
    store = Picky()
    _, client = await serve(store)
    reached = client if through == "client" else LightningStoreThreaded(store)
    waiting = asyncio.create_task(reached.dequeue_many_rollouts(limit=2, worker_id="w", timeout=20))
    await asyncio.sleep(0.1)  # it has asked, and there was nothing
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(1, 6)])
    claims = await waiting
    assert [claim.input for claim in claims] == [2, 4]
    await reached.close()


@pytest.mark.parametrize("kind", [SingleForms, ManyForms, Picky])
async def test_a_claim_that_is_repeated_with_its_token_is_the_same_claims(
    kind: type[agl.InMemoryLightningStore],
) -> None:
    store = kind()
    whole = complete(store)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in (2, 4, 6, 8)])

    async def claim(token: str) -> list[str]:
        claims = await with_token(token, whole.dequeue_many_rollouts(limit=2, worker_id="w"))
        return [claim.attempt.attempt_id for claim in claims]

    first = await claim("one")
    assert len(set(first)) == 2
    assert await claim("one") == first
    second = await claim("two")
    assert len({*first, *second}) == 4


# --- a stored span as OpenTelemetry's ----------------------------------------------------------------------------

hexadecimal = st.text("0123456789abcdef", min_size=16, max_size=16).filter(lambda text: text.strip("0") != "")
values = st.one_of(
    st.text(max_size=5), st.booleans(), st.integers(-(2**40), 2**40), st.lists(st.integers(0, 9), min_size=1)
)
attributes = st.dictionaries(st.text("abc.", min_size=1, max_size=4), values, max_size=3)
moments = st.integers(10**9, 2 * 10**9).map(float)


def contexts(remote: st.SearchStrategy[bool]) -> st.SearchStrategy[SpanContext]:
    return st.builds(
        SpanContext,
        trace_id=hexadecimal.map(lambda half: half * 2),
        span_id=hexadecimal,
        is_remote=remote,
        trace_state=st.dictionaries(
            st.text("ab", min_size=1, max_size=3), st.text("xy", min_size=1, max_size=3), max_size=2
        ),
    )


@given(
    context=contexts(st.just(False)),
    parent=st.none() | contexts(st.booleans()),
    attributes=attributes,
    events=st.lists(st.builds(Event, name=st.text(max_size=5), attributes=attributes, timestamp=moments), max_size=2),
    links=st.lists(
        st.builds(Link, context=contexts(st.booleans()), attributes=st.none() | attributes.filter(bool)), max_size=2
    ),
    status=st.sampled_from(["UNSET", "OK", "ERROR"]),
    kind=st.sampled_from(["INTERNAL", "CLIENT", "SERVER"]),
    scope=st.none() | st.just({"name": "lib", "version": "1"}),
    times=st.tuples(moments, moments),
)
def test_a_span_is_the_same_after_the_way_through_opentelemetry(
    context: SpanContext, parent: SpanContext | None, scope: Any, times: tuple[float, float], status: Any, **fields: Any
) -> None:
    span = Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=3,
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_id=parent.span_id if parent else None,
        name="work",
        status=agl.TraceStatus(status_code=status, description="why" if status == "ERROR" else None),
        start_time=times[0],
        end_time=times[1],
        context=context,
        parent=parent,
        resource=agl.OtelResource(attributes={"service.name": "s"}, schema_url="u"),
        scope=scope,
        **fields,
    )
    back = Span.from_opentelemetry(readable_span(span), "ro-1", "at-1", 3)
    without = {"flags": None}
    links = [link.model_copy(update=without) for link in back.links]
    assert back.model_copy(update={**without, "links": links}) == span


async def test_a_span_keeps_the_parent_of_which_it_has_the_id_alone() -> None:
    store = OtelSpans()
    rollout = await store.start_rollout("x")
    made = span_of(rollout, "child", 1).model_copy(
        update={"trace_id": "a" * 32, "span_id": "b" * 16, "parent_id": "c" * 16, "context": None, "parent": None}
    )
    own_words = made.model_copy(update={"trace_id": "trace", "span_id": "s1", "parent_id": "s0", "sequence_id": 2})
    stored = await complete(store).add_many_spans([made, own_words])
    assert [(span.trace_id, span.span_id, span.parent_id) for span in stored] == [
        ("a" * 32, "b" * 16, "c" * 16),
        ("trace", "s1", "s0"),
    ]
    assert store.calls == ["child"]


def test_an_object_without_operations_is_used_as_it_is() -> None:
    stand_in: Any = MagicMock()
    assert complete(stand_in) is stand_in
    bare: Any = object()
    assert complete(bare) is bare


class Forwarder(LightningStoreClient):
    """A client with a form of an operation of its own, which stands behind another server."""

    @override
    async def enqueue_rollout(self, input: Any, *args: Any, **rest: Any) -> Rollout:
        return await super().enqueue_rollout(input, *args, **rest)


async def test_each_call_that_a_client_makes_within_one_request_is_one_of_its_own(serve: Serve) -> None:
    store = agl.InMemoryLightningStore()
    behind, _ = await serve(store)
    _, client = await serve(Forwarder(behind.endpoint))
    made = await client.enqueue_many_rollouts([EnqueueRolloutRequest(input="x") for _ in range(3)])
    assert len({rollout.rollout_id for rollout in made}) == 3
    assert len(await store.query_rollouts()) == 3
