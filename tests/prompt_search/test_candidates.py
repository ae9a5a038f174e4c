"""The text that a model wrote, against the seed's placeholders, engine, fences and braces."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.prompt_search.candidates import check_version, placeholders, same_text, written_placeholders

Engine = Any


def template(text: str, engine: Engine = "f-string") -> agl.PromptTemplate:
    return agl.PromptTemplate(template=text, engine=engine)


SEED = template("Answer {question} for {user}.")
INDEXED = template("Answer {task[question]} in {price:.2f}.")
SHORT = template("Write {question}")
FENCED = template("Write {question} as\n```\ncode\n```\nand stop.")


@pytest.mark.parametrize(
    ("seed", "text", "becomes"),
    [
        (SEED, "{question}, {user}!", "{question}, {user}!"),
        (SEED, "```\n{question} {user}\n```", "{question} {user}"),
        (SEED, "```text\n{question} {user}\n```\n", "{question} {user}"),
        (SEED, "Here it is:\n\n~~~\n{question} {user}\n~~~\nGood luck!", "{question} {user}"),
        (SHORT, "~~~\nWrite\n```\n{question}\n~~~\n", "Write\n```\n{question}"),
        (SHORT, "```\n{question}\n````\n", "```\n{question}\n````\n"),
        (SHORT, "```\na {question}\n```\n```\nb\n```", "```\na {question}\n```\n```\nb\n```"),
        (FENCED, "{question} as\n```\ncode\n```\nand stop.", "{question} as\n```\ncode\n```\nand stop."),
        (SEED, '{question} {user} as {"a": {"b": 1}}', '{question} {user} as {{"a": {{"b": 1}}}}'),
        (SEED, '{question} {user} as {{"a": 1}} or {"b": 2}', '{question} {user} as {{"a": 1}} or {{"b": 2}}'),
        (SEED, "{question} {user} {} {0} }", "{question} {user} {{}} {{0}} }}"),
        (SEED, "{question!r} {user:>10} {x y}", "{question!r} {user:>10} {{x y}}"),
        (SEED, "{question} {user} {\n}", "{question} {user} {{\n}}"),
        (INDEXED, "{task[question]} {price:.1f} {a b}", "{task[question]} {price:.1f} {{a b}}"),
        (INDEXED, "{task} {price}", "{task} {price}"),
    ],
)
def test_what_can_be_repaired_is(seed: agl.PromptTemplate, text: str, becomes: str) -> None:
    assert check_version(text, seed) == (template(becomes), ())


@pytest.mark.parametrize(
    ("seed", "text", "problem"),
    [
        (SEED, "", "The text is empty."),
        (SEED, "```\n\n```", "The text is empty."),
        (SEED, "{question}", "The placeholder {user} is missing."),
        (SEED, "{question} {user} {name}", "There is no placeholder {name}."),
        (SEED, "x" * 40_000, "The text has 40000 characters; at most 32000 are allowed."),
        (SEED, "{question} {user.__class__}", "The placeholder {user} is missing."),
        (INDEXED, "{price} {task[answer]}", "The placeholder {task} is missing."),
    ],
)
def test_what_cannot_is_a_problem(seed: agl.PromptTemplate, text: str, problem: str) -> None:
    checked = check_version(text, seed)
    assert checked.template is None
    assert problem in checked.problems


def test_gaps_are_shown_as_they_are_written() -> None:
    assert written_placeholders(INDEXED) == ["{price}", "{task[question]}"]


@pytest.mark.parametrize("seed", [SHORT, FENCED])
@pytest.mark.parametrize(
    "text", ["```x\n" * 100_000, "`" * 400_000 + "\n", "~~~\n~~~x\n" * 50_000, "{question" * 3_500 + "}"]
)
def test_a_long_text_of_marks_takes_no_longer_than_another(seed: agl.PromptTemplate, text: str) -> None:
    """Time grows with the length: with its square these would take minutes."""
    check_version(text, seed)


def test_jinja_keeps_its_variables_and_its_syntax() -> None:
    seed = template("{% for item in items %}{{ item }}{% endfor %} {{ user }}", "jinja")
    assert set(placeholders(seed)) == {"items", "user"}
    assert check_version('{"a": 1} {{ items | join(",") }} {{ user }}', seed).problems == ()
    assert check_version("{{ items }} {{ user }} {{ config }}", seed).problems == (
        "There is no placeholder {{ config }}.",
    )
    [problem] = check_version("{% for item in items %}{{ user }}", seed).problems
    assert problem.startswith("The template cannot be read: ")


def test_markup_stays_markup() -> None:
    seed = template("<poml><task>Answer {{ question }}</task></poml>", "poml")
    assert check_version("<poml><role>R</role><task>{{question}}</task></poml>", seed).problems == ()
    assert "not well-formed markup" in check_version("<poml><task>{{question}}</poml>", seed).problems[0]
    assert check_version("<poml>hello</poml>", seed).problems == ("The placeholder {{ question }} is missing.",)


def test_versions_that_differ_in_white_space_are_the_same() -> None:
    assert same_text(template("a  b\n c ")) == same_text(template("a b c"))
    assert same_text(template("a b")) != same_text(template("ab"))


@given(st.text(alphabet=st.sampled_from('{}[]!:. \n`"aqu')) | st.text())
def test_whatever_a_model_writes_is_told_or_can_be_filled(text: str) -> None:
    checked = check_version(text + "{question}{user}", SEED)
    if checked.template is None:
        assert checked.problems
        return
    try:
        filled = checked.template.format(question="Q1", user="U1")
    except ValueError:  # a format specification that a text does not take, such as `{q:a}`
        filled = "Q1U1" if re.search(r"\{(question|user)[!:]", checked.template.template) else ""
    assert filled.endswith("Q1U1")


@given(st.text(alphabet=st.sampled_from('{}%# \n`"aqu')))
def test_whatever_a_model_writes_in_jinja_is_told_or_can_be_read(text: str) -> None:
    checked = check_version(text, template("{{ u }}", "jinja"))
    assert (checked.template is None) == bool(checked.problems)
