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
    def batches() -> list[list[int]]:
        return list(itertools.islice(batch_iter_over_dataset(range(length), size, random.Random(seed)), 2 * length))

    assert all(len(batch) == len(set(batch)) == min(size, length) for batch in batches())
    items = list(itertools.chain.from_iterable(batches()))
    assert sorted(items[:length]) == sorted(items[length : 2 * length]) == list(range(length))
    assert batches() == batches()


def test_each_pass_has_an_order_of_its_own_drawn_from_the_module_random_without_a_generator() -> None:
    def passes() -> list[list[int]]:
        random.seed(7)
        return list(itertools.islice(batch_iter_over_dataset(range(50), 99), 2))

    first, second = passes()
    assert first != second
    assert passes() == [first, second]


@pytest.mark.parametrize(("dataset", "size"), [([], 1), ([1], 0), ([1], -1)])
def test_no_items_or_no_size_is_refused_at_once(dataset: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="dataset must not be empty and batch_size must be at least 1"):
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
    assert await algorithm.call() is False


async def test_a_gateway_is_started_for_the_call_alone_also_on_an_error_and_one_that_runs_is_left_running() -> None:
    algorithm, proxy = Own(), agl.LLMProxy(store=agl.InMemoryLightningStore())
    algorithm.set_llm_proxy(proxy)
    assert (await algorithm.call(), proxy.is_running(), await algorithm.look()) == (True, False, False)
    with pytest.raises(OverflowError):
        await algorithm.call(fail=True)
    assert not proxy.is_running()
    await proxy.start()
    try:
        assert (await algorithm.call(), proxy.is_running()) == (True, True)
    finally:
        await proxy.stop()
