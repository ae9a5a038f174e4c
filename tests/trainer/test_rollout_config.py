"""`rollout_config=`: what it may be, and that every algorithm's rollouts have it."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.trainer.resume import merged
from agentlightning.training.tasks import with_timeout
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig

RETRIES: dict[str, Any] = {"max_attempts": 3, "retry_condition": ["failed"], "retry_delay_seconds": 0.01}


@agl.rollout
def third_time(task: int, rollout: AttemptedRollout) -> float:
    if rollout.attempt.sequence_id < 3:
        raise ConnectionError("again")
    return 1.0


@pytest.mark.parametrize("config", [RETRIES, RolloutConfig(**RETRIES)])
@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_a_flaky_agent_is_tried_again(strategy: Any, config: Any) -> None:
    trainer = agl.Trainer(algorithm="baseline", strategy=strategy, initial_resources={}, rollout_config=config)
    trainer.fit(third_time, train_dataset=[1, 2])
    assert trainer.result.rewards == [1.0, 1.0]


def test_an_algorithm_of_the_users_has_it_through_its_store() -> None:
    @agl.algo
    async def algorithm(*, store: LightningStore) -> list[RolloutConfig]:
        await store.add_resources({})
        one = await store.enqueue_rollout(1, "train", None, RolloutConfig(timeout_seconds=7.0))
        two = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=2), EnqueueRolloutRequest(input=3)])
        started = await store.start_rollout(4, config=RolloutConfig(max_attempts=1))
        await store.finish_rollout(started.rollout_id)
        ids = [rollout.rollout_id for rollout in (one, *two)]
        await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
        return [rollout.config for rollout in await store.query_rollouts(sort_by="start_time")]

    config = RolloutConfig(timeout_seconds=60.0, **RETRIES)
    trainer = agl.Trainer(algorithm=algorithm, strategy="shm", rollout_config=config)
    trainer.fit(third_time)
    own, plain, same, started = trainer.result
    assert plain == same == config
    assert own == config.model_copy(update={"timeout_seconds": 7.0})
    assert started == config.model_copy(update={"max_attempts": 1})


def test_what_a_request_says_comes_before_what_the_trainer_says() -> None:
    trainers = RolloutConfig(timeout_seconds=60.0, infrastructure_retries=1)
    assert merged(trainers, None) is trainers
    assert merged(None, None) is None
    own = RolloutConfig(infrastructure_retries=3)
    assert merged(trainers, own) == RolloutConfig(timeout_seconds=60.0, infrastructure_retries=3)


def test_the_limit_of_an_algorithm_stands_where_the_trainer_has_none() -> None:
    assert with_timeout(None, 5.0).timeout_seconds == 5.0
    assert with_timeout(RolloutConfig(max_attempts=2), 5.0) == RolloutConfig(max_attempts=2, timeout_seconds=5.0)
    assert with_timeout(RolloutConfig(timeout_seconds=9.0), 5.0).timeout_seconds == 9.0


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (3, TypeError, r"rollout_config must be an agl.RolloutConfig or a dict of its fields; got 3"),
        ({"max_attempt": 2}, TypeError, "no field 'max_attempt'; did you mean 'max_attempts'"),
        ({1: 2}, TypeError, "rollout_config has no field 1"),
        ({"max_attempts": 0}, ValueError, "max_attempts=0 is invalid: .*greater than or equal to 1"),
        ({"timeout_seconds": "soon"}, ValueError, "timeout_seconds='soon' is invalid"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds must be more than 0 seconds; got 0"),
        ({"unresponsive_seconds": -1}, ValueError, "unresponsive_seconds must be more than 0 seconds"),
        ({"max_attempts": 3}, ValueError, "max_attempts=3 has no effect without retry_condition"),
        ({"retry_condition": ["failed"]}, ValueError, "has no effect with max_attempts=1"),
        ({"retry_condition": ["succeeded"], "max_attempts": 2}, ValueError, r"\['succeeded'\] has no effect"),
        ({"retry_condition": ["fail"]}, ValueError, "retry_condition.0='fail' is invalid"),
    ],
)
def test_a_wrong_limit_is_refused_by_name(config: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        agl.Trainer(rollout_config=config)


def test_limits_that_contradict_those_of_grpo_are_refused() -> None:
    grpo: dict[str, Any] = {"type": "grpo", "model": "tiny", "max_steps": 1, "rollout_timeout_seconds": 5.0}
    with pytest.raises(ValueError, match=r"rollout_timeout_seconds=5.0 of GRPO .* timeout_seconds=6.0 of the Trainer"):
        agl.Trainer(algorithm=grpo, rollout_config={"timeout_seconds": 6.0})
    agl.Trainer(algorithm=grpo, rollout_config={"timeout_seconds": 5.0})
