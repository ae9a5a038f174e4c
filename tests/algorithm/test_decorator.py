"""`@algo`: a function is given what its parameters name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import agentlightning as agl


@agl.algo
async def known(*, store: Any, train_dataset: Any = None) -> tuple[Any, Any]:
    """Known to its module by name."""
    return store, train_dataset


async def test_a_function_is_given_what_it_names() -> None:
    store = agl.InMemoryLightningStore()
    known.set_store(store)
    assert await known.run(train_dataset=[1]) == (store, [1])


def test_name_text_and_signature_are_kept_and_a_call_calls_the_function() -> None:
    @agl.algo
    def twice(store: int) -> int:
        """Double it."""
        return 2 * store

    assert (twice.__name__, twice.__doc__) == ("twice", "Double it.")
    assert twice(3) == 6


def test_a_synchronous_function_returns_its_value() -> None:
    @agl.algo
    def plain(initial_resources: Any, llm_proxy: Any) -> tuple[Any, Any]:
        return initial_resources, llm_proxy

    assert not plain.is_async()
    assert known.is_async()
    assert plain.run() == (None, None)


@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_a_dataset_that_the_function_does_not_take_is_an_error(name: str) -> None:
    @agl.algo
    def plain() -> None: ...

    with pytest.raises(TypeError, match=f"{name} is provided but not supported"):
        plain.run(**{name: [1]})


def test_a_part_that_is_not_there_is_an_error() -> None:
    @agl.algo
    def plain(store: Any) -> None: ...

    with pytest.raises(ValueError, match="Store has not been set"):
        plain.run()


def test_a_parameter_that_cannot_be_given_is_refused_when_decorated() -> None:
    def learning_rate_wanted(store: Any, learning_rate: float) -> None: ...

    with pytest.raises(TypeError, match="parameter 'learning_rate'; it can give: store, adapter"):
        agl.algo(learning_rate_wanted)
    with pytest.raises(TypeError, match="needs a function"):
        agl.algo("baseline")  # type: ignore[arg-type]


def test_starred_parameters_receive_nothing() -> None:
    @agl.algo
    def plain(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    assert plain.run() == ((), {})


def test_a_decorated_function_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(known)) is known


@pytest.mark.parametrize("ends", ["returns", "raises"])
async def test_the_gateway_runs_while_the_function_does_if_it_is_asked_to(ends: str) -> None:
    @agl.algo(auto_start_proxy=True)
    async def serving(llm_proxy: agl.LLMProxy) -> bool:
        if ends == "raises":
            raise OverflowError
        return llm_proxy.is_running()

    proxy = agl.LLMProxy(store=agl.InMemoryLightningStore())
    serving.set_llm_proxy(proxy)
    if ends == "raises":
        with pytest.raises(OverflowError):
            await serving.run()
    else:
        assert await serving.run()
    assert not proxy.is_running()


async def test_a_gateway_that_shall_be_started_must_be_there() -> None:
    @agl.algo(auto_start_proxy=True)
    async def serving() -> None: ...

    with pytest.raises(ValueError, match="pass llm_proxy= to the Trainer"):
        await serving.run()
    with pytest.raises(TypeError, match="needs a coroutine function"):
        agl.algo(auto_start_proxy=True)(lambda: None)
