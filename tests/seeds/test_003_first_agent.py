"""The manual's tutorial "Train your first agent": its programs word for word."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from tests.seeds.shown import Shown

PROMPT = agl.PromptTemplate(template="User request: {user_request}", engine="f-string")


@pytest.mark.snippet("003/room-selector", because="an agent is no Runner, and DataProto is of another framework")
def test_an_agent_that_is_a_runner(shown: Shown) -> None:
    with shown.explains(ImportError, "Return the reward from the agent, or any value with Trainer"):
        shown.run()


@pytest.mark.snippet("003/room-dataset")
def test_a_dataset_is_a_list(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("datasets")  # of another project; imported and not used
    vars(package)["load_dataset"] = None
    monkeypatch.setitem(sys.modules, "datasets", package)
    dataset = shown.run().create_room_dataset()
    seen: list[str] = []

    def agent(task: dict[str, str]) -> float:
        seen.append(task["expected_room"])
        return 1.0

    trainer = agl.Trainer(strategy="shm", algorithm="baseline", initial_resources={})
    trainer.fit(agent, dataset)
    assert sorted(seen) == ["Board Room", "Meeting Room B", "Meeting Room B"]


@pytest.mark.snippet("003/main-prompt", because="everything is imported from agentlightning itself")
def test_a_prompt_from_a_module_of_its_own(shown: Shown) -> None:
    with shown.explains(ModuleNotFoundError, "no module agentlightning.prompts", "Import PromptTemplate"):
        shown.run()
    with pytest.raises(ModuleNotFoundError, match="Import LLM from agentlightning"):
        __import__("agentlightning.models")


@pytest.mark.filterwarnings("ignore:.*n_workers:DeprecationWarning")
@pytest.mark.snippet("003/configure", because="settings of an algorithm belong to the algorithm")
def test_settings_of_an_algorithm_on_the_trainer(shown: Shown) -> None:
    with shown.explains(AttributeError, r"Trainer has no configure\(\)", r"algorithm=\{'type': \.\.\., \.\.\.\}"):
        shown.run(main_prompt=PROMPT)


@pytest.mark.snippet("003/room-reward")
def test_a_reward_of_output_and_expected(shown: Shown) -> None:
    reward = shown.run().room_booking_reward

    def selector(task: dict[str, str], main_prompt: agl.PromptTemplate) -> Any:
        assert main_prompt.format(user_request=task["task"]).startswith("User request: ")
        return SimpleNamespace(data={"selected_room": task["gives"]}) if task["gives"] else None

    tasks = [
        {"task": "3 people", "expected_room": "Meeting Room B", "gives": "Meeting Room B"},
        {"task": "15 people", "expected_room": "Board Room", "gives": "the board room"},
        {"task": "1 person", "expected_room": "Meeting Room B", "gives": "Board Room"},
    ]
    trainer = agl.Trainer(
        strategy="shm", algorithm="baseline", initial_resources={"main_prompt": PROMPT}, reward_fn=reward
    )
    trainer.fit(selector, tasks)
    assert trainer.result.rewards == [1.0, 0.5, 0.0]


@pytest.mark.filterwarnings("ignore:.*n_workers:DeprecationWarning")
@pytest.mark.snippet("003/train-rooms", because="it contradicts trainer.train() of a later chapter, and fit")
def test_training_awaited_with_everything_in_one_call(shown: Shown) -> None:
    given: dict[str, Any] = {"RoomSelector": object, "create_room_dataset": list, "main_prompt": PROMPT}
    with shown.explains(AttributeError, r"no train\(\)", r"fit\(agent, train_dataset=\.\.\.\)", "trainer.result"):
        shown.run(name="__main__", Trainer=agl.Trainer, room_booking_reward=None, **given)


def test_a_runner_that_is_the_agent_is_told_where_agents_go() -> None:
    class RoomSelector(agl.Runner[Any]):
        def run(self, task: str, context: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(TypeError, match=r"Nobody calls its run\(\).*goes to fit\(agent, train_dataset=...\)"):
        agl.Trainer(runner=RoomSelector())
