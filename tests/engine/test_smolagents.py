"""smolagents on the embedded engine: agents that write code and that call tools, through the gateway, and learned from.

The model is untrained, so what it says is nonsense; that each request is served, and each call accounted for, is not.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import calls_of, fit, metrics_of, rollouts_of
from tests.engine.byte_policy import byte_policy

pytest.importorskip("smolagents", reason="smolagents is not installed: make test-engine")
pytest.importorskip("llguidance", reason="llguidance is not installed: make test-engine")

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]  # the package leaves its clients open

CONTEXT = 24_000  # its prompts are some 10,000 characters, and the vocabulary has few words


@tool
def multiply(a: int, b: int) -> int:
    """Return a times b.

    Args:
        a: one number
        b: another
    """
    return a * b


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-policy")
    byte_policy(context=CONTEXT).save(folder)
    return folder


def model_of(llm: agl.LLM) -> Any:
    return OpenAIServerModel(
        llm.model, api_base=llm.get_base_url(), api_key=llm.api_key or "none", **llm.sampling_parameters
    )


def coding(llm: agl.LLM, *, structured: bool = False, stream: bool = False) -> Any:
    return CodeAgent(
        [multiply], model_of(llm), max_steps=2, verbosity_level=-1, stream_outputs=stream,
        use_structured_outputs_internally=structured,
    )  # fmt: skip


def calling(llm: agl.LLM, *, stream: bool = False) -> Any:
    return ToolCallingAgent([multiply], model_of(llm), max_steps=2, verbosity_level=-1, stream_outputs=stream)


async def _fit(make: Any, model: Path, folder: Path, **options: Any) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Run a step of two rollouts; return the steps of both agents, the figures, and the calls."""

    steps: list[Any] = []

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        made = make(llm, **options)
        made.run(task)
        steps.extend(step for step in made.memory.steps if hasattr(step, "model_output_message"))
        return float(len(steps))

    store = agl.InMemoryLightningStore()
    settings: dict[str, Any] = {"max_steps": 1, "num_generations": 2, "batch_size": 1, "max_completion_length": 150}
    result = await asyncio.to_thread(
        fit, agent, ["6 times 7?"], store=store, model=model, output_dir=folder, **settings
    )
    [line] = metrics_of(result)
    return steps, line, await calls_of(store, await rollouts_of(store))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_writes_code_runs_and_is_learned_from(
    model_folder: Path, tmp_path: Path, stream: bool
) -> None:
    steps, line, calls = await _fit(coding, model_folder, tmp_path, stream=stream)
    assert steps
    assert {call.state for call in calls} == {"ok"}
    assert line["rollouts_done"] == 2
    assert line["calls_trained"] == line["calls_captured"] == len(calls)


async def test_its_structured_steps_are_json(model_folder: Path, tmp_path: Path) -> None:
    _, line, calls = await _fit(coding, model_folder, tmp_path, structured=True)
    assert {call.state for call in calls} == {"ok"}
    assert line["calls_constrained"]["response_format"] > 0
    assert line["update"]["first_ratio_error"] < 1e-3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_calls_tools_runs_and_is_learned_from(
    model_folder: Path, tmp_path: Path, stream: bool
) -> None:
    steps, line, calls = await _fit(calling, model_folder, tmp_path, stream=stream)
    called = [call.name for step in steps for call in step.tool_calls or []]
    assert set(called) <= {"multiply", "final_answer"}
    assert {call.state for call in calls} == {"ok"}
    assert line["calls_constrained"]["tool_choice"] > 0
    assert line["update"]["first_ratio_error"] < 1e-3
