"""A stop text ends the reply wherever its end falls, and the row keeps exactly the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentlightning.engine.completion import StopRule
from agentlightning.engine.engine import InferenceEngine
from tests.engine.byte_policy import byte_tokenizer
from tests.engine.clients import ask, client_of, content, logprobs, stream, tokens

PLAIN = {"seed": 3, "max_tokens": 40}


def test_the_reply_ends_before_the_stop_text_and_the_tokens_are_those_sampled(byte_engine: InferenceEngine) -> None:
    whole = ask(byte_engine, **PLAIN)
    text = content(whole)
    for at in (5, 11, 17):
        stop = text[at : at + 2]
        cut = ask(byte_engine, stop=stop, **PLAIN)
        choice = cut["choices"][0]
        assert content(cut) == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        sampled = tokens(cut)
        assert sampled == tokens(whole)[: len(sampled)]
        assert logprobs(cut) == pytest.approx(logprobs(whole)[: len(sampled)], abs=1e-5)
        decode = byte_tokenizer().decode
        assert stop in decode(sampled)
        assert stop not in decode(sampled[:-1])  # it is the last token that completed it
        assert (
            content(ask(byte_engine, stop=["never said", stop], include_stop_str_in_output=True, **PLAIN))
            == (text[: text.index(stop) + 2])
        )
        assert content(stream(byte_engine, stop=[stop], **PLAIN)) == content(cut)
        assert stream(byte_engine, stop=[stop], **PLAIN)["choices"][0]["stop_reason"] == stop


def test_a_stop_token_ends_the_reply_and_is_in_the_row_only(byte_engine: InferenceEngine) -> None:
    whole = tokens(ask(byte_engine, **PLAIN))
    place = next(n for n, token in enumerate(whole) if n > 3 and token not in whole[:n])
    cut = ask(byte_engine, stop_token_ids=[whole[place]], **PLAIN)
    assert tokens(cut) == whole[: place + 1]
    assert cut["choices"][0]["stop_reason"] == whole[place]
    assert content(cut) == byte_tokenizer().decode(whole[:place])
    included = ask(byte_engine, stop_token_ids=[whole[place]], include_stop_str_in_output=True, **PLAIN)
    assert content(included) == byte_tokenizer().decode(whole[: place + 1])


def test_min_tokens_keeps_stops_and_the_end_away(byte_engine: InferenceEngine) -> None:
    whole = content(ask(byte_engine, **PLAIN))
    reply = ask(byte_engine, stop=[whole[3]], min_tokens=20, **PLAIN)
    assert len(tokens(reply)) >= 20
    end = byte_tokenizer().eos_token_id
    forced = ask(byte_engine, logit_bias={str(end): 100}, min_tokens=7, **PLAIN)
    assert tokens(forced)[-1] == end
    assert len(tokens(forced)) == 8


def test_calls_with_and_without_stops_share_a_batch(byte_engine: InferenceEngine) -> None:
    def one(number: int) -> tuple[str, list[int]]:
        reply = ask(byte_engine, seed=number, max_tokens=30, stop=None if number % 2 else ["e", "\n"])
        return content(reply), tokens(reply)

    alone = [one(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == alone
    assert not any("e" in text for text, _ in alone[::2])


def test_the_openai_client_stops_at_what_it_says(byte_engine: InferenceEngine) -> None:
    text = content(ask(byte_engine, **PLAIN))
    messages = [{"role": "user", "content": "say so"}]
    with client_of(byte_engine) as client:
        reply = client.chat.completions.create(model="policy", messages=messages, stop=text[7:9], **PLAIN)  # type: ignore[call-overload]  # fields of one dict
    assert reply.choices[0].message.content == text[: text.index(text[7:9])]


@pytest.mark.parametrize("stop", ["世界", "界", "é!", "of a", "ity"])
def test_a_stop_text_is_found_across_tokens_and_in_the_middle_of_characters(stop: str) -> None:
    tokenizer = byte_tokenizer()
    said = "the weather é! 世界 of a city 世界"
    token_ids = tokenizer(said)["input_ids"]
    rule = StopRule((stop,))
    ends = [n for n in range(1, len(token_ids) + 1) if rule.hit(token_ids[:n], tokenizer.decode)]
    first = ends[0]
    assert stop in tokenizer.decode(token_ids[:first])
    assert stop not in tokenizer.decode(token_ids[: first - 1])
    assert rule.cut(token_ids[:first], tokenizer.decode) == said[: said.index(stop)]


def test_of_two_stops_in_one_token_the_one_complete_first_counts() -> None:
    texts = {1: "a", 2: "\n\nb"}
    decode = lambda ids: "".join(texts[i] for i in ids)  # noqa: E731 -- a decoder of two tokens
    assert StopRule(("b", "\n\n", "\n")).cut([1, 2], decode) == "a"
    hit = StopRule(("b", "\n\n")).hit([1, 2], decode)
    assert hit is not None
    assert hit.reason == "\n\n"


def test_tokens_are_decoded_once_until_a_stop_text_is_there() -> None:
    decoded: list[Sequence[int]] = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(list(token_ids))
        return "".join(map(chr, token_ids))

    said = [ord(letter) for letter in "abcde"]
    rule = StopRule(texts=("de",), token_ids=frozenset((1,)))
    hits = [rule.hit(said[: count + 1], decode) for count in range(4)]
    assert (hits, len(decoded)) == ([None] * 4, 4)
    assert rule.hit(said, decode) == (3, "de")
    assert rule.hit([1], decode) == (0, 1)
    decoded.clear()
    assert StopRule(token_ids=frozenset((1,))).hit(said, decode) is None
    assert decoded == []
