"""The proof of the searches over prompts: the room selector here, the parts of `make bench-prompts`, and its model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

import agentlightning as agl
from bench.prompts import critic, rooms
from bench.prompts.agent import answer_of, messages_of, names_language
from bench.prompts.languages import HELD_OUT, LANGUAGES, TRAIN, VALIDATION, read_items
from bench.prompts.prompts import BEST_KNOWN, STARTING
from bench.prompts.search import Bench, Method, scripted_critic

METHODS = [method for method in get_args(Method) if hasattr(agl, method.upper())]


@pytest.mark.parametrize("method", METHODS)
def test_the_room_selector_gets_from_0_57_to_0_72(method: Method) -> None:
    train, validation, held_out = rooms.make_tasks()
    bench = Bench(rooms.selects_room, train, validation)
    before = bench.accuracy(rooms.SEED, held_out[:40])
    result = bench.search(method, rooms.SEED, 0, **rooms.SETTINGS[method])
    assert before < 0.65
    assert bench.accuracy(result.template, held_out[:40]) >= 0.72
    assert result.model_calls > 0


def request(template: str, *cases: tuple[dict[str, Any], float], critique: str = "") -> str:
    shown = "".join(
        f'<rollout number="{number}">\nTask: {json.dumps(task)}\nStatus: succeeded\nReward: {reward}\n</rollout>\n'
        for number, (task, reward) in enumerate(cases, 1)
    )
    tagged_critique = f"\n<critique>\n{critique}\n</critique>" if critique else ""
    return f"<template>\n{template}\n</template>\n{shown}{tagged_critique}"


HOLA = {"text": "¿Qué tal?", "language": "Spanish"}
HELLO = {"text": "How are you?", "language": "English"}


def test_the_critic_proposes_what_failed_and_only_that() -> None:
    critique = critic.answer(request("Name it: {text}", (HOLA, 0.0), (HELLO, 1.0)), 0)
    assert "¿Qué tal?" in critique
    assert "Spanish" in critique
    assert "English" not in critique
    assert critic.answer(request("Name it: {text}", (HELLO, 1.0)), 0) == "Critique:\n"


def test_the_critic_answers_a_reflection_of_the_package_with_a_prompt_in_a_fence() -> None:
    proposal = pytest.importorskip("gepa.strategies.instruction_proposal").InstructionProposalSignature
    records = [
        {"Inputs": json.dumps(task), "Generated Outputs": "user: ...", "Feedback": f"The reward is {reward:g}."}
        for task, reward in ((HOLA, 0.0), (HELLO, 1.0))
    ]
    fields = {"current_instruction_doc": "{text}", "dataset_with_feedback": records, "prompt_template": None}
    answer = critic.answer(proposal.prompt_renderer(fields), 0)
    new = proposal.output_extractor(answer)["new_instruction"]
    assert new == "User: ¿Qué tal?\nAssistant: Spanish\nUser: {text}"


def test_the_editor_puts_examples_before_the_last_turn_and_asks_as_the_prompt_asked() -> None:
    critique = critic.answer(request("Name it: {text}", (HOLA, 0.0), (HELLO, 0.0)), 0)
    new = critic.answer(request("Name it: {text}", critique=critique), 0)
    messages = messages_of(new.format(text="Bonjour"))
    assert messages[-1] == {"role": "user", "content": "Name it: Bonjour"}
    examples = {
        (user["content"], reply["content"]) for user, reply in zip(messages[:-1:2], messages[1:-1:2], strict=True)
    }
    assert examples == {("Name it: ¿Qué tal?", "Spanish"), ("Name it: How are you?", "English")}
    one = critic.answer(f"Repair exactly one thing.\n{request('Name it: {text}', critique=critique)}", 0)
    assert len(messages_of(one)) == 3


def test_the_editor_keeps_a_bound_of_examples_and_drops_what_is_shown_most_often() -> None:
    template = "".join(f"User: {n}\nAssistant: Dutch\n" for n in range(critic.MOST_EXAMPLES)) + "User: {text}"
    new = critic.answer(request(template, critique=critic.answer(request(template, (HOLA, 0.0), (HELLO, 0.0)), 0)), 0)
    replies = [message["content"] for message in messages_of(new) if message["role"] == "assistant"]
    assert len(replies) == critic.MOST_EXAMPLES
    assert replies.count("Dutch") == critic.MOST_EXAMPLES - 2


def test_the_critic_does_not_contain_the_best_known_prompt() -> None:
    source = Path(critic.__file__).read_text(encoding="utf-8").casefold()
    lines = [line.partition(": ")[2].casefold() for line in BEST_KNOWN.splitlines()]
    for words in (*LANGUAGES, *(line for line in lines if line and "{" not in line), *rooms.REQUIREMENTS):
        assert words.casefold() not in source


@pytest.mark.parametrize(
    ("tokens", "answer"),
    [
        (["The", " Dutch", "English"], "Dutch"),
        (["I", "The", "F"], None),  # one letter names no language
        (["Port", "Spanish"], "Portuguese"),
        (["", "\n", "in", "In", "engl"], "Indonesian"),
    ],
)
def test_the_answer_is_the_likeliest_token_that_names_a_language(tokens: list[str], answer: str | None) -> None:
    assert answer_of(tokens) == answer


DATA = Path(os.environ.get("BENCH_PROMPTS_DATA", "build/prompts"))
fetched = pytest.mark.skipif(
    not (DATA / "chatterbot_corpus").is_dir(), reason="make test-heavy and make bench-prompts fetch the wheels"
)


@fetched
@pytest.mark.heavy
def test_no_text_is_in_two_parts_and_every_language_has_as_many() -> None:
    items = read_items(DATA)
    parts = [items.train, items.validation, items.held_out]
    texts = [item["text"].casefold() for part in parts for item in part]
    assert len(set(texts)) == len(texts)
    for part, each in zip(parts, (TRAIN, VALIDATION, HELD_OUT), strict=True):
        assert {name: sum(item["language"] == name for item in part) for name in LANGUAGES} == dict.fromkeys(
            LANGUAGES, each
        )


@pytest.mark.timeout(1200)  # up to five minutes of one core, more beside other tests
@fetched
@pytest.mark.heavy
def test_the_best_known_prompt_is_worth_much_more_than_the_worst_of_the_starting_ones() -> None:
    from bench.prompts.model import served, unpacked

    items = read_items(DATA)
    with served(unpacked(DATA, DATA / "model")) as gateway:
        bench = Bench(names_language, items.train, items.validation, gateway)
        assert bench.accuracy(BEST_KNOWN, items.validation) >= bench.accuracy(STARTING[0], items.validation) + 0.4


def test_a_critic_of_its_own_process_ends_with_the_search() -> None:
    with scripted_critic(0) as llm:
        assert llm.endpoint.startswith("http://127.0.0.1:")
