"""A seed depends on the rollout's place and on the request, not on its time or its attempt."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.engine.request import RequestError
from agentlightning.engine.seeds import ArrivalSeeds, PlaceSeeds

_PLACES = {"ro/1": "step 1, task 0, sample 0", "ro-2": "step 1, task 0, sample 1"}


async def place_of(rollout_id: str) -> str | None:
    return _PLACES.get(rollout_id)


async def seeds_of(seeds: ArrivalSeeds | PlaceSeeds, attempt: str | None, *prompts: list[int]) -> list[int]:
    used_seeds: list[int] = []
    for prompt in prompts:
        async with seeds.draw(attempt, prompt) as seed:
            used_seeds.append(seed)
    return used_seeds


async def test_attempts_of_one_rollout_draw_the_same_and_everything_else_draws_apart() -> None:
    seeds = PlaceSeeds(7, place_of)
    turns = await seeds_of(seeds, "ro%2F1/a", [1], [1, 2], [1])
    assert len(set(turns)) == 3
    other_order = await seeds_of(PlaceSeeds(7, place_of), "ro%2F1/b", [1, 2], [1], [1])
    assert other_order == [turns[1], turns[0], turns[2]]
    assert await seeds_of(seeds, "ro%2F1/c", [1], [1, 2], [1]) == turns
    assert not set(await seeds_of(seeds, "ro-2/a", [1], [1, 2], [1])) & set(turns)
    assert not set(await seeds_of(PlaceSeeds(8, place_of), "ro%2F1/a", [1], [1, 2], [1])) & set(turns)


async def test_calls_side_by_side_draw_apart_and_one_that_broke_off_is_asked_again() -> None:
    seeds = PlaceSeeds(7, place_of)
    async with seeds.draw("ro-2/a", [1]) as first, seeds.draw("ro-2/a", [1]) as second:
        assert first != second
    with pytest.raises(asyncio.CancelledError):
        async with seeds.draw("ro-2/a", [1]) as third:
            raise asyncio.CancelledError
    async with seeds.draw("ro-2/a", [1]) as again:
        assert again == third not in (first, second)


async def test_a_call_that_is_made_again_after_its_reply_was_lost_draws_what_it_drew() -> None:
    seeds = PlaceSeeds(7, place_of)
    [first] = await seeds_of(seeds, "ro-2/a/call-1", [1])
    [second] = await seeds_of(seeds, "ro-2/a/call-2", [1])
    assert await seeds_of(seeds, "ro-2/a/call-1", [1]) == [first] != [second]
    async with seeds.draw("ro-2/a/call-3", [1]) as again:
        with pytest.raises(asyncio.CancelledError):
            async with seeds.draw("ro-2/a/call-3", [1]) as broken:
                raise asyncio.CancelledError
        assert (again == broken, await seeds_of(seeds, "ro-2/a/call-4", [1]) == [again]) == (True, False)


@pytest.mark.parametrize(("attempt", "words"), [(None, "pass the gateway"), ("ro-9/a", "'ro-9'")])
async def test_who_has_no_place_is_refused(attempt: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        await seeds_of(PlaceSeeds(7, place_of), attempt, [1])


async def test_by_default_arrival_decides() -> None:
    first, second = await seeds_of(ArrivalSeeds(3), None, [1], [1])
    assert [first] == await seeds_of(ArrivalSeeds(3), "x", [2]) != [second]
