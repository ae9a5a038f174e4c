"""The seam that `docs/deep-dive/tokens-and-samples.md` draws, read from the page and carried out."""

from __future__ import annotations

import re
from pathlib import Path

from agentlightning.adapter import model_calls, samples_from_calls
from tests.adapter.span_maker import conversation, spoken_call

PAGE = Path(__file__).parents[2] / "docs/deep-dive/tokens-and-samples.md"


def drawn() -> dict[str, list[str]]:
    """Return the text after `call 1 prompt`, `row 1 mask` and so on, word by word."""
    section = PAGE.read_text().partition("\n## A seam\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^(call \d (?:prompt|answer)|row \d (?:tokens|mask)) +(.+)$", section, re.MULTILINE)
    return {name: text.replace("│", " ").split() for name, text in lines}


def test_the_drawn_seam_is_what_the_adapter_makes_of_these_calls() -> None:
    lines = drawn()
    vocabulary = {word: number for number, word in enumerate(sorted({w for words in lines.values() for w in words}))}
    ids = {name: [vocabulary[word] for word in words] for name, words in lines.items()}
    question, answer = "six times seven ?", "forty two"
    asked_again = conversation(question, answer, "and eight ?")
    calls = model_calls(
        [
            *spoken_call("a", 1, ids["call 1 prompt"], ids["call 1 answer"], conversation(question), answer),
            *spoken_call("b", 2, ids["call 2 prompt"], ids["call 2 answer"], asked_again, "forty eight"),
        ]
    )
    reading = samples_from_calls(calls)
    assert [sample.token_ids for sample in reading.samples] == [ids["row 1 tokens"], ids["row 2 tokens"]]
    assert [[str(bit) for bit in sample.mask] for sample in reading.samples] == [
        lines["row 1 mask"],
        lines["row 2 mask"],
    ]
    seam = reading.starts[1]
    assert (seam.cause, seam.previous) == ("template", "a")
    assert f"seam: {seam.cause}" in PAGE.read_text()
    bar = PAGE.read_text().partition("call 2 prompt")[2].partition("│")[0]
    assert seam.at == len(bar.split())
