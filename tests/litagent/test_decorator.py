"""Function agents: checked when they are decorated, called with the arguments that they declare."""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from agentlightning.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.decorator import FunctionalLitAgent, as_agent
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Rollout,
    SamplingParameters,
    SystemPrompt,
)

if TYPE_CHECKING:
    from agentlightning.types import LLM as OnlyForTheChecker

MAIN = LLM(endpoint="http://main/v1", model="m")
JUDGE = LLM(endpoint="http://judge/v1", model="j")
PROMPT = PromptTemplate(template="Say {x}", engine="f-string")
PROXY = ProxyLLM(endpoint="http://gateway:1/v1", model="m")


@pytest.fixture
async def attempt() -> AttemptedRollout:
    store = InMemoryLightningStore()
    attempted = await store.start_rollout(input="task")
    await store.close()
    return attempted


def given(agent: FunctionalLitAgent[Any], resources: dict[str, Any], attempt: Rollout) -> Any:
    return agent.rollout("task", resources, attempt)


def test_a_function_of_the_task_alone_needs_no_resources(attempt: AttemptedRollout) -> None:
    @rollout
    def agent(task: str) -> float:
        return len(task)

    assert isinstance(agent, LitAgent)
    assert not agent.needs_resources
    assert given(agent, {}, attempt) == 4


def test_calling_the_agent_calls_the_function() -> None:
    @rollout
    def agent(task: str) -> str:
        """Its own words."""
        return task

    assert agent("x") == "x"
    assert (agent.__name__, agent.__doc__) == ("agent", "Its own words.")


def test_everything_there_is_to_ask_for(attempt: AttemptedRollout) -> None:
    @rollout
    def agent(
        task: str, llm: LLM, *, prompt_template: PromptTemplate, rollout: Any, resources: Any, **rest: Any
    ) -> Any:
        return llm, prompt_template, rollout, resources, rest

    resources = {"main": MAIN, "prompt": PROMPT}
    assert given(agent, resources, attempt) == (MAIN, PROMPT, attempt, resources, {})
    assert agent.needs_resources


def test_a_resource_is_found_by_the_name_of_the_parameter_first(attempt: AttemptedRollout) -> None:
    @rollout
    def agent(task: str, judge: LLM, main: LLM) -> Any:
        return judge, main

    assert given(agent, {"main": MAIN, "judge": JUDGE}, attempt) == (JUDGE, MAIN)


def test_of_several_that_fit_the_first_is_taken_with_a_warning(
    attempt: AttemptedRollout, caplog: pytest.LogCaptureFixture
) -> None:
    @rollout
    def agent(task: str, llm: LLM) -> Any:
        return llm

    with caplog.at_level(logging.WARNING):
        assert given(agent, {"main": MAIN, "judge": JUDGE}, attempt) is MAIN
    assert "Using 'main'" in caplog.text


def test_parameters_are_known_by_their_types(attempt: AttemptedRollout) -> None:
    @rollout
    def agent(task: str, model: LLM, mine: AttemptedRollout, everything: NamedResources) -> Any:
        return model, mine, everything

    assert given(agent, {"main": MAIN}, attempt) == (MAIN, attempt, {"main": MAIN})


def test_a_type_imported_for_the_checker_only_is_read_as_text(attempt: AttemptedRollout) -> None:
    def agent(task: str, model: OnlyForTheChecker) -> Any:
        return model

    agent.__annotations__["model"] = "agl.LLM"
    assert given(rollout(agent), {"main": MAIN}, attempt) is MAIN


def test_prompts_of_the_system_and_sampling_parameters_are_asked_for_by_type(
    attempt: AttemptedRollout, caplog: pytest.LogCaptureFixture
) -> None:
    @rollout
    def both(task: str, system: SystemPrompt, parameters: SamplingParameters, prompt_template: PromptTemplate) -> Any:
        return system.template, dict(**parameters), prompt_template.template

    @prompt_rollout
    def of_prompts(task: str, prompt_template: PromptTemplate) -> Any:
        return prompt_template.format(x=1)

    system, sampling = SystemPrompt(template="Be {x}"), SamplingParameters(top_p=0.5)
    resources = {"instructions": system, "sampling": sampling}
    assert given(of_prompts, resources, attempt) == "Be 1"
    assert given(both, {**resources, "prompt": PROMPT}, attempt) == ("Be {x}", {"top_p": 0.5}, "Say {x}")
    assert not caplog.records
    with pytest.raises(ValueError, match="No SystemPrompt resource found for the parameter 'system'"):
        given(both, {"prompt": PROMPT}, attempt)


def test_an_optional_resource_may_be_missing(attempt: AttemptedRollout) -> None:
    @rollout
    def agent(task: str, llm: LLM | None, prompt_template: Any = "default", number: int = 3) -> Any:
        return llm, prompt_template, number

    assert not agent.needs_resources
    assert given(agent, {}, attempt) == (None, "default", 3)


def test_a_missing_resource_is_named(attempt: AttemptedRollout) -> None:
    agent = llm_rollout(lambda task, llm: llm)
    with pytest.raises(
        ValueError, match=r"No LLM resource found for the parameter 'llm'; published: p \(prompt_template\)"
    ):
        given(agent, {"p": PROMPT}, attempt)
    prompt_agent = prompt_rollout(lambda task, prompt_template: 0)
    with pytest.raises(ValueError, match=r"No prompt template resource found .* published: nothing"):
        given(prompt_agent, {}, attempt)


def test_a_proxied_model_arrives_with_the_address_of_the_attempt(attempt: AttemptedRollout) -> None:
    agent = llm_rollout(lambda task, llm: llm)
    llm = given(agent, {"main": PROXY}, attempt)
    assert type(llm) is LLM
    path = f"/rollout/{attempt.rollout_id}/attempt/{attempt.attempt.attempt_id}/v1"
    assert llm.endpoint == "http://gateway:1" + path


def test_a_proxied_model_is_left_alone_when_asked(attempt: AttemptedRollout) -> None:
    for decorate in (rollout(strip_proxy=False), llm_rollout(strip_proxy=False)):
        assert given(decorate(lambda task, llm: llm), {"main": PROXY}, attempt) is PROXY


def test_a_proxied_model_needs_an_attempt(attempt: AttemptedRollout) -> None:
    bare = Rollout(rollout_id="ro-1", input="x", start_time=0.0)
    with pytest.raises(ValueError, match="only within an attempt"):
        given(llm_rollout(lambda task, llm: llm), {"main": PROXY}, bare)


async def test_a_coroutine_function_makes_an_asynchronous_agent(attempt: AttemptedRollout) -> None:
    @llm_rollout
    async def agent(task: str, llm: LLM) -> Any:
        await asyncio.sleep(0)
        return llm

    assert agent.is_async()
    assert agent.method_for("train") == agent.rollout_async
    assert await agent.rollout_async("x", {"main": MAIN}, attempt) is MAIN
    with pytest.raises(RuntimeError, match="call rollout_async"):
        agent.rollout("x", {}, attempt)


async def test_an_object_with_an_asynchronous_call_is_asynchronous(attempt: AttemptedRollout) -> None:
    class Agent:
        async def __call__(self, task: str, llm: LLM) -> str:
            return task + llm.model

    assert await rollout(Agent()).rollout_async("x", {"main": MAIN}, attempt) == "xm"


def test_a_partial_function_is_an_agent(attempt: AttemptedRollout) -> None:
    def agent(task: str, llm: LLM, scale: float) -> Any:
        return llm, scale

    assert given(rollout(functools.partial(agent, scale=2.0)), {"main": MAIN}, attempt) == (MAIN, 2.0)


def no_parameters() -> None: ...
def wrong_first(question: str) -> None: ...
def unknown(task: str, something: Any) -> None: ...
def positional(task: str, llm: Any, /) -> None: ...


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (no_parameters, "must be a positional parameter called 'task'"),
        (wrong_first, r"'task'; its parameters are \(question\)"),
        (unknown, "Cannot determine what to pass for parameter 'something' of unknown"),
        (positional, "'llm' of positional is positional-only"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_when_it_is_decorated(func: Any, message: str) -> None:
    with pytest.raises(NotImplementedError, match="does not match any known agent patterns") as caught:
        rollout(func)
    assert caught.match(message)


@pytest.mark.parametrize(
    ("decorate", "func", "message"),
    [
        (llm_rollout, lambda task: 0, "must have at least 2 parameters"),
        (llm_rollout, lambda x, llm: 0, "must be a positional parameter called 'task'"),
        (llm_rollout, lambda task, model: 0, "must have a positional parameter called 'llm'"),
        (prompt_rollout, lambda task, llm: 0, "must have a positional parameter called 'prompt_template'"),
    ],
)
def test_the_special_decorators_ask_for_their_parameter(decorate: Any, func: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decorate(func)
    with pytest.raises(ValueError, match=message):
        decorate()(func)


def test_a_generator_is_no_agent() -> None:
    def agent(task: str) -> Any:
        yield 1

    with pytest.raises(TypeError, match="is a generator"):
        rollout(agent)


def test_plain_functions_become_agents_and_classes_do_not() -> None:
    assert isinstance(as_agent(lambda task: 0), FunctionalLitAgent)
    agent = LitAgent[str]()
    assert as_agent(agent) is agent
    with pytest.raises(TypeError, match="the class LitAgent; pass an instance of it"):
        as_agent(LitAgent)
    with pytest.raises(TypeError, match="got 3"):
        as_agent(3)


@rollout
def decorated(task: str) -> str:
    return task.upper()


def undecorated(task: str) -> str:
    return task.upper()


wrapped = rollout(undecorated)


def run_once(agent: FunctionalLitAgent[Any]) -> Any:
    return agent("done")


def test_agents_of_a_module_pickle() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    copy = pickle.loads(pickle.dumps(wrapped))
    assert copy("x") == "X"


def test_a_decorated_agent_travels_to_a_spawned_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(run_once, [decorated, wrapped]) == ["DONE", "DONE"]
