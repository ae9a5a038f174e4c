"""Importing a history in pieces, twice, or in the wrong order has the same result once all of it is there."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from tests.store.conformance.test_history import attempt, everything, resources, rollout, span

_ATTEMPTS = [attempt(), attempt("ro-2", 1, status="failed"), attempt("ro-2", 2), attempt("ro-3", status="timeout")]
_PIECES: list[tuple[str, Any]] = [
    *(("resources", resources(version=version)) for version in (1, 2)),
    *(("rollouts", rollout(f"ro-{number}")) for number in (1, 2, 3, 4)),
    *(("attempts", each) for each in _ATTEMPTS),
    *(("spans", span(each, 10 * each.sequence_id + number)) for each in _ATTEMPTS for number in (1, 2)),
    *(
        ("spans", span(each, 10 * each.sequence_id + number, reward=number / 8))
        for each in _ATTEMPTS
        for number in (3, 5)
    ),
]
_BATCHES = st.lists(st.lists(st.sampled_from(_PIECES), min_size=1, max_size=12), max_size=12)
_CUTS = st.lists(st.integers(1, len(_PIECES) - 1), max_size=6).map(lambda cuts: [0, *sorted(cuts), len(_PIECES)])


async def _take(store: LightningStore, pieces: list[tuple[str, Any]]) -> int:
    named: dict[str, list[Any]] = {}
    for kind, piece in pieces:
        named.setdefault(kind, []).append(piece)
    return len((await store.import_history(**named)).refused)


async def _whole() -> object:
    store = InMemoryLightningStore()
    assert await _take(store, _PIECES) == 0
    return await everything(store)


@given(before=_BATCHES)
def test_whatever_came_before_the_whole_makes_it_complete(before: list[list[tuple[str, Any]]]) -> None:
    async def story() -> None:
        store = InMemoryLightningStore()
        for batch in before:
            await _take(store, batch)
        assert await _take(store, _PIECES) == 0
        assert await everything(store) == await _whole()

    asyncio.run(story())


@given(cuts=_CUTS, repeated=st.lists(st.integers(0, 6), max_size=4))
def test_pieces_in_their_order_need_no_second_try(cuts: list[int], repeated: list[int]) -> None:
    async def story() -> None:
        store = InMemoryLightningStore()
        batches = [_PIECES[start:end] for start, end in pairwise(cuts)]
        for number, batch in enumerate(batches):
            assert await _take(store, batch) == 0
            if number in repeated:
                assert await _take(store, batch) == 0
        assert await everything(store) == await _whole()

    asyncio.run(story())
