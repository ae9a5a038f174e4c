"""`PromptPlayer` against a store: what is enqueued together, what is kept, what becomes of what nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.prompt_search import playing
from agentlightning.prompt_search.cases import RolloutResult, read_results
from agentlightning.prompt_search.playing import PromptPlayer
from agentlightning.types import Rollout, RolloutConfig
from tests.prompt_search.apo.parts import resources


def player(store: agl.LightningStore, **settings: Any) -> PromptPlayer:
    async def read(rollouts: Sequence[Rollout]) -> list[RolloutResult]:
        return await read_results(store, rollouts, agl.TraceToMessages())

    given: dict[str, Any] = {"prefix": "apo", "run": "r", "resources": resources(), "timeout_seconds": 30.0}
    return PromptPlayer(store, read, **{**given, **settings})


def prompts(text: str) -> dict[str, agl.PromptTemplate]:
    return {"main_prompt": agl.PromptTemplate(template=text, engine="f-string")}


async def serve(store: agl.LightningStore, rewards: dict[Any, float | None]) -> None:
    """Answer rollouts as a runner would, until cancelled: None fails, a task without an entry is left alone."""

    @agl.rollout
    async def agent(task: Any, main_prompt: agl.PromptTemplate) -> float:
        if task not in rewards:
            await asyncio.sleep(600)
        reward = rewards[task]
        if reward is None:
            raise RuntimeError("broken")
        return reward + len(main_prompt.template) / 100

    runner = agl.LitAgentRunner[Any](agl.OtelTracer(), concurrency=8)
    with runner.run_context(agent=agent, store=store):
        await runner.iter()


@pytest.fixture
async def store() -> Any:
    return agl.InMemoryLightningStore()


async def test_messages_of_training_tasks_are_kept_of_the_last_ones_only(
    store: agl.LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "MOST_WHOLE", 2)
    plays, runner = player(store), asyncio.create_task(serve(store, {"a": 0.1, "b": 0.2, "c": 0.3}))
    first = await plays.play("v0", prompts("x"), ["a", "b", "c"], "train")
    assert all(result["spans"] for result in first)
    again = await plays.play("v0", prompts("x"), ["a", "b", "c"], "train")
    assert [bool(result["spans"]) for result in again] == [False, True, True]
    assert [result["final_reward"] for result in again] == pytest.approx([0.11, 0.21, 0.31])
    assert plays.rollouts == 3
    runner.cancel()
    await asyncio.wait([runner])


async def test_what_is_asked_for_together_is_enqueued_together_and_once(store: agl.LightningStore) -> None:
    """Weak points 6, 9 and 12."""
    plays, runner = player(store), asyncio.create_task(serve(store, {"a": 0.1, "b": 0.2, "c": 0.3}))
    one, two, again = await asyncio.gather(
        plays.play("v0", prompts("x"), ["a", "b"], "val"),
        plays.play("v1", prompts("yy"), ["a"], "val"),
        plays.play("v0", prompts("x"), ["b", "b", "c"], "val"),
    )
    assert [r["final_reward"] for r in one] == pytest.approx([0.11, 0.21])
    assert [r["final_reward"] for r in two] == pytest.approx([0.12])
    assert [r["final_reward"] for r in again] == pytest.approx([0.21, 0.21, 0.31])
    assert plays.rollouts == 4
    starts = {rollout.start_time for rollout in await store.query_rollouts()}
    assert len(starts) == 1, "made in one call"
    await plays.play("v0", prompts("x"), ["c", "a"], "val")
    assert plays.rollouts == 4
    await plays.play("v0", prompts("x"), ["a"], "train")
    assert plays.rollouts == 5, "another mode is another play"
    assert {rollout.resources_id for rollout in await store.query_rollouts()} == {"apo-r-v0", "apo-r-v1"}
    assert len(plays.known(prompts("x"), "val")) == 3
    runner.cancel()
    await asyncio.wait([runner])


@pytest.mark.parametrize("missing", ["retry", "skip"])
async def test_who_asked_for_tasks_that_have_ended_does_not_wait_for_those_of_others(
    store: agl.LightningStore, missing: str
) -> None:
    """Weak point 6: the critique of one prompt begins while another prompt is still played."""
    rewards: dict[Any, float | None] = {"a": 0.1, "b": None}
    plays, runner = player(store, missing=missing), asyncio.create_task(serve(store, rewards))
    quick = asyncio.create_task(plays.play("v0", prompts("x"), ["a"], "train"))
    faulty = asyncio.create_task(plays.play("v1", prompts("yy"), ["a", "b"], "train"))
    slow = asyncio.create_task(plays.play("v2", prompts("zzz"), ["a", "hangs"], "train"))
    [result] = await quick
    assert (result["final_reward"], bool(result["spans"])) == (pytest.approx(0.11), True)
    assert not slow.done()
    if missing == "skip":
        assert [each["final_reward"] for each in await faulty] == [pytest.approx(0.12), None]
    assert not faulty.done() or missing == "skip", "its failure is played once more, with the round"
    assert plays.rollouts == 5, "all were enqueued at once, and each task once"
    slow.cancel()
    faulty.cancel()
    await asyncio.wait([slow, faulty])
    hanging = [each for each in await store.query_rollouts() if each.input == "hangs"]
    assert [each.status for each in hanging] == ["cancelled"]
    runner.cancel()
    await asyncio.wait([runner])


async def test_a_failure_is_kept_apart_and_tried_again_the_next_time(store: agl.LightningStore) -> None:
    """Weak point 8."""
    rewards: dict[Any, float | None] = {"a": None, "b": 0.5}
    plays, runner = player(store, missing="skip"), asyncio.create_task(serve(store, rewards))
    first = await plays.play("v0", prompts("x"), ["a", "b"], "val")
    assert [r["final_reward"] for r in first] == [None, pytest.approx(0.51)]
    assert first[0]["failure"] == "RuntimeError: broken"
    assert len(plays.known(prompts("x"), "val")) == 2
    rewards["a"] = 0.4
    second = await plays.play("v0", prompts("x"), ["a", "b"], "val")
    assert second[0]["final_reward"] == pytest.approx(0.41)
    assert plays.rollouts == 3
    runner.cancel()
    await asyncio.wait([runner])


@pytest.mark.parametrize("settings", [{"timeout_seconds": 0.3}, {"seconds_left": lambda: 0.3}])
async def test_what_is_late_is_cancelled(store: agl.LightningStore, settings: dict[str, Any]) -> None:
    """Weak point 7."""
    config = RolloutConfig(timeout_seconds=600)
    plays = player(store, missing="skip", config=config, **settings)
    runner = asyncio.create_task(serve(store, {"a": 0.5}))
    found = await plays.play("v0", prompts("x"), ["a", "hangs"], "val")
    assert [r["status"] for r in found] == ["succeeded", "cancelled"]
    assert found[1]["final_reward"] is None
    runner.cancel()
    await asyncio.wait([runner])


async def test_what_nobody_waits_for_any_more_is_cancelled(store: agl.LightningStore) -> None:
    """Weak point 7: as when a run is interrupted; as long as one waits, it goes on."""
    plays = player(store)
    waiting = [asyncio.create_task(plays.play(name, prompts(name), ["a"], "val")) for name in ("v0", "v1")]
    while len(await store.query_rollouts()) < 2:  # noqa: ASYNC110 -- nobody tells
        await asyncio.sleep(0.01)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert {rollout.status for rollout in await store.query_rollouts()} == {"queuing"}
    waiting[1].cancel()
    await asyncio.wait(waiting)
    assert {rollout.status for rollout in await store.query_rollouts()} == {"cancelled"}


async def test_an_error_of_the_store_reaches_everybody_who_waits() -> None:
    class Broken(agl.InMemoryLightningStore):
        async def enqueue_many_rollouts(self, *args: Any, **more: Any) -> Any:
            raise ConnectionError("the store is away")

    plays = player(Broken())
    both = [plays.play(name, prompts(name), ["a"], "val") for name in ("v0", "v1")]
    found = await asyncio.gather(*both, return_exceptions=True)
    assert [type(error) for error in found] == [ConnectionError, ConnectionError]


async def test_who_asks_after_one_that_gave_up_at_once_is_answered(store: agl.LightningStore) -> None:
    plays = player(store)
    gave_up = asyncio.create_task(plays.play("v0", prompts("x"), ["a"], "val"))
    await asyncio.sleep(0)
    gave_up.cancel()
    await asyncio.wait([gave_up])
    runner = asyncio.create_task(serve(store, {"a": 0.1}))
    [result] = await asyncio.wait_for(plays.play("v0", prompts("x"), ["a"], "val"), 30)
    assert result["final_reward"] == pytest.approx(0.11)
    runner.cancel()
    await asyncio.wait([runner])
