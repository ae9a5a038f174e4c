"""The choice of a token, its record, and the end of a reply."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from agentlightning.engine.completion import Adjustments, Completion, StopRule, draw
from agentlightning.engine.engine import InferenceEngine
from tests.engine.byte_policy import byte_tokenizer
from tests.engine.clients import ask, content, logprobs, stream, tokens

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.5, -1.0, -2.0])
PLAIN = {"seed": 3, "max_tokens": 40}


# --- adjustments ----------------------------------------------------------------------------------------------------


def drawn(
    drawn_ids: tuple[int, ...], *, temperature: float = 1.0, top_p: float = 1.0, **settings: object
) -> Counter[int]:
    changes = Adjustments(**settings) if settings else None  # type: ignore[arg-type]  # of the right types
    made = [
        Completion((5,), 9, temperature, top_p, n, adjustments=changes, token_ids=list(drawn_ids)) for n in range(3000)
    ]
    ids, recorded = draw(LOGITS.repeat(3000, 1), made)
    own = (LOGITS / temperature).log_softmax(dim=-1)
    assert recorded == pytest.approx([float(own[token]) for token in ids], abs=1e-5)
    return Counter(ids)


def changed(changes: dict[int, float]) -> torch.Tensor:
    logits = LOGITS.clone()
    for token, value in changes.items():
        logits[token] = value
    return logits


@pytest.mark.parametrize(
    ("drawn_ids", "settings", "logits"),
    [
        ((), {"temperature": 0.5}, LOGITS / 0.5),
        ((), {"temperature": 2.0}, LOGITS / 2),
        ((), {"top_p": 0.7}, changed(dict.fromkeys(range(2, 6), -math.inf))),  # the first two have 0.62 and 0.23
        ((), {"top_k": 2}, changed(dict.fromkeys(range(2, 6), -math.inf))),
        ((), {"min_p": 0.3}, changed(dict.fromkeys(range(2, 6), -math.inf))),  # e^-1 is 0.37, e^-2 is 0.14
        ((0, 0, 2), {"frequency_penalty": 0.5, "presence_penalty": 0.25}, changed({0: 3 - 1.25, 2: 1 - 0.75})),
        ((0,), {"repetition_penalty": 2.0}, changed({0: 1.5, 5: -4.0})),  # one said, one of the prompt
        ((), {"logit_bias": {4: 5.0}}, changed({4: 4.0})),
        ((1,), {"min_tokens": 2, "ends": frozenset({0})}, changed({0: -math.inf})),
        ((1, 1), {"min_tokens": 2, "ends": frozenset({0})}, LOGITS),
    ],
)
def test_tokens_are_drawn_as_often_as_the_settings_say(
    drawn_ids: tuple[int, ...], settings: dict[str, object], logits: torch.Tensor
) -> None:
    counts = drawn(drawn_ids, **settings)  # type: ignore[arg-type]  # of the right types
    for token, p in enumerate(logits.softmax(dim=-1).tolist()):
        assert abs(counts[token] / 3000 - p) <= 6 * math.sqrt(p * (1 - p) / 3000) + 1e-9


def test_top_logprobs_are_the_models_own(byte_engine: InferenceEngine) -> None:
    reply = ask(byte_engine, seed=1, max_tokens=5, top_logprobs=3, logit_bias={"70": 100})
    for entry, logprob in zip(reply["choices"][0]["logprobs"]["content"], logprobs(reply), strict=True):
        best = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert best[0] >= logprob


# --- stop texts and tokens ------------------------------------------------------------------------------------------


def test_the_reply_ends_before_the_stop_text_and_the_tokens_are_those_sampled(byte_engine: InferenceEngine) -> None:
    whole, decode = ask(byte_engine, **PLAIN), byte_tokenizer().decode
    text = content(whole)
    for at in (5, 11, 17):
        stop = text[at : at + 2]
        cut, sampled = ask(byte_engine, stop=stop, **PLAIN), stream(byte_engine, stop=[stop], **PLAIN)
        for reply in (cut, sampled):
            assert content(reply) == text[: text.index(stop)]
            assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["stop_reason"]) == ("stop", stop)
            assert tokens(reply) == tokens(whole)[: len(tokens(reply))]
        assert logprobs(cut) == pytest.approx(logprobs(whole)[: len(tokens(cut))], abs=1e-5)
        assert stop in decode(tokens(cut))
        assert stop not in decode(tokens(cut)[:-1])  # it is the last token that completed it
        included = ask(byte_engine, stop=["never said", stop], include_stop_str_in_output=True, **PLAIN)
        assert content(included) == text[: text.index(stop) + 2]


def test_a_stop_token_ends_the_reply_and_is_in_the_row_only(byte_engine: InferenceEngine) -> None:
    whole, decode = tokens(ask(byte_engine, **PLAIN)), byte_tokenizer().decode
    place = next(n for n, token in enumerate(whole) if n > 3 and token not in whole[:n])
    cut = ask(byte_engine, stop_token_ids=[whole[place]], **PLAIN)
    assert tokens(cut) == whole[: place + 1]
    assert cut["choices"][0]["stop_reason"] == whole[place]
    assert content(cut) == decode(whole[:place])
    included = ask(byte_engine, stop_token_ids=[whole[place]], include_stop_str_in_output=True, **PLAIN)
    assert content(included) == decode(whole[: place + 1])


def test_min_tokens_keeps_stops_and_the_end_away(byte_engine: InferenceEngine) -> None:
    whole = content(ask(byte_engine, **PLAIN))
    assert len(tokens(ask(byte_engine, stop=[whole[3]], min_tokens=20, **PLAIN))) >= 20
    end = byte_tokenizer().eos_token_id
    forced = ask(byte_engine, logit_bias={str(end): 100}, min_tokens=7, **PLAIN)
    assert (tokens(forced)[-1], len(tokens(forced))) == (end, 8)


@pytest.mark.parametrize("stop", ["世界", "界", "é!", "of a", "ity"])
def test_a_stop_text_is_found_across_tokens_and_in_the_middle_of_characters(stop: str) -> None:
    tokenizer, text = byte_tokenizer(), "the weather é! 世界 of a city 世界"
    token_ids, rule = tokenizer(text)["input_ids"], StopRule((stop,))
    ends = [rule.stopped(token_ids[:n], tokenizer.decode) for n in range(1, len(token_ids) + 1)]
    first = next(n for n, end in enumerate(ends, 1) if end is not None)
    assert stop in tokenizer.decode(token_ids[:first])
    assert stop not in tokenizer.decode(token_ids[: first - 1])
    assert ends[first - 1] == (text[: text.index(stop)], stop)


def test_of_two_stops_in_one_token_the_one_complete_first_counts() -> None:
    texts = {1: "a", 2: "\n\nb"}
    decode = lambda ids: "".join(texts[i] for i in ids)  # noqa: E731 -- a decoder of two tokens
    assert StopRule(("b", "\n\n")).stopped([1, 2], decode) == ("a", "\n\n")
    assert StopRule(("b", "\n\n", "\n")).stopped([1, 2], decode) == ("a", "\n")


def test_a_stop_token_needs_no_text() -> None:
    rule = StopRule(token_ids=frozenset((1,)))
    assert rule.stopped([7], _never) is None
    assert rule.stopped([1], _never) == ("", 1)


def _never(token_ids: Sequence[int]) -> str:
    raise AssertionError(f"{token_ids} were decoded")
