"""Limits on tokens and money, with calls at the same time and a server that counts what it was asked for."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.chat.bill import BillLine, Limits
from agentlightning.chat.budget import UNBOUNDED, Budget, Price
from tests.stubs.model_server import ModelServer

REPLY = "one two three four five six seven eight"
PRICES = {"critic": (1.0, 1.0), "other": (1.0, 1.0)}
PROMPT = "a prompt of five words"
CALL = 7 + 8
"""Tokens of one call, as the server counts."""


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer(lambda request: REPLY) as server:
        yield server


def chat_of(model: ModelServer, limits: dict[str, Any], **sampling: Any) -> agl.Chat:
    llm = agl.LLM(endpoint=model.base_url, model="critic", sampling_parameters=sampling)
    return agl.Chat(llm, limits=limits, prices=PRICES, concurrency=16)


def served(model: ModelServer) -> int:
    usages = [(call.reply or {})["usage"] for call in model.calls]
    return sum(usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


@pytest.mark.parametrize("bound", [CALL, 2 * CALL - 1, 3 * CALL, 10 * CALL + 3])
@pytest.mark.parametrize("what", ["tokens", "cost"])
@pytest.mark.parametrize("sampling", [{}, {"max_tokens": 8}], ids=["unknown", "bounded"])
async def test_calls_at_the_same_time_stay_within_the_limit(
    model: ModelServer, what: str, bound: int, sampling: dict[str, Any]
) -> None:
    """Weak point 10: nothing beyond the bound, and what fits is used: nobody is turned away while calls are under way
    that may use less than they reserve."""
    chat = chat_of(model, {what: bound if what == "tokens" else bound / 1e6}, **sampling)
    replies = await asyncio.gather(*(chat.ask(PROMPT) for _ in range(24)), return_exceptions=True)
    ended = [reply for reply in replies if isinstance(reply, BaseException)]
    assert all(isinstance(error, agl.LimitReached) and error.what == what for error in ended)
    assert served(model) == chat.bill.tokens <= bound
    assert len(model.calls) == bound // CALL, "what fits is used"


@pytest.mark.parametrize(
    ("bound", "sampling", "calls", "error"),
    [
        (100, {"max_tokens": 500}, 0, "tokens is reached: 0 of 100 used, and the next call may need 506"),
        (20, {}, 1, "tokens is reached: 15 of 20 used, and the next call may need 15"),
    ],
)
async def test_a_call_that_may_not_fit_is_not_begun_and_the_error_says_what_it_needs(
    model: ModelServer, bound: int, sampling: dict[str, Any], calls: int, error: str
) -> None:
    chat = chat_of(model, {"tokens": bound}, **sampling)
    for _ in range(calls):
        await chat.ask(PROMPT)
    with pytest.raises(agl.LimitReached, match=error) as end:
        await chat.ask(PROMPT)
    assert len(model.calls) == calls
    assert pickle.loads(pickle.dumps(end.value)).needed == end.value.needed


@pytest.mark.parametrize(
    ("bound", "sampling", "at_once"),
    [
        (5 * UNBOUNDED, {}, 3),  # long replies fit
        (2 * UNBOUNDED, {}, 1),
        (150, {"max_tokens": 100}, 1),
    ],
)
async def test_calls_run_together_where_their_reservations_fit_and_else_one_after_another(
    model: ModelServer, bound: int, sampling: dict[str, Any], at_once: int
) -> None:
    model.hold()
    chat = chat_of(model, {"tokens": bound}, **sampling)
    pending = [asyncio.create_task(chat.ask(PROMPT)) for _ in range(3)]
    await model.until(lambda calls: len(calls) == at_once)
    await asyncio.sleep(0.1)
    assert len(model.calls) == at_once
    model.release()
    await asyncio.gather(*pending)
    assert chat.bill.tokens == 3 * CALL


@pytest.mark.parametrize("what", ["tokens", "cost"])
async def test_replies_that_grow_pass_a_limit_by_one_of_them_at_most(what: str) -> None:
    """The cost of a reply is unknown before it ends; short first replies are no reason to begin many at once."""
    with ModelServer(lambda request: " ".join(["word"] * 4 ** len(growing.calls))) as growing:
        chat = chat_of(growing, {what: 3000 if what == "tokens" else 3000 / 1e6})
        await asyncio.gather(*(chat.ask(PROMPT) for _ in range(16)), return_exceptions=True)
        used = [(call.reply or {})["usage"]["total_tokens"] for call in growing.calls]
    assert len(used) == 6
    assert sum(used[:-1]) < 3000 < sum(used) == chat.bill.tokens


async def test_a_cancelled_call_gives_back_what_it_reserved(model: ModelServer) -> None:
    model.hold()
    chat = chat_of(model, {"tokens": 150}, max_tokens=100)
    first = asyncio.create_task(chat.ask(PROMPT))
    await model.until(lambda calls: len(calls) == 1)
    second = asyncio.create_task(chat.ask(PROMPT))
    await asyncio.sleep(0)
    first.cancel()
    await model.until(lambda calls: len(calls) == 2)
    model.release()
    assert (await second).text == REPLY


async def test_a_limit_on_time_ends_a_call_that_waits_for_room(model: ModelServer) -> None:
    model.hold()
    chat = chat_of(model, {"tokens": 150, "seconds": 0.3}, max_tokens=100)
    replies = await asyncio.gather(*(chat.ask(PROMPT) for _ in range(2)), return_exceptions=True)
    assert [getattr(each, "what", each) for each in replies] == ["seconds", "seconds"]
    assert len(model.calls) == 1


async def test_a_model_without_a_price_is_not_asked(model: ModelServer) -> None:
    with pytest.raises(ValueError, match=r"requires a price for 'unknown': pass prices=\{'unknown': \(prompt, comp"):
        await chat_of(model, {"cost": 1.0}).ask(PROMPT, model="unknown")
    assert not model.calls


async def test_a_prompt_is_reckoned_as_the_server_counted_the_ones_before() -> None:
    """Text of which a character is a token or more: not a quarter of one."""
    budget, text = Budget(Limits(tokens=100)), [{"role": "user", "content": "語" * 40}]
    mark = await budget.reserve("m", text, {"max_tokens": 1}, None)
    budget.settle(mark, BillLine("judge", "m", calls=1, prompt_tokens=40, completion_tokens=1), 40)
    with pytest.raises(agl.LimitReached, match="41 of 100 used, and the next call may need 81"):
        await budget.reserve("m", [{"role": "user", "content": "語" * 80}], {"max_tokens": 1}, Price(1.0, 1.0))


def test_two_event_loops_share_a_budget(model: ModelServer) -> None:
    chat = chat_of(model, {"tokens": 5 * CALL + 3})

    async def ask_all() -> list[object]:
        return await asyncio.gather(*(chat.ask(PROMPT) for _ in range(8)), return_exceptions=True)

    async def in_threads() -> list[list[object]]:
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, ask_all()) for _ in range(3)))

    ended = asyncio.run(in_threads())
    assert sum(not isinstance(each, Exception) for replies in ended for each in replies) == len(model.calls) == 5
    assert served(model) == chat.bill.tokens <= 5 * CALL + 3
