"""What changes the distribution changes what is drawn and nothing of what is recorded."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from agentlightning.engine.completion import Adjustments, Completion, draw
from agentlightning.engine.engine import InferenceEngine
from tests.engine.clients import ask, logprobs, tokens

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.5, -1.0, -2.0])


def drawn(*, said: tuple[int, ...] = (), **settings: object) -> Counter[int]:
    count, prompt = 3000, (5,)
    adjustments = Adjustments(**settings)  # type: ignore[arg-type]  # of the right types
    made = [Completion(prompt, 9, seed=n, adjustments=adjustments, token_ids=list(said)) for n in range(count)]
    found, recorded = draw(LOGITS.repeat(count, 1), made)
    own = LOGITS.log_softmax(dim=-1)
    assert recorded == pytest.approx([float(own[token]) for token in found], abs=1e-5)
    return Counter(found)


def as_often_as(counts: Counter[int], logits: torch.Tensor) -> None:
    total = counts.total()
    for token, p in enumerate(logits.softmax(dim=-1).tolist()):
        assert abs(counts[token] / total - p) <= 6 * math.sqrt(p * (1 - p) / total) + 1e-9


def test_top_k_and_min_p_leave_the_likeliest_in_their_proportion() -> None:
    cut = LOGITS.clone()
    cut[2:] = -torch.inf
    as_often_as(drawn(top_k=2), cut)
    as_often_as(drawn(min_p=0.3), cut)  # e^-1 of the likeliest is 0.37, e^-2 is 0.14


def test_penalties_and_bias_move_the_logits_as_the_api_says() -> None:
    expected = LOGITS.clone()
    expected[0] -= 2 * 0.5 + 0.25
    expected[2] -= 0.5 + 0.25
    as_often_as(drawn(said=(0, 0, 2), frequency_penalty=0.5, presence_penalty=0.25), expected)
    repeated = LOGITS.clone()
    repeated[0], repeated[5] = repeated[0] / 2, repeated[5] * 2  # one said, one of the prompt
    as_often_as(drawn(said=(0,), repetition_penalty=2.0), repeated)
    biased = LOGITS.clone()
    biased[4] += 5
    as_often_as(drawn(logit_bias={4: 5.0}), biased)


def test_min_tokens_holds_the_ends_back_until_then() -> None:
    assert drawn(said=(1,), min_tokens=2, ends=frozenset({0}))[0] == 0
    assert drawn(said=(1, 1), min_tokens=2, ends=frozenset({0}))[0] > 0


def test_rows_without_adjustments_are_drawn_as_ever() -> None:
    plain = [Completion([1], 9, seed=n) for n in range(50)]
    mixed = [Completion([1], 9, seed=n, adjustments=Adjustments(top_k=1) if n % 2 else None) for n in range(50)]
    alone, together = draw(LOGITS.repeat(50, 1), plain)[0], draw(LOGITS.repeat(50, 1), mixed)[0]
    assert together[::2] == alone[::2]
    assert set(together[1::2]) == {0}


def test_the_engine_honours_them_side_by_side(byte_engine: InferenceEngine) -> None:
    settings = [
        {},
        {"top_k": 1},
        {"min_p": 1.0},
        {"logit_bias": {"70": 100}},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 5.0},
        {"top_p": 0.2, "top_k": 5},
        {"temperature": 0},
    ]

    def one(fields: dict[str, object]) -> list[int]:
        return tokens(ask(byte_engine, seed=1, max_tokens=12, **fields))

    alone = [one(fields) for fields in settings]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, settings)) == alone
    assert alone[1] == alone[2] == alone[7]
    assert alone[3] == [70] * 12
    assert len(set(alone[4])) == 12  # a token that was said is not said again


def test_top_logprobs_are_the_models_own(byte_engine: InferenceEngine) -> None:
    reply = ask(byte_engine, seed=1, max_tokens=5, top_logprobs=3, logit_bias={"70": 100})
    for entry, logprob in zip(reply["choices"][0]["logprobs"]["content"], logprobs(reply), strict=True):
        best = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert best[0] >= logprob


@pytest.mark.parametrize(
    ("fields", "named"), [({"logit_bias": {"999": 1}}, "logit_bias"), ({"min_tokens": 9}, "min_tokens")]
)
def test_what_does_not_fit_the_model_or_the_limit_is_refused(
    byte_engine: InferenceEngine, fields: dict[str, object], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        ask(byte_engine, max_tokens=5, **fields)
