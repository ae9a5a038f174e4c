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
        llm.model, api_base=llm.get_base_url(), api_key=llm.api_key or "unused", **llm.sampling_parameters
    )


def coding(llm: agl.LLM, **options: Any) -> Any:
    return CodeAgent([multiply], model_of(llm), max_steps=2, verbosity_level=-1, **options)


def calling(llm: agl.LLM, **options: Any) -> Any:
    return ToolCallingAgent([multiply], model_of(llm), max_steps=2, verbosity_level=-1, **options)


@pytest.mark.parametrize(
    ("make", "options", "constrained"),
    [
        (coding, {"stream_outputs": False}, None),
        (coding, {"stream_outputs": True}, None),
        (coding, {"use_structured_outputs_internally": True}, "response_format"),
        (calling, {"stream_outputs": False}, "tool_choice"),
        (calling, {"stream_outputs": True}, "tool_choice"),
    ],
)
async def test_an_agent_runs_and_is_learned_from(
    model_folder: Path, tmp_path: Path, make: Any, options: dict[str, Any], constrained: str | None
) -> None:
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
        fit, agent, ["6 times 7?"], store=store, model=model_folder, output_dir=tmp_path, **settings
    )
    [line] = metrics_of(result)
    calls = await calls_of(store, await rollouts_of(store))
    assert steps
    assert {call.state for call in calls} == {"ok"}
    assert line["rollouts_done"] == 2
    assert line["calls_trained"] == line["calls_captured"] == len(calls)
    if constrained is not None:
        assert line["calls_constrained"][constrained] > 0
        assert line["update"]["first_ratio_error"] < 1e-3
    if make is calling:
        assert {call.name for step in steps for call in step.tool_calls or []} <= {"multiply", "final_answer"}
