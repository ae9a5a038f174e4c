"""Class agents: the method that runs each rollout, and the agent's access to trainer, runner and tracer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from agentlightning.litagent import LitAgent
from agentlightning.litagent.litagent import is_v0_1_rollout_api
from agentlightning.tracer.otel import OtelTracer


class Plain(LitAgent[str]):
    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        return 1.0


class Mixed(LitAgent[str]):
    """Asynchronous training, synchronous validation."""

    async def training_rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        return 1.0

    def validation_rollout(self, task: str, resources: Any, rollout: Any) -> float:
        return 0.0


class Both(LitAgent[str]):
    def rollout(self, task: str, resources: Any, rollout: Any) -> float:
        return 0.0

    async def rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("agent", "mode", "method"),
    [
        (Plain, "train", "rollout"),
        (Plain, "val", "rollout"),
        (Plain, None, "rollout"),
        (Mixed, "train", "training_rollout_async"),
        (Mixed, "val", "validation_rollout"),
        (Mixed, "test", "validation_rollout"),
        (Mixed, None, "validation_rollout"),
        (Both, "train", "rollout_async"),
    ],
)
def test_each_mode_is_run_by_the_most_special_method(agent: type[LitAgent[str]], mode: Any, method: str) -> None:
    assert agent().method_for(mode).__name__ == method


def test_an_agent_without_a_method_says_what_to_override() -> None:
    with pytest.raises(NotImplementedError, match="LitAgent has no method for mode 'train'; override one of"):
        LitAgent[str]().method_for("train")


def test_is_async_says_whether_a_coroutine_method_is_overridden() -> None:
    assert not Plain().is_async()
    assert Mixed().is_async()


def test_the_general_methods_serve_both_modes() -> None:
    assert Plain().training_rollout("x", {}, None) == Plain().validation_rollout("x", {}, None) == 1.0  # type: ignore[arg-type]


class Host:
    def __init__(self) -> None:
        self.tracer = OtelTracer()


def test_trainer_and_runner_are_referenced_weakly() -> None:
    agent, host = Plain(), Host()
    with pytest.raises(ValueError, match="Trainer has not been set for this agent"):
        agent.get_trainer()
    agent.set_trainer(host)  # type: ignore[arg-type] -- anything with a tracer
    assert agent.trainer is host
    assert agent.tracer is host.tracer
    del host
    with pytest.raises(ValueError, match="Trainer reference is no longer valid"):
        agent.get_trainer()


def test_the_tracer_of_the_runner_comes_first() -> None:
    agent, trainer, runner = Plain(), Host(), Host()
    agent.set_trainer(trainer)  # type: ignore[arg-type] -- anything with a tracer
    agent.set_runner(runner)  # type: ignore[arg-type] -- anything with a tracer
    assert agent.get_tracer() is runner.tracer


def test_an_agent_pickles_without_its_trainer() -> None:
    agent, host = Plain(), Host()
    agent.set_trainer(host)  # type: ignore[arg-type] -- anything with a tracer
    copy = pickle.loads(pickle.dumps(agent))
    with pytest.raises(ValueError, match="has not been set"):
        copy.get_trainer()


def test_an_agent_that_forgets_the_base_constructor_still_works() -> None:
    class Forgetful(Plain):
        def __init__(self) -> None:
            pass

    host, agent = Host(), Forgetful()
    agent.set_runner(host)  # type: ignore[arg-type] -- anything with a tracer
    assert agent.runner is host


def test_trained_agents_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="agent_match"):
        Plain(trained_agents="x")


def test_the_oldest_form_is_known_by_its_parameter() -> None:
    assert is_v0_1_rollout_api(lambda task, rollout_id, resources: 0)
    assert not is_v0_1_rollout_api(lambda task, rollout, resources: 0)
