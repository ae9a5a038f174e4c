"""Batches over a dataset, and decorators that hand in store and gateway."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.algorithm.utils import with_llm_proxy, with_store
from agentlightning.training.tasks import batch_iter_over_dataset


@given(size=st.integers(1, 12), length=st.integers(1, 12), seed=st.integers(0, 99))
def test_batches_have_one_size_hold_nothing_twice_and_cover_each_pass(size: int, length: int, seed: int) -> None:
    taken = min(size, length)
    batches = list(itertools.islice(batch_iter_over_dataset(range(length), size, random.Random(seed)), 3 * length))
    assert all(len(batch) == len(set(batch)) == taken for batch in batches)
    first_passes = list(itertools.chain(*batches))[: length * 2]
    assert {first_passes.count(item) for item in range(length)} <= {1, 2, 3}


def test_a_batch_as_large_as_the_dataset_is_the_dataset_in_a_new_order() -> None:
    batches = batch_iter_over_dataset(list(range(50)), 99, random.Random(1))
    first, second = next(batches), next(batches)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_the_same_seed_gives_the_same_batches() -> None:
    one, two = (batch_iter_over_dataset(list("abcdefg"), 3, random.Random(7)) for _ in range(2))
    assert [next(one) for _ in range(9)] == [next(two) for _ in range(9)]


@pytest.mark.parametrize(("dataset", "size"), [([], 1), ([1], 0), ([1], -1)])
def test_no_items_or_no_size_is_refused_at_once(dataset: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="batches need items and a size of 1 or more"):
        batch_iter_over_dataset(dataset, size)


class Own(agl.Algorithm):
    @with_store
    async def ask(self, store: Any, question: str) -> tuple[Any, str]:
        return store, question

    @with_llm_proxy()
    async def call(self, llm_proxy: Any, *, fail: bool = False) -> bool:
        if fail:
            raise OverflowError
        return llm_proxy is not None and llm_proxy.is_running()

    @with_llm_proxy(required=True)
    async def need(self, llm_proxy: Any) -> None: ...

    @with_llm_proxy(auto_start=False)
    async def look(self, llm_proxy: Any) -> bool:
        return llm_proxy.is_running()

    @with_llm_proxy()
    @with_store
    async def both(self, store: Any, llm_proxy: Any) -> tuple[Any, Any]:
        return store, llm_proxy


async def test_the_store_is_handed_in_at_each_call() -> None:
    algorithm, store = Own(), agl.InMemoryLightningStore()
    with pytest.raises(ValueError, match="Store has not been set"):
        await algorithm.ask("why")
    algorithm.set_store(store)
    assert await algorithm.ask("why") == (store, "why")


async def test_a_gateway_is_started_for_the_call_and_stopped_after_it_also_on_an_error() -> None:
    algorithm, store = Own(), agl.InMemoryLightningStore()
    assert await algorithm.call() is False
    algorithm.set_llm_proxy(proxy := agl.LLMProxy(store=store))
    assert await algorithm.call() is True
    assert not proxy.is_running()
    with pytest.raises(OverflowError):
        await algorithm.call(fail=True)
    assert not proxy.is_running()
    assert await algorithm.look() is False


async def test_a_gateway_that_runs_is_left_running() -> None:
    algorithm, proxy = Own(), agl.LLMProxy(store=agl.InMemoryLightningStore())
    algorithm.set_llm_proxy(proxy)
    await proxy.start()
    try:
        assert await algorithm.call() is True
        assert proxy.is_running()
    finally:
        await proxy.stop()


async def test_a_gateway_that_is_needed_and_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="pass llm_proxy= to the Trainer"):
        await Own().need()


async def test_both_decorators_give_store_then_gateway() -> None:
    algorithm, store = Own(), agl.InMemoryLightningStore()
    algorithm.set_store(store)
    assert await algorithm.both() == (store, None)
