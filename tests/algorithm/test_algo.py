"""Algorithms through the Trainer: parts of their own, and datasets in batches."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.training.tasks import batch_iter_over_dataset


def test_a_function_trains_through_the_trainer_and_its_value_is_the_result() -> None:
    @agl.algo
    async def runs_tasks(*, store: LightningStore, train_dataset: Any, trainer: agl.Trainer) -> Any:
        rollout = await store.enqueue_rollout(train_dataset[0])
        [done] = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)
        return done.status, trainer.n_runners

    trainer = agl.Trainer(algorithm=runs_tasks, strategy="shm")
    trainer.fit(agl.rollout(lambda task: 1.0), train_dataset=["a"])
    assert trainer.result == ("succeeded", 1)


def test_one_algorithm_does_not_share_its_parts_with_another() -> None:
    class Mute(agl.Algorithm):
        pass

    first, second = Mute(), Mute()
    first.set_store(agl.InMemoryLightningStore())
    with pytest.raises(ValueError, match="Store has not been set"):
        second.get_store()


def test_a_function_with_positional_only_parameters_is_refused_at_once() -> None:
    def wants(store: Any, /) -> None: ...

    with pytest.raises(TypeError, match="'store' is positional-only: remove the '/'"):
        agl.algo(wants)


def test_every_pass_over_a_dataset_ends_before_the_next_begins() -> None:
    batches = list(itertools.islice(batch_iter_over_dataset(range(6), 2, random.Random(0)), 6))
    first, second = list(itertools.chain(*batches[:3])), list(itertools.chain(*batches[3:]))
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second


def test_batches_without_a_generator_follow_the_seed_of_the_module_random() -> None:
    def batches() -> list[list[int]]:
        random.seed(7)
        return list(itertools.islice(batch_iter_over_dataset(range(9), 4), 9))

    assert batches() == batches()
