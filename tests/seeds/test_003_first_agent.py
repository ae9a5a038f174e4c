"""The manual's tutorial "Train your first agent": its programs word for word."""

from __future__ import annotations

import json
import re
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from tests.seeds.shown import Shown
from tests.stubs.model_server import ModelServer

PROMPT = agl.PromptTemplate(template="User request: {user_request}", engine="f-string")


@pytest.mark.snippet("003/room-selector")
def test_an_agent_that_is_a_runner(shown: Shown) -> None:
    agent = shown.run().RoomSelector()

    def reward(output: agl.DataProto, expected: dict[str, str]) -> float:
        assert json.loads(output.raw_response or "")["id"] == output.data["room_id"]
        return float(output.data["selected_room"] == expected["expected_room"])

    trainer = agl.Trainer(strategy="shm", algorithm="baseline", initial_resources={}, reward_fn=reward)
    trainer.fit(agent, [{"expected_room": "Meeting Room B"}, {"expected_room": "Board Room"}])
    assert trainer.result.rewards == [1.0, 0.0]


@pytest.mark.snippet(
    "003/room-dataset", differs="an empty module replaces the package `datasets`, which is imported but not used"
)
def test_a_dataset_is_a_list(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("datasets")  # of another project; imported and not used
    vars(package)["load_dataset"] = None
    monkeypatch.setitem(sys.modules, "datasets", package)
    dataset = shown.run().create_room_dataset()
    rooms: list[str] = []

    def agent(task: dict[str, str]) -> float:
        rooms.append(task["expected_room"])
        return 1.0

    trainer = agl.Trainer(strategy="shm", algorithm="baseline", initial_resources={})
    trainer.fit(agent, dataset)
    assert sorted(rooms) == ["Board Room", "Meeting Room B", "Meeting Room B"]


@pytest.mark.snippet("003/main-prompt")
def test_a_prompt_from_a_module_of_its_own(shown: Shown) -> None:
    made = shown.run()
    assert type(made.main_prompt) is agl.PromptTemplate
    assert made.LLM is agl.LLM
    assert "User request: a room for 3" in made.main_prompt.format(user_request="a room for 3")


@pytest.mark.snippet("003/configure")
def test_settings_of_an_algorithm_on_the_trainer(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    with shown.warns_of("n_workers"):
        trainer = shown.run(main_prompt=PROMPT).trainer
    assert isinstance(trainer.algorithm, agl.APO)
    assert trainer.algorithm.beam_rounds == 10
    (message,) = [record.getMessage() for record in caplog.records if record.name == "agentlightning.trainer.shorthand"]
    shown.tells(message)


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


def critic(request: dict[str, Any]) -> str:
    """Answer as a critic, and as an editor that adds what the critic has said."""
    prompt = "\n".join(message["content"] for message in request["messages"])
    template = re.search(r"<template>\n(.*?)\n</template>", prompt, re.DOTALL)
    assert template is not None, prompt
    return f"{template[1]}\nCount the people." if "<critique>" in prompt else "- It should count the people."


@pytest.mark.heavy
@pytest.mark.snippet(
    "003/train-rooms", differs="the model server is that of the test, and an empty module replaces `datasets`"
)
def test_training_awaited_with_everything_in_one_call(
    shown: Shown,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = types.ModuleType("datasets")  # of another project; imported and not used
    vars(package)["load_dataset"] = None
    monkeypatch.setitem(sys.modules, "datasets", package)
    with ModelServer(critic) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        before = [
            f"003/{name}" for name in ("room-selector", "room-dataset", "main-prompt", "configure", "room-reward")
        ]
        with shown.warns_of("n_workers"):
            shown.run(after=before, name="__main__")
    output, logged = capsys.readouterr()
    assert "Training completed: " in output
    assert "v1" in output
    assert server.calls
    shown.tells(re.findall("No val_dataset: .* training tasks", logged)[0])


def test_a_runner_that_is_the_agent_is_told_where_agents_go() -> None:
    class RoomSelector(agl.Runner[Any]):
        def run(self, task: str, context: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(TypeError, match=r"Its run\(\) is never called.*pass it to fit\(agent, train_dataset=...\)"):
        agl.Trainer(runner=RoomSelector())
