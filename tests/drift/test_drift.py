"""Tokenizers, templates and what agents do: nothing is merged that is not exact, and every seam has its cause."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest

from agentlightning.adapter import ModelCall, SampleReading, TracerTraceToTriplet, model_calls, samples_from_calls
from agentlightning.adapter.rows.seams import DRIFTS
from agentlightning.llm_proxy.recording.privacy import Privacy
from tests.drift.engine import TEMPLATES, Engine, Manner, Recorded
from tests.drift.families import NAMES, families
from tests.drift.scripted_agents import PLAYS, Play

MANNERS: tuple[Manner, ...] = ("canonical", "otherwise", "noise")


def plays_of(family: str, name: str) -> list[Play]:
    """Play one scene with every template and in every manner of speaking."""
    played: list[Play] = []
    for seed, (template, manner) in enumerate(itertools.product(TEMPLATES, MANNERS)):
        random = Random(f"{family} {name} {seed}")
        play = Play(Engine(families()[family], template, random, manner), random)
        PLAYS[name](play)
        played.append(play)
    return played


def read(play: Play, **options: object) -> tuple[list[ModelCall], SampleReading]:
    calls = model_calls(play.engine.spans)
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


def true_cause(play: Play, number: int) -> str:
    """Return why a call began a row, from what the agent did and from the texts of the engine."""
    log, step, family = play.engine.log, play.steps[number], play.engine.family
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
    said = family.plain(before.prompt_text + before.completion_text)
    return "tokenisation" if family.plain(call.prompt_text).startswith(said) else "template"


def true_starts(play: Play) -> list[tuple[str, str]]:
    return [(play.engine.log[row[0]].call_id, true_cause(play, row[0])) for row in open_rows(play.engine.log)]


def starts(reading: SampleReading) -> list[tuple[str, str]]:
    return [(start.call_id, start.cause) for start in reading.starts]


def as_drift(cause: str) -> str:
    return "drift" if cause in DRIFTS else cause


each_play = pytest.mark.parametrize("name", PLAYS)
each_family = pytest.mark.parametrize("family", NAMES)


@each_family
@each_play
def test_rows_are_the_engines_record_token_by_token(family: str, name: str) -> None:
    for play in plays_of(family, name):
        _, reading = read(play)
        by_id = {call.call_id: call for call in play.engine.log}
        numbers = {call.call_id: number for number, call in enumerate(play.engine.log)}
        assert [[numbers[id] for id in row.call_ids] for row in reading.samples] == open_rows(play.engine.log)
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
@each_play
def test_every_seam_has_its_cause(family: str, name: str) -> None:
    for play in plays_of(family, name):
        _, reading = read(play, decode=play.engine.family.decode)
        assert starts(reading) == true_starts(play), (play.engine.template, play.engine.manner)
        drifted = Counter(cause for _, cause in true_starts(play) if cause in DRIFTS)
        assert Counter(start.cause for start in reading.drifts) == drifted


@each_family
@each_play
def test_without_the_models_text_the_same_rows_begin_and_the_same_number_drifted(family: str, name: str) -> None:
    for play in plays_of(family, name):
        _, reading = read(play)
        expected = [(id, as_drift(cause)) for id, cause in true_starts(play)]
        assert [(id, as_drift(cause)) for id, cause in starts(reading)] == expected


@each_family
def test_a_plain_answer_in_other_tokens_is_known_without_the_models_text(family: str) -> None:
    random = Random(f"plain {family}")
    play = Play(Engine(families()[family], "faithful", random, "otherwise"), random)
    said = play.ask([play.user()], say="the answer is forty two and the other answers are not known to anybody here")
    play.ask([*said, play.user()], continues=0)
    _, reading = read(play)
    assert starts(reading) == true_starts(play)


@each_family
@each_play
def test_where_no_words_are_kept_the_rows_are_the_same(family: str, name: str) -> None:
    for play in plays_of(family, name):
        spans = Privacy("tokens").apply(play.engine.spans)
        reading = samples_from_calls(model_calls(spans), decode=play.engine.family.decode)
        expected = true_starts(play)
        assert [id for id, _ in starts(reading)] == [id for id, _ in expected]
        certain = {"first_call", "repeated_prompt"}
        assert [s for s in starts(reading) if s[1] in certain] == [s for s in expected if s[1] in certain]


@each_family
@pytest.mark.parametrize("name", ["talks", "thinks", "uses_tools", "is_cut_off"])
def test_where_no_words_are_kept_drift_in_one_conversation_is_known_all_the_same(family: str, name: str) -> None:
    for play in plays_of(family, name):
        if play.engine.template in ("faithful", "opens a thought"):
            calls = model_calls(Privacy("tokens").apply(play.engine.spans))
            reading = samples_from_calls(calls, decode=play.engine.family.decode)
            assert starts(reading) == true_starts(play)


@each_family
def test_the_default_adapter_trains_on_the_engines_record(family: str) -> None:
    random = Random(f"adapter {family}")
    play = Play(Engine(families()[family], "forgets thoughts", random, "otherwise"), random)
    PLAYS["thinks"](play)
    triplets = TracerTraceToTriplet()(play.engine.spans)
    assert [(triplet.prompt["token_ids"], triplet.response["token_ids"]) for triplet in triplets] == [
        (call.prompt, call.completion) for call in play.engine.log
    ]


def test_the_families_drift_where_they_should() -> None:
    """The harness bites: where tokens can be cut otherwise they are, and single bytes and characters cannot."""
    drifted: Counter[str] = Counter()
    for family in NAMES:
        random = Random(family)
        play = Play(Engine(families()[family], "faithful", random, "otherwise"), random)
        PLAYS["talks"](play)
        drifted[family] = len(read(play)[1].drifts)
    assert {family for family, number in drifted.items() if number} == set(NAMES[:3])


def test_tokens_that_merge_across_the_seam_are_the_tokenizers_doing() -> None:
    random = Random(0)
    play = Play(Engine(families()["byte-level BPE"], "words only", random), random)
    said = play.ask([{"role": "user", "content": "look"}], say="the answer is forty two")
    play.ask([*said, {"role": "user", "content": "and now?"}], continues=0)
    _, reading = read(play, decode=play.engine.family.decode)
    [_, seam] = reading.starts
    assert (seam.cause, seam.at) == ("tokenisation", len(play.engine.log[0].prompt) - 1)
