"""Tokenizers, templates and behaviours of agents: only exact prefixes are merged, and every seam has its cause."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest

from agentlightning.adapter import ModelCall, SampleReading, TracerTraceToTriplet, model_calls, samples_from_calls
from agentlightning.adapter.rows.seams import DRIFTS
from agentlightning.llm_proxy.recording.recorder import Privacy
from tests.drift.engine import TEMPLATES, Engine, Manner, Recorded
from tests.drift.families import NAMES, families
from tests.drift.scripted_agents import BEHAVIOURS, ScriptedAgent

MANNERS: tuple[Manner, ...] = ("canonical", "otherwise", "noise")


def agents_of(family: str, name: str) -> list[ScriptedAgent]:
    """Run one behaviour with every template and in every manner of sampling."""
    agents: list[ScriptedAgent] = []
    for seed, (template, manner) in enumerate(itertools.product(TEMPLATES, MANNERS)):
        random = Random(f"{family} {name} {seed}")
        agent = ScriptedAgent(Engine(families()[family], template, random, manner), random)
        BEHAVIOURS[name](agent)
        agents.append(agent)
    return agents


def read(agent: ScriptedAgent, **options: object) -> tuple[list[ModelCall], SampleReading]:
    calls = model_calls(agent.engine.spans)
    return calls, samples_from_calls(calls, **options)  # type: ignore[arg-type]


def open_rows(log: list[Recorded]) -> list[list[int]]:
    """Return the calls of each row by the rule itself: compare with every row, take the longest that fits exactly."""
    rows: list[tuple[list[int], list[int]]] = []
    for number, call in enumerate(log):
        fitting = [row for row in rows if call.prompt[: len(row[0])] == row[0]]
        row = max(fitting, key=lambda row: len(row[0]), default=None)
        if row is None:
            row = ([], [])
            rows.append(row)
        row[0][:] = call.prompt + call.completion
        row[1].append(number)
    return [numbers for _, numbers in rows]


def true_cause(agent: ScriptedAgent, number: int) -> str:
    """Return why a call began a row, from the agent's steps and from the texts of the engine."""
    log, step, family = agent.engine.log, agent.steps[number], agent.engine.family
    call = log[number]
    if number == 0:
        return "first_call"
    if any(call.prompt == earlier.prompt for earlier in log[:number]):
        return "repeated_prompt"
    if step.change is not None:
        return step.change
    assert step.continues is not None
    before = log[step.continues]
    if call.prompt[: len(before.prompt) + len(before.completion)] == before.prompt + before.completion:
        return step.taken
    plain_text = family.plain(before.prompt_text + before.completion_text)
    return "tokenisation" if family.plain(call.prompt_text).startswith(plain_text) else "template"


def true_starts(agent: ScriptedAgent) -> list[tuple[str, str]]:
    return [(agent.engine.log[row[0]].call_id, true_cause(agent, row[0])) for row in open_rows(agent.engine.log)]


def starts(reading: SampleReading) -> list[tuple[str, str]]:
    return [(start.call_id, start.cause) for start in reading.starts]


def as_drift(cause: str) -> str:
    return "drift" if cause in DRIFTS else cause


each_behaviour = pytest.mark.parametrize("name", BEHAVIOURS)
each_family = pytest.mark.parametrize("family", NAMES)


@each_family
@each_behaviour
def test_rows_are_the_engines_record_token_by_token(family: str, name: str) -> None:
    for agent in agents_of(family, name):
        _, reading = read(agent)
        by_id = {call.call_id: call for call in agent.engine.log}
        numbers = {call.call_id: number for number, call in enumerate(agent.engine.log)}
        assert [[numbers[id] for id in row.call_ids] for row in reading.samples] == open_rows(agent.engine.log)
        for row in reading.samples:
            members = [by_id[id] for id in row.call_ids]
            assert row.token_ids == members[-1].prompt + members[-1].completion
            spoken: dict[int, float] = {}
            for call in members:
                start = len(call.prompt)
                assert row.token_ids[start : start + len(call.completion)] == call.completion
                spoken.update(zip(range(start, start + len(call.completion)), call.logprobs, strict=True))
            assert row.mask == [int(place in spoken) for place in range(len(row.token_ids))]
            assert row.logprobs == [spoken.get(place, 0.0) for place in range(len(row.token_ids))]


@each_family
@each_behaviour
def test_every_seam_has_its_cause(family: str, name: str) -> None:
    for agent in agents_of(family, name):
        _, reading = read(agent, decode=agent.engine.family.decode)
        assert starts(reading) == true_starts(agent), (agent.engine.template, agent.engine.manner)
        drifted = Counter(cause for _, cause in true_starts(agent) if cause in DRIFTS)
        assert Counter(start.cause for start in reading.drifts) == drifted


@each_family
@each_behaviour
def test_without_the_models_text_the_same_rows_begin_and_the_same_number_drifted(family: str, name: str) -> None:
    for agent in agents_of(family, name):
        _, reading = read(agent)
        expected = [(id, as_drift(cause)) for id, cause in true_starts(agent)]
        assert [(id, as_drift(cause)) for id, cause in starts(reading)] == expected


@each_family
def test_a_plain_answer_in_other_tokens_is_known_without_the_models_text(family: str) -> None:
    random = Random(f"plain {family}")
    agent = ScriptedAgent(Engine(families()[family], "faithful", random, "otherwise"), random)
    chat = agent.ask([agent.user()], say="the answer is forty two and the other answers are not known to anybody here")
    agent.ask([*chat, agent.user()], continues=0)
    _, reading = read(agent)
    assert starts(reading) == true_starts(agent)


@each_family
@each_behaviour
def test_where_no_words_are_kept_the_rows_are_the_same(family: str, name: str) -> None:
    for agent in agents_of(family, name):
        spans = Privacy("tokens").apply(agent.engine.spans)
        reading = samples_from_calls(model_calls(spans), decode=agent.engine.family.decode)
        expected = true_starts(agent)
        assert [id for id, _ in starts(reading)] == [id for id, _ in expected]
        certain = {"first_call", "repeated_prompt"}
        assert [s for s in starts(reading) if s[1] in certain] == [s for s in expected if s[1] in certain]


@each_family
@pytest.mark.parametrize("name", ["talks", "thinks", "uses_tools", "is_cut_off"])
def test_where_no_words_are_kept_drift_in_one_conversation_is_known_all_the_same(family: str, name: str) -> None:
    for agent in agents_of(family, name):
        if agent.engine.template in ("faithful", "opens a thought"):
            calls = model_calls(Privacy("tokens").apply(agent.engine.spans))
            reading = samples_from_calls(calls, decode=agent.engine.family.decode)
            assert starts(reading) == true_starts(agent)


@each_family
def test_the_default_adapter_trains_on_the_engines_record(family: str) -> None:
    random = Random(f"adapter {family}")
    agent = ScriptedAgent(Engine(families()[family], "forgets thoughts", random, "otherwise"), random)
    BEHAVIOURS["thinks"](agent)
    triplets = TracerTraceToTriplet()(agent.engine.spans)
    assert [(triplet.prompt["token_ids"], triplet.response["token_ids"]) for triplet in triplets] == [
        (call.prompt, call.completion) for call in agent.engine.log
    ]


def test_the_families_drift_where_they_should() -> None:
    """The harness is effective: it cuts tokens otherwise if it can, and single bytes and characters cannot be cut."""
    drifted: Counter[str] = Counter()
    for family in NAMES:
        random = Random(family)
        agent = ScriptedAgent(Engine(families()[family], "faithful", random, "otherwise"), random)
        BEHAVIOURS["talks"](agent)
        drifted[family] = len(read(agent)[1].drifts)
    assert {family for family, number in drifted.items() if number} == set(NAMES[:3])


def test_tokens_that_merge_across_the_seam_are_the_tokenizers_doing() -> None:
    random = Random(0)
    agent = ScriptedAgent(Engine(families()["byte-level BPE"], "words only", random), random)
    messages = agent.ask([{"role": "user", "content": "look"}], say="the answer is forty two")
    agent.ask([*messages, {"role": "user", "content": "and now?"}], continues=0)
    _, reading = read(agent, decode=agent.engine.family.decode)
    [_, seam] = reading.starts
    assert (seam.cause, seam.at) == ("tokenisation", len(agent.engine.log[0].prompt) - 1)
