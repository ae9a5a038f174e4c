"""Summaries, figures and rewards, checked against the answers to the other queries of the same store."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.semconv import STALE
from agentlightning.store.base import LightningStore
from agentlightning.store.summaries.defaults import aggregate, query_summaries
from agentlightning.types import (
    AggregateBy,
    Attempt,
    AttemptError,
    Rollout,
    RolloutFilter,
    RolloutSummary,
    Span,
    SummarySort,
)
from agentlightning.utils.rewards import find_final_reward
from tests.store.parts import required, span_of

WORDS = ("Umlaut ÄÖÜ", "plain text", "ÇA VA", "with 'quotes' and % and _", "日本語")


async def some_rollouts(store: LightningStore, seed: int, count: int = 40) -> None:
    """Fill a store with rollouts in every state."""
    draw = random.Random(seed)
    resources = [await store.add_resources({}), await store.add_resources({})]
    await store.update_resources(resources[0].resources_id, {})
    for number in range(count):
        metadata: dict[str, Any] = draw.choice(
            [
                {"step": number // 8, "task": number % 5, "sample": number % 3},
                {"step": number // 8, "task": f"task {number % 3}"},
                {"step": "three", "task": 1.5, "sample": True},
                {"step": 2**70, "task": "x" * 300, "sample": None},
                {},
            ]
        )
        value: Any = draw.choice(
            [f"{draw.choice(WORDS)} {number}", {"question": draw.choice(WORDS), "n": [number]}, number]
        )
        await store.enqueue_rollout(
            value,
            mode=draw.choice(["train", "val", "test", None]),
            metadata=metadata,
            run_id=draw.choice(["run a", "run b", None]),
            resources_id=draw.choice([None, resources[1].resources_id]),
        )
    for run_id in ("run a", "run b", None):
        for worker in range(8):
            claim = await store.dequeue_rollout(f"worker-{worker % 3}", run_id=run_id)
            if claim is None:
                break
            ids = claim.rollout_id, claim.attempt.attempt_id
            for _ in range(draw.randrange(3)):
                await store.add_span(reward_span(*ids, draw.choice([0.0, 1.0, 0.25, -3.5]), {"other": draw.random()}))
            fate = draw.randrange(4)
            if fate == 0:
                await store.update_attempt(*ids, status="succeeded", outcome="scored")
            elif fate == 1:
                error = AttemptError(type="builtins.ValueError", message="no")
                await store.update_attempt(
                    *ids, status="failed", outcome="policy_fault", outcome_reason="exception", error=error
                )
            elif fate == 2:
                await store.start_attempt(claim.rollout_id, "another worker")


def reward_span(rollout_id: str, attempt_id: str, value: float, more: dict[str, float] | None = None) -> Span:
    """Return a span that carries a reward, without a number."""
    named = {"primary": value, **(more or {})}
    attributes: dict[str, Any] = {}
    for place, (name, each) in enumerate(named.items()):
        attributes |= {f"agentlightning.reward.{place}.name": name, f"agentlightning.reward.{place}.value": each}
    return span_of((rollout_id, attempt_id), attributes=attributes)


FILTERS: list[dict[str, Any]] = [
    {},
    {"run_id": "run a"},
    {"run_id": None},
    {"run_id": ""},
    {"run_id": "no such run"},
    {"status_in": ["succeeded", "running"]},
    {"status_in": []},
    {"mode_in": ["train"], "run_id": "run b"},
    {"outcome_in": ["scored", "policy_fault"]},
    {"outcome_reason": "exception"},
    {"step_from": 1, "step_to": 3},
    {"step_to": 0},
    {"task": 1},
    {"task": "task 1"},
    {"reward_from": 0.0},
    {"reward_from": 0.1, "reward_to": 1.0},
    {"has_reward": True},
    {"has_reward": False},
    {"worker_id": "worker-1"},
    {"worker_id": "another worker"},
    {"resources_version": 2},
    {"input_contains": "umlaut äöü"},
    {"input_contains": "ça"},
    {"input_contains": "'quotes' and %"},
    {"input_contains": "_"},
    {"input_contains": '"n": ['},
    {"input_contains": "\\"},
    {"rollout_id_contains": "a"},
    {"rollout_id_in": []},
    {"started_after": 0.0, "started_before": 1e12},
    {"started_before": 1.0},
]


def test_filters_name_every_field() -> None:
    apart = {"resources_id"}
    assert set(RolloutFilter.model_fields) - apart == {name for each in FILTERS for name in each}


class Remembered:
    """The answers of a store that no longer changes; it is asked each question once."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._rollouts: Sequence[Rollout] | None = None
        self._spans: dict[str, Sequence[Span]] = {}

    async def query_rollouts(self) -> Sequence[Rollout]:
        self._rollouts = self._rollouts or await self._store.query_rollouts()
        return self._rollouts

    async def query_spans(self, rollout_id: str) -> Sequence[Span]:
        if rollout_id not in self._spans:
            self._spans[rollout_id] = await self._store.query_spans(rollout_id)
        return self._spans[rollout_id]

    async def query_attempts(self, rollout_id: str) -> Sequence[Attempt]:
        return await self._store.query_attempts(rollout_id)


async def test_every_filter_order_and_page(store: LightningStore) -> None:
    await some_rollouts(store, 1)
    resources_ids = [rollout.resources_id for rollout in await store.query_rollouts() if rollout.resources_id]
    ids = [rollout.rollout_id for rollout in await store.query_rollouts()]
    apart: list[dict[str, Any]] = [{"resources_id": resources_ids[0]}, {"rollout_id_in": ids[3:7]}]
    remembered: Any = Remembered(store)
    for number, fields in enumerate([*FILTERS, *apart]):
        chosen = RolloutFilter(**fields)
        expected = await query_summaries(remembered, chosen, "start_time", "desc", limit=1000, offset=0, cursor=None)
        sort_by = get_args(SummarySort)[number % len(get_args(SummarySort))]
        order = "asc" if number % 3 else "desc"
        whole = await store.query_rollout_summaries(filter=chosen, sort_by=sort_by, sort_order=order, limit=1000)
        assert whole.total == expected.total == len(whole), fields
        assert by_id(whole) == by_id(expected), fields
        assert whole.cursor is None
        values = [value_of(summary, sort_by) for summary in whole]
        nulls = values.count(None)
        assert all(value is None for value in values[len(values) - nulls :]), "nulls are last"
        ordered = values[: len(values) - nulls]
        assert ordered == sorted(ordered, reverse=order == "desc"), (fields, sort_by, order)
        paged, cursor = list[RolloutSummary](), None
        while True:
            page = await store.query_rollout_summaries(
                filter=chosen, sort_by=sort_by, sort_order=order, limit=7, cursor=cursor
            )
            assert page.total == whole.total
            paged, cursor = [*paged, *page], page.cursor
            if cursor is None:
                break
        assert paged == list(whole), "pages by cursor are the whole"
        skipped = await store.query_rollout_summaries(
            filter=chosen, sort_by=sort_by, sort_order=order, limit=5, offset=3
        )
        assert list(skipped) == list(whole)[3:8]


def by_id(page: Any) -> dict[str, RolloutSummary]:
    return {summary.rollout_id: summary for summary in page}


def value_of(summary: RolloutSummary, sort_by: str) -> Any:
    if sort_by == "duration":
        return None if summary.end_time is None else summary.end_time - summary.start_time
    return getattr(summary, sort_by)


async def test_cursors_stay_right_while_rollouts_are_added(store: LightningStore) -> None:
    first = [(await store.enqueue_rollout(number)).rollout_id for number in range(10)]
    page = await store.query_rollout_summaries(limit=4)
    ids = [summary.rollout_id for summary in page]
    while page.cursor is not None:
        await store.enqueue_rollout("in between")
        page = await store.query_rollout_summaries(limit=4, cursor=page.cursor)
        ids += [summary.rollout_id for summary in page]
    assert ids == first[::-1], "each once, in order, whatever came before them"
    assert page.total == 12


async def test_figures_are_those_of_the_rollouts(store: LightningStore) -> None:
    await some_rollouts(store, 2)
    remembered: Any = Remembered(store)
    for by in get_args(AggregateBy):
        for chosen in (None, RolloutFilter(run_id="run a"), RolloutFilter(has_reward=True, input_contains="A")):
            for dimension in (None, "other", "primary", "no \"such' dimension"):
                figures = await store.aggregate_rollouts(by=by, filter=chosen, buckets=4, dimension=dimension)
                expected = await aggregate(remembered, by, chosen, 4, dimension)
                assert [each.key for each in figures.groups] == [each.key for each in expected.groups]
                assert len(figures.bucket_edges) == len(expected.bucket_edges)
                assert figures.bucket_edges == pytest.approx(expected.bucket_edges)
                for one, other in zip(figures.groups, expected.groups, strict=True):
                    assert one.buckets == other.buckets
                    assert one.outcomes == other.outcomes
                    assert sum(one.buckets) == one.scored
                    apart = {"buckets", "outcomes", "key"}
                    assert one.model_dump(exclude=apart) == pytest.approx(other.model_dump(exclude=apart)), by


async def test_figures_of_known_rewards(store: LightningStore) -> None:
    for number, reward in enumerate([1.0, 2.0, 3.0, 4.0, None]):
        attempt = await store.start_rollout("x", metadata={"step": 7})
        if reward is not None:
            await store.add_span(reward_span(attempt.rollout_id, attempt.attempt.attempt_id, reward))
        ended = "succeeded" if number else "failed"
        await store.update_attempt(
            attempt.rollout_id, "latest", status=ended, outcome="scored" if reward else "unscored"
        )
    [group] = (await store.aggregate_rollouts(buckets=3)).groups
    assert (group.key, group.count, group.scored, group.mean) == (7, 5, 4, 2.5)
    assert group.stderr == pytest.approx(math.sqrt((1.5**2 * 2 + 0.5**2 * 2) / 3) / 2)
    assert (group.minimum, group.p50, group.maximum) == (1.0, 2.5, 4.0)
    assert (group.p10, group.p25) == (pytest.approx(1.3), 1.75)
    assert (group.p75, group.p90) == (3.25, pytest.approx(3.7))
    assert group.outcomes == {"scored": 4, "unscored": 1}
    assert group.buckets == [1, 1, 2]
    answer = await store.aggregate_rollouts(by="none", buckets=3)
    assert answer.bucket_edges == [1.0, 2.0, 3.0, 4.0]
    assert answer.groups[0].key is None
    assert answer.groups[0].seconds_mean is not None
    assert (await store.aggregate_rollouts(by="none", filter=RolloutFilter(run_id="other"))).groups == []
    same = await store.aggregate_rollouts(by="none", buckets=2, filter=RolloutFilter(reward_from=4.0))
    assert (same.bucket_edges, same.groups[0].buckets) == ([3.5, 4.0, 4.5], [0, 1])


@pytest.mark.parametrize("seed", range(4))
async def test_reward_is_that_of_the_last_span_whatever_way_they_come(store: LightningStore, seed: int) -> None:
    """The store's rule against the reader of spans: numbers out of order, several at once, again, stale and broken."""
    draw = random.Random(seed)
    claim = await store.start_rollout("x")
    ids = claim.rollout_id, claim.attempt.attempt_id
    numbers = draw.sample(range(1, 60), 24)
    spans: list[Span] = []
    for number in numbers:
        span = reward_span(
            *ids, draw.choice([0.5, -1.0, 2.0]), {"other": 0.1 * number} if draw.random() < 0.5 else None
        )
        kind = draw.randrange(6)
        if kind == 0:
            span = span_of(ids)
        elif kind == 1:
            span.attributes = {"agentlightning.reward.0.name": "primary"}  # without a value
        elif kind == 2:
            span.attributes = {"agentops.task.output": '{"type": "reward", "value": 0.75}'}
        elif kind == 3:
            span.attributes[STALE] = True
        span.sequence_id = number if draw.random() < 0.8 else -1
        spans.append(span)
    at, current_spans = 0, list[Span]()
    while at < len(spans):
        size = draw.randrange(1, 6)
        batch = [*spans[at : at + size], *draw.sample(spans[: at + 1], 1)]
        await store.add_many_spans(batch) if draw.random() < 0.7 else [await store.add_span(s) for s in batch]
        at += size
        current_spans = [s for s in await store.query_spans(*ids) if s.attributes.get(STALE) is not True]
        attempt = required(await store.get_latest_attempt(claim.rollout_id))
        assert attempt.reward == find_final_reward(current_spans)
    await store.update_attempt(*ids, status="succeeded")
    late = reward_span(*ids, 99.0)
    await store.add_span(late)
    attempt = required(await store.get_latest_attempt(claim.rollout_id))
    assert attempt.reward == find_final_reward(current_spans), "one that came after the end is stale"
    [summary] = await store.query_rollout_summaries()
    assert (summary.reward, summary.rewards) == (attempt.reward, attempt.rewards)


async def test_reward_has_its_dimensions_and_each_attempt_its_own(store: LightningStore) -> None:
    claim = await store.start_rollout("x")
    await store.add_span(reward_span(claim.rollout_id, claim.attempt.attempt_id, 1.0, {"style": 0.5}))
    second = await store.start_attempt(claim.rollout_id)
    assert (second.attempt.reward, second.attempt.rewards) == (None, None)
    await store.add_span(reward_span(claim.rollout_id, second.attempt.attempt_id, 2.0))
    rewards = [(a.reward, a.rewards) for a in await store.query_attempts(claim.rollout_id)]
    assert rewards == [(1.0, {"primary": 1.0, "style": 0.5}), (2.0, {"primary": 2.0})]
    await store.add_span(
        reward_span(claim.rollout_id, claim.attempt.attempt_id, 7.0)
    )  # of an attempt that was given up
    assert [a.reward for a in await store.query_attempts(claim.rollout_id)] == [1.0, 2.0]


async def test_reward_that_a_call_gives_stays_until_a_later_span(store: LightningStore) -> None:
    claim = await store.start_rollout("x")
    ids = claim.rollout_id, claim.attempt.attempt_id
    unchanged = await store.get_next_span_sequence_id(*ids)
    await store.update_attempt(*ids, metadata={"k": 1})
    late = reward_span(*ids, 0.5)
    late.sequence_id = unchanged
    await store.add_span(late)
    assert (await store.query_attempts(claim.rollout_id))[0].reward == 0.5
    number = await store.get_next_span_sequence_id(*ids)
    changed = await store.update_attempt(*ids, reward=0.25, rewards={"judge": 0.25})
    assert (changed.reward, changed.rewards) == (0.25, {"judge": 0.25})
    early = reward_span(*ids, 1.0)
    early.sequence_id = number
    await store.add_span(early)
    assert (await store.query_attempts(claim.rollout_id))[0].reward == 0.25
    await store.add_span(reward_span(*ids, 3.0))
    assert (await store.query_attempts(claim.rollout_id))[0].reward == 3.0
    assert (await store.update_attempt(*ids, reward=None, rewards=None)).reward is None
    for unusable in (math.inf, -1e308, 1e16, 10**400):
        with pytest.raises(BadRequestError, match=r"finite number of at most 1e\+15 in magnitude"):
            await store.update_attempt(*ids, reward=unusable)
        with pytest.raises(BadRequestError, match="The reward 'style' is"):
            await store.update_attempt(*ids, rewards={"style": unusable})
    assert (await store.update_attempt(*ids, reward=-1e15)).reward == -1e15
    await store.add_span(reward_span(*ids, 1e16))
    assert (await store.query_attempts(claim.rollout_id))[0].reward is None


async def test_what_is_searched_and_shown_of_an_input(store: LightningStore) -> None:
    await store.enqueue_rollout("a" * 1990 + "NEEDLE in the hay")
    await store.enqueue_rollout({"text": "b" * 5000, "list": list(range(10_000))})
    await store.enqueue_rollout("with a \0 in it")
    [summary] = await store.query_rollout_summaries(filter=RolloutFilter(input_contains="needle"))
    assert summary.input_preview == "a" * 200
    assert not await store.query_rollout_summaries(filter=RolloutFilter(input_contains="hay"))
    [summary] = await store.query_rollout_summaries(filter=RolloutFilter(input_contains='{"text": "bbb'))
    assert len(summary.input_preview) == 200
    rollout_id = summary.rollout_id
    await store.update_rollout(rollout_id, input="changed later")
    [summary] = await store.query_rollout_summaries(filter=RolloutFilter(input_contains="CHANGED"))
    assert (summary.rollout_id, summary.input_preview) == (rollout_id, "changed later")
    assert await store.delete_rollouts(rollout_ids=[rollout_id], force=True) == 1
    assert (await store.query_rollout_summaries(filter=RolloutFilter(input_contains="changed"))).total == 0
    assert (await store.query_rollout_summaries()).total == 2


async def test_wrong_arguments_are_named(store: LightningStore) -> None:
    await store.enqueue_rollout("x")
    await store.enqueue_rollout("y")
    cursor = (await store.query_rollout_summaries(limit=1)).cursor
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sort_by": "input"}, "sort"),
        ({"sort_order": "down"}, "down|asc"),
        ({"limit": 0}, "limit|Limit"),
        ({"limit": 1001}, "1000"),
        ({"limit": -1}, "limit|Limit"),
        ({"offset": -1}, "ffset"),
        ({"cursor": "no cursor"}, "cursor"),
        ({"cursor": "WyJhIl0"}, "cursor"),
        ({"cursor": cursor, "sort_by": "reward"}, "cursor"),
        ({"cursor": cursor, "sort_order": "asc"}, "cursor"),
        ({"cursor": cursor, "offset": 1}, "cursor"),
        ({"filter": {"no_such_field": 1}}, "no_such_field"),
        ({"filter": {"step_from": 2**60}}, "step_from"),
        ({"filter": {"reward_to": math.nan}}, "reward_to"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            await store.query_rollout_summaries(**arguments)
    wrong_of_figures: list[tuple[dict[str, Any], str]] = [
        ({"by": "input"}, "by|input"),
        ({"buckets": 101}, "100"),
        ({"buckets": -1}, "100|bucket"),
    ]
    for arguments, message in wrong_of_figures:
        with pytest.raises(ValueError, match=message):
            await store.aggregate_rollouts(**arguments)
