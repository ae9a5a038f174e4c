"""Whole searches by the package `gepa`: an agent that heeds rules, with a model for the reflection on a socket."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.evaluation.tasks import tasks_of
from tests.prompt_search.parts import RULES, SEED, TRAIN, VAL, asked, fit, heeds_rules, llm, resources, trainer_of
from tests.stubs.model_server import Fault

pytest.importorskip("gepa")


def shown(request: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in request["messages"])


def template_in(request: dict[str, Any]) -> str:
    match = re.search(r"```\n(.*?)\n```", shown(request), re.DOTALL)
    assert match is not None
    return match[1]


def helpful(request: dict[str, Any]) -> str:
    """Answer with the template and the next rule that it lacks."""
    template = template_in(request)
    missing = [rule for rule in RULES if rule not in template]
    return f"Here it is:\n```\n{template}\n{missing[0] if missing else 'Well done.'}\n```"


def test_a_planted_better_prompt_is_found_and_every_version_is_recorded() -> None:
    store = agl.InMemoryLightningStore()
    initial = resources(note=agl.LLM(endpoint="http://127.0.0.1:9", model="carried along"))
    with asked(helpful) as server:
        algorithm = agl.GEPA(llm(server), max_metric_calls=200)
        result = fit(algorithm, store=store, run_id="run-a", initial_resources=initial)
    assert all(rule in result.best_prompt.template for rule in RULES)
    assert algorithm.get_best_prompt() == result.best_prompt == result.best_resources["main_prompt"]
    assert (result.seed.score, result.best.score, result.stop_reason) == (0.0, 1.0, "finished")
    assert [version.parent for version in result.history] == [None, "v0", "v1", "v2"]
    assert result.p_value is not None
    assert result.p_value < 0.05
    assert result.bill.calls == len(server.calls) == 3

    records = asyncio.run(store.query_run_records("run-a"))
    prompts, steps, evaluations = (
        [record for record in records if record.kind == kind] for kind in ("prompt", "step", "evaluation")
    )
    assert [record.name for record in prompts] == ["v0", "v1", "v2", "v3"]
    assert prompts[3].data["state"] == "kept"
    assert len(steps) >= 3
    assert (evaluations[-1].data["rewards"], evaluations[-1].data["tasks"]) == ([1.0] * len(VAL), tasks_of(VAL))
    published = asyncio.run(store.get_resources_by_id("gepa-run-a-v3"))
    assert published is not None
    assert published.resources == {**initial, "main_prompt": result.best_prompt}


def fails_on_even(gain: float) -> Any:
    """An agent that crashes on every second task until its prompt names the unit, which is worth a gain."""

    @agl.rollout
    def agent(task: dict[str, str], main_prompt: agl.PromptTemplate) -> float:
        prompt = main_prompt.format(**task)
        if int(task["question"][-1]) % 2 == 0 and RULES[1] not in prompt:
            raise RuntimeError("the tool needs a unit")
        return 0.5 + gain * (RULES[1] in prompt)

    return agent


def unit(request: dict[str, Any]) -> str:
    return f"```\n{template_in(request)}\n{RULES[1]}\n```"


def test_a_fault_is_feedback_and_moves_no_score() -> None:
    with asked(unit) as server:
        algorithm = agl.GEPA(llm(server), max_metric_calls=60, reflection_minibatch_size=4)
        result = fit(algorithm, fails_on_even(0.5))
    assert result.seed.score == 0.5
    assert result.seed.failures == len(VAL) // 2
    assert result.best.score == 1.0
    prompt = shown(server.calls[0].request)
    assert "What went wrong: RuntimeError: the tool needs a unit" in prompt
    assert "There is no reward" in prompt
    assert "The reward is 0.5." in prompt


def test_a_candidate_that_earned_something_on_too_few_tasks_is_never_the_best() -> None:
    @agl.rollout
    def fails_with_the_rule(task: dict[str, str], main_prompt: agl.PromptTemplate) -> float:
        prompt = main_prompt.format(**task)
        if RULES[1] in prompt and "val" in prompt and "val 1" not in prompt:
            raise RuntimeError("out of order")
        return 0.5 + 0.5 * (RULES[1] in prompt)

    with asked(unit) as server:
        result = fit(agl.GEPA(llm(server), max_metric_calls=30, skip_perfect_score=False), fails_with_the_rule)
    tried = result.history[1]
    assert (tried.score, tried.tasks, tried.failures) == (1.0, len(VAL), len(VAL) - 1)
    assert tried.state == "dropped"
    assert result.best is result.seed


def test_a_fault_of_the_parent_is_no_gain_of_the_proposal() -> None:
    """With faults as 0.0 the sum over the minibatch would rise; on the tasks that both were scored on nothing does."""
    with asked(unit) as server:
        algorithm = agl.GEPA(llm(server), max_metric_calls=40, reflection_minibatch_size=4)
        result = fit(algorithm, fails_on_even(0.0))
    assert result.history[1].state == "dropped"
    assert result.history[1].tasks == 0, "it was not played on the validation tasks"
    assert result.best is result.seed
    assert result.seed.score == 0.5


def test_a_seed_that_earns_nothing_is_an_error_and_no_search() -> None:
    @agl.rollout
    def never_earns(task: dict[str, str], main_prompt: agl.PromptTemplate) -> float:
        raise RuntimeError("out of order")

    with asked(helpful) as server, pytest.raises(ValueError, match=r"no reward on any validation task .*out of order"):
        fit(agl.GEPA(llm(server), max_metric_calls=60), never_earns)
    assert not server.calls


def test_a_text_without_the_placeholder_is_sent_back_once_and_then_refused() -> None:
    with asked(lambda request: "```\nAnswer well.\n```") as server:
        result = fit(agl.GEPA(llm(server), max_metric_calls=12, reflection_minibatch_size=2))
    assert result.best is result.seed
    refused = [version for version in result.history if version.state == "refused"]
    assert refused[0].problems == ("The placeholder {question} is missing.",)
    assert "The placeholder {question} is missing." in shown(server.calls[1].request)
    assert len(server.calls) == 2 * len(refused)


def test_proposals_of_an_iteration_are_asked_for_and_played_at_the_same_time() -> None:
    from gepa.strategies.proposal_sampling import SameParentSampling

    together, most = 0, 0

    async def slow(messages: list[dict[str, Any]], **settings: Any) -> str:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.05)
        together -= 1
        return helpful({"messages": messages})

    algorithm = agl.GEPA(slow, reflection_lm_kwargs={"model": "m"}, max_metric_calls=60)
    algorithm.sampling_strategy = SameParentSampling(2)
    result = fit(algorithm)
    assert most == 2
    assert result.best.score == 1.0
    assert "duplicate" in {version.state for version in result.history}


@pytest.mark.heavy
def test_a_limit_on_time_ends_a_search_that_plays() -> None:
    @agl.rollout
    async def hangs(task: dict[str, str], main_prompt: agl.PromptTemplate) -> float:
        await asyncio.sleep(1000)
        return 1.0

    with asked(helpful) as server:
        result = fit(agl.GEPA(llm(server), max_metric_calls=500, limits={"seconds": 1.0}), hangs)
    assert "limit on seconds" in result.stop_reason
    assert result.best is result.seed
    assert result.seed.score is None, "what was cut off is no score"


def test_an_error_of_an_override_is_told() -> None:
    class Broken(agl.GEPA[Any]):
        def make_reflective_dataset(self, *args: Any) -> Any:
            raise RuntimeError("no such field")

    algorithm = Broken(lambda messages: "", max_metric_calls=60)
    with pytest.raises(RuntimeError, match="no such field"):
        fit(algorithm)
    assert algorithm.result is not None
    assert algorithm.result.best is algorithm.result.seed


def test_a_model_that_does_not_answer_ends_the_run_with_its_last_word() -> None:
    with asked(helpful) as server:
        server.faults = [Fault(401) for _ in range(50)]
        with pytest.raises(agl.ChatError, match="401"):
            fit(agl.GEPA(llm(server), max_metric_calls=500))


def test_an_interrupted_search_keeps_its_best_and_goes_on_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with asked(helpful) as server:
        first = fit(agl.GEPA(llm(server), max_metric_calls=200, run_dir=folder, limits={"calls": 1}))
        assert (first.best.version, "limit on calls" in first.stop_reason) == ("v1", True)
        second = fit(agl.GEPA(llm(server), max_metric_calls=200, run_dir=folder))
        third = fit(agl.GEPA(llm(server), max_metric_calls=200, run_dir=folder))
    assert (second.seed.score, second.best.score) == (0.0, 1.0)
    assert [version.parent for version in second.history] == [None, "v0", "v1", "v2"]
    assert second.p_value is not None
    assert (third.best.score, third.rollouts, third.bill.calls) == (1.0, 0, 0)
    assert json.loads((folder / "history.json").read_text())["best"] == second.best.version


class Program:
    """A program hidden in a pickle: reading it makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


def test_a_state_that_hides_a_program_is_refused_and_the_program_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    folder.mkdir()
    with asked(helpful) as server:
        for state in (pickle.dumps({"program_candidates": [Program(tmp_path / "ran")]}), pickle.dumps(print), b"c"):
            (folder / "gepa_state.bin").write_bytes(state)
            with pytest.raises(agl.BadRequestError, match=r"Cannot read .*Delete it, or use another run_dir"):
                fit(agl.GEPA(llm(server), max_metric_calls=20, run_dir=folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("template", "question", "text"),
    [
        ("Say something about {question}", "val 7", "contains a search that began with other prompts"),
        (SEED, "another one", "contains a search with other validation tasks"),
    ],
)
def test_a_folder_of_other_prompts_or_tasks_is_refused(tmp_path: Path, template: str, question: str, text: str) -> None:
    with asked(helpful) as server:
        algorithm = agl.GEPA[Any](llm(server), max_metric_calls=20, run_dir=tmp_path / "s")
        fit(algorithm)
        written = (tmp_path / "s/history.json").read_text()
        trainer = trainer_of(algorithm, initial_resources=resources(template))
        with pytest.raises(ValueError, match=text):
            trainer.fit(heeds_rules, train_dataset=TRAIN, val_dataset=[*VAL[:-1], {"question": question}])
    assert (tmp_path / "s/history.json").read_text() == written


def test_several_templates_are_changed_in_turn_and_merged() -> None:
    words = {"system": "Be brief.", "main_prompt": "Name the unit."}

    @agl.rollout
    def two_prompts(task: dict[str, str], system: agl.PromptTemplate, main_prompt: agl.PromptTemplate) -> float:
        texts = {"system": system.format(**task), "main_prompt": main_prompt.format(**task)}
        return sum(words[name] in text for name, text in texts.items()) / 2

    def adds(request: dict[str, Any]) -> str:
        template = template_in(request)
        return f"```\n{template}\n{words['main_prompt' if 'question' in template else 'system']}\n```"

    system = agl.PromptTemplate(template="You help.", engine="f-string")
    both = {"system": system, **resources()}
    with asked(adds) as server:
        algorithm = agl.GEPA(llm(server), max_metric_calls=120, use_merge=True)
        result = fit(algorithm, two_prompts, initial_resources=both)
    assert result.best.score == 1.0
    assert all(words[name] in result.best_templates[name].template for name in words)
    with asked(adds) as server:
        one = fit(agl.GEPA(llm(server), max_metric_calls=40, templates=["system"]), two_prompts, initial_resources=both)
    assert list(one.best_templates) == ["system"]
    assert one.best.score == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "GEPA requires a stop condition"),
        ({"max_metric_calls": 0}, "max_metric_calls must be a whole number of 1 or more; got 0"),
        ({"max_metric_calls": 9, "missing": "zero"}, "failures never score 0"),
        ({"max_reflection_cost": 1.0}, "requires prices"),
        ({"max_metric_calls": 9, "limits": {"money": 1}}, "with calls, tokens, seconds, cost"),
    ],
)
def test_a_wrong_setting_is_told_when_it_is_given(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(agl.BadRequestError, match=re.escape(message)):
        agl.GEPA(lambda messages: "", **settings)


@pytest.mark.parametrize("bound", [{"max_reflection_cost": 1.0}, {"max_metric_calls": 30, "limits": {"cost": 1.0}}])
def test_a_bound_on_cost_without_a_price_of_the_model_is_told_before_it_is_asked(bound: dict[str, Any]) -> None:
    with asked(helpful) as server:
        with pytest.raises(agl.BadRequestError, match="requires a price for 'critic': pass prices="):
            fit(agl.GEPA(llm(server), prices={"other": (1.0, 1.0)}, **bound))
        assert not server.calls


def test_the_feedback_holds_what_the_agent_noted_and_no_key() -> None:
    @agl.rollout
    def notes(task: dict[str, str], main_prompt: agl.PromptTemplate) -> float:
        agl.emit_annotation({"wanted": "12 kg", "key": "sk-abcdefghijklmnopqrstuvwxyz012345"})
        return float(RULES[0] in main_prompt.format(**task))

    with asked(helpful) as server:
        fit(agl.GEPA(llm(server), max_metric_calls=30), notes)
    prompt = shown(server.calls[0].request)
    assert "wanted: 12 kg" in prompt
    assert "sk-abcdefghijklmnopqrstuvwxyz012345" not in prompt


INTERRUPTED = """
import sys, agentlightning as agl
from tests.prompt_search.parts import TRAIN, VAL, resources

@agl.rollout
def agent(task, main_prompt: agl.PromptTemplate) -> float:
    return float("Give a number." in main_prompt.format(**task))

algorithm = agl.GEPA(agl.LLM(endpoint=sys.argv[1], model="m"), max_metric_calls=1000, run_dir=sys.argv[2],
                     skip_perfect_score=False, retries=50)
trainer = agl.Trainer(algorithm=algorithm, strategy="shm", initial_resources=resources(), progress="none",
                      store=agl.SQLiteLightningStore(sys.argv[2] + ".db"), run_id="run-i")
trainer.fit(agent, train_dataset=TRAIN, val_dataset=VAL)
"""


@pytest.mark.heavy
def test_ctrl_c_ends_the_search_at_once_and_its_best_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    with asked(helpful) as server:
        server.faults = [Fault(), *(Fault(503) for _ in range(500))]  # the second call waits for its retries
        command = [sys.executable, "-c", INTERRUPTED, server.base_url, str(folder)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            while len(server.calls) < 3 and process.poll() is None:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "never retrieved" not in errors
    history = json.loads((folder / "history.json").read_text())
    assert (history["best"], history["stop_reason"]) == ("v1", "interrupted")
    store = agl.SQLiteLightningStore(str(folder) + ".db")
    run = asyncio.run(store.get_run_by_id("run-i"))
    assert run is not None
    assert run.state == "interrupted"
