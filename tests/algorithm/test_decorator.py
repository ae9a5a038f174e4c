"""`@algo`: a function is called with the parts that its parameters name."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any

import pytest

import agentlightning as agl


@agl.algo
async def known(*, store: Any, train_dataset: Any = None) -> tuple[Any, Any]:
    """Known to its module by name."""
    return store, train_dataset


async def test_a_coroutine_function_is_called_with_the_parts_that_it_names() -> None:
    with pytest.raises(ValueError, match="Store has not been set"):
        known.run()
    store = agl.InMemoryLightningStore()
    known.set_store(store)
    assert known.is_async()
    assert await known.run(train_dataset=[1]) == (store, [1])
    assert pickle.loads(pickle.dumps(known)) is known


def test_a_plain_function_keeps_its_name_its_text_and_its_call_and_starred_parameters_receive_nothing() -> None:
    @agl.algo
    def plain(initial_resources: Any, llm_proxy: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return all."""
        return initial_resources, llm_proxy, args, kwargs

    assert (plain.is_async(), plain.__name__, plain.__doc__) == (False, "plain", "Return all.")
    assert plain.run() == (None, None, (), {})
    assert plain(3, 4, 5, six=6) == (3, 4, (5,), {"six": 6})


def test_a_function_trains_through_the_trainer_and_its_value_is_the_result() -> None:
    @agl.algo
    async def runs_tasks(*, store: agl.LightningStore, train_dataset: Any, trainer: agl.Trainer) -> Any:
        rollout = await store.enqueue_rollout(train_dataset[0])
        [done] = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)
        return done.status, trainer.n_runners

    trainer = agl.Trainer(algorithm=runs_tasks, strategy="shm")
    trainer.fit(agl.rollout(lambda task: 1.0), train_dataset=["a"])
    assert trainer.result == ("succeeded", 1)


@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_a_dataset_that_the_function_does_not_take_is_an_error(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is provided but not supported"):
        agl.algo(lambda: None).run(**{name: [1]})


def learning_rate(store: Any, learning_rate: float) -> None: ...


def positional(store: Any, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        (learning_rate, {}, r"no 'learning_rate' to pass to 'learning_rate'\. Valid parameters: store, adapter"),
        (positional, {}, "'store' is positional-only: remove the '/'"),
        ("baseline", {}, "requires a function"),
        (lambda: None, {"auto_start_proxy": True}, "requires a coroutine function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_decorated(
    function: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        agl.algo(**settings)(function)


@pytest.mark.parametrize("fails", [False, True])
async def test_the_gateway_runs_while_the_function_does(fails: bool) -> None:
    @agl.algo(auto_start_proxy=True)
    async def serving(llm_proxy: agl.LLMProxy) -> None:
        assert llm_proxy.is_running()
        if fails:
            raise OverflowError

    with pytest.raises(ValueError, match="pass llm_proxy= to the Trainer"):
        await serving.run()
    proxy = agl.LLMProxy(store=agl.InMemoryLightningStore())
    serving.set_llm_proxy(proxy)
    with pytest.raises(OverflowError) if fails else nullcontext():
        await serving.run()
    assert not proxy.is_running()
