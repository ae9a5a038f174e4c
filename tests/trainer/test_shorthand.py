"""`configure` and `train`: what the constructor and `fit` do, in the words of the documents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl

TASKS = [{"wants": 0.25}, {"wants": 0.75}]


def agent(task: dict[str, float]) -> float:
    return task["wants"]


def trainer(**settings: Any) -> agl.Trainer:
    return agl.Trainer(strategy="shm", progress="none", **{"initial_resources": {}, **settings})


def test_configure_takes_any_setting_of_the_algorithm() -> None:
    made = trainer()
    made.configure("apo", epochs=7, beam_width=3)
    apo: Any = made.algorithm
    assert isinstance(apo, agl.APO)
    assert (apo.beam_rounds, apo.beam_width) == (7, 3)
    made.configure({"type": "apo", "seed": 5}, epochs=2)
    apo = made.algorithm
    assert (apo.beam_rounds, apo.seed) == (2, 5)
    made.configure(agl.Baseline)
    assert isinstance(made.algorithm, agl.Baseline)


def test_a_learning_rate_says_nothing_to_a_search_over_prompts(caplog: pytest.LogCaptureFixture) -> None:
    trainer().configure(algorithm="APO", lr=1e-3)
    assert "configure(lr=0.001) has no effect: APO changes no weights" in caplog.text


def test_configure_refuses_what_would_have_no_effect() -> None:
    made, given = trainer(), agl.Baseline()
    with pytest.raises(TypeError, match=r"configure\(epochs\) would have no effect on .*Baseline"):
        made.configure(given, epochs=2)
    made.configure(given)
    with pytest.raises(TypeError, match="beam_wdth"):
        made.configure("apo", beam_wdth=2)
    with pytest.raises(ValueError, match="n_epochs and max_queue_length must be 1 or more"):
        made.configure("baseline", epochs=0)
    assert made.algorithm is given


def test_train_judges_by_its_own_reward_function_this_once() -> None:
    def wants(task: dict[str, float]) -> dict[str, float]:
        return {"said": task["wants"]}

    def nothing(output: dict[str, float]) -> float:
        return 0.0

    def said(output: dict[str, float]) -> float:
        return output["said"]

    made = trainer(algorithm="baseline", reward_fn=nothing)
    assert made.train(wants, TASKS, reward_fn=said).rewards == [0.25, 0.75]
    made.fit(wants, TASKS)
    assert made.result.rewards == [0.0, 0.0]


class Selector(agl.Runner[Any]):
    """An agent that calls itself a runner."""

    def run(self, task: dict[str, float], context: dict[str, Any] | None = None) -> float:  # type: ignore[override]
        assert context is None
        return task["wants"]


def test_an_object_with_run_of_a_task_is_an_agent() -> None:
    made = trainer(algorithm="baseline")
    assert made.train(runner=Selector(), dataset=TASKS).rewards == [0.25, 0.75]
    with pytest.raises(TypeError, match=r"an object with run\(task, ...\); got .*LitAgentRunner"):
        made.train(runner=agl.LitAgentRunner[Any](tracer=agl.OtelTracer()), dataset=TASKS)
    with pytest.raises(TypeError, match="needs an agent"):
        trainer().train()
    with pytest.raises(ValueError, match=r"has no algorithm: .* hold no agl\.PromptTemplate"):
        trainer().train(runner=agent, dataset=TASKS)


@pytest.mark.parametrize(("count", "rounds"), [(100, 6), (16, 1), (3, 1), (1, 1)])
def test_iterations_bound_the_versions_that_are_made(count: int, rounds: int) -> None:
    given = agl.APO[Any]()
    own = given.with_iterations(count)
    assert own.beam_rounds == rounds
    assert own.beam_width * own.branch_factor * own.beam_rounds <= count
    assert given.beam_rounds == 3


@pytest.mark.parametrize("awaited", [False, True])
def test_iterations_are_the_passes_of_baseline_for_this_call_only(awaited: bool) -> None:
    made = trainer()
    made.configure(algorithm="Baseline", epochs=2)

    async def train(**settings: Any) -> Any:
        return await made.train(runner=agent, dataset=TASKS, **settings)

    def run(**settings: Any) -> Any:
        return asyncio.run(train(**settings)) if awaited else made.train(agent, TASKS, **settings)

    assert run(max_iterations=3).rewards == [0.25, 0.75] * 3
    result = run()
    assert result.rewards == [0.25, 0.75] * 2
    assert made.result is result


def test_iterations_are_the_steps_of_what_trains_weights() -> None:
    given = agl.GRPO(model="m", max_steps=9), agl.PPO(model="m"), agl.SFT(model="m", min_reward=1.0)
    assert [algorithm.with_iterations(2).settings.max_steps for algorithm in given] == [2, 2, 2]
    assert given[0].settings.max_steps == 9


def test_iterations_of_an_algorithm_that_counts_none_are_ignored_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    @agl.algo
    def once(train_dataset: Any) -> int:
        return len(train_dataset)

    assert trainer(algorithm=once).train(agent, TASKS, max_iterations=100) == 2
    assert "max_iterations=100 has no effect: FunctionalAlgorithm counts no iterations" in caplog.text
    with pytest.raises(ValueError, match="max_iterations must be a whole number of 1 or more; got 0"):
        trainer(algorithm=once).train(agent, TASKS, max_iterations=0)
