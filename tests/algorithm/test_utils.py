"""Batches over a dataset, and decorators that pass store and gateway."""

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


@pytest.mark.parametrize("size", [25, 99])
def test_every_pass_over_a_dataset_ends_before_the_next_begins_in_a_new_order(size: int) -> None:
    items = itertools.chain.from_iterable(batch_iter_over_dataset(range(50), size, random.Random(1)))
    first, second = (list(itertools.islice(items, 50)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@pytest.mark.parametrize("own", [True, False])
def test_the_same_seed_gives_the_same_batches(own: bool) -> None:
    """Of a generator, or of the module `random`."""

    def batches() -> list[list[int]]:
        random.seed(7)
        return list(itertools.islice(batch_iter_over_dataset(range(9), 4, random.Random(7) if own else None), 9))

    assert batches() == batches()


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


async def test_store_and_gateway_are_passed_at_each_call_and_named_if_they_are_missing() -> None:
    algorithm, store = Own(), agl.InMemoryLightningStore()
    with pytest.raises(ValueError, match="Store has not been set"):
        await algorithm.ask("why")
    with pytest.raises(ValueError, match="pass llm_proxy= to the Trainer"):
        await algorithm.need()
    algorithm.set_store(store)
    assert await algorithm.ask("why") == (store, "why")
    assert await algorithm.both() == (store, None)


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
