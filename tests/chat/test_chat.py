"""`Chat` against a model server on a socket that answers late, wrongly, in part, or not at all."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.chat.chat import Chat
from tests.stubs.model_server import Fault, ModelServer
from tests.stubs.ports import free_port

SOON = {"retry-after": "0"}
KEY = "sk-test-0123456789abcdefghij"


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer(lambda request: "shorter please") as server:
        yield server


def llm(model: ModelServer, **fields: Any) -> agl.LLM:
    return agl.LLM(endpoint=model.base_url, model="critic", api_key=KEY, **fields)


async def test_a_reply_says_what_it_took(model: ModelServer) -> None:
    chat = Chat(llm(model, sampling_parameters={"top_p": 0.5}), temperature=0.7, prices={"critic": (2.0, 4.0)})
    reply = await chat.ask("What is wrong?", purpose="judge", settings={"max_tokens": 9})
    sent = model.calls[0]
    assert sent.request == {
        "model": "critic",
        "messages": [{"role": "user", "content": "What is wrong?"}],
        "temperature": 0.7,
        "top_p": 0.5,
        "max_tokens": 9,
    }
    assert sent.headers["authorization"] == f"Bearer {KEY}"
    usage = (sent.reply or {})["usage"]
    assert (reply.text, reply.model) == ("shorter please", "critic")
    assert (reply.prompt_tokens, reply.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert reply.cost == pytest.approx((2 * usage["prompt_tokens"] + 4 * usage["completion_tokens"]) / 1e6)
    assert reply.seconds > 0
    [line] = chat.bill.lines
    assert (line.purpose, line.model, line.calls, line.cost) == ("judge", "critic", 1, reply.cost)


async def test_the_environment_names_a_server(model: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    monkeypatch.setenv("OPENAI_BASE_URL", model.base_url + "/")
    reply = await Chat(model="m").ask([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert (reply.text, reply.cost) == ("shorter please", None)
    assert model.calls[0].headers["authorization"] == "Bearer sk-of-the-environment"


async def test_without_a_source_the_error_says_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"OPENAI_API_KEY.*agl\.LLM.*llm_proxy"):
        await Chat(model="m").ask("hello")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(429, headers=SOON),
        Fault(500, headers=SOON),
        Fault(503, headers=SOON),
        Fault(cut="before"),
        Fault(cut="middle"),
        Fault(body=b"<html>busy</html>"),
        Fault(body=b'{"choices": []}'),
    ],
    ids=["429", "500", "503", "no-answer", "half-an-answer", "no-json", "no-choice"],
)
async def test_a_failure_that_may_pass_is_asked_again(
    model: ModelServer, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.chat.chat._FIRST_DELAY", 0.01)
    model.faults = [fault, fault]
    chat = Chat(llm(model))
    assert (await chat.ask("hello")).text == "shorter please"
    assert (chat.bill.calls, chat.bill.retries, chat.bill.failed_calls, len(model.calls)) == (1, 2, 0, 3)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        *((Fault(status), rf"returned {status}: told to answer {status}") for status in (400, 401, 403, 404, 422)),
        (Fault(429, b'{"error": {"message": "no money", "code": "insufficient_quota"}}'), "no money"),
        (Fault(429, headers={"retry-after": "3600"}), "requires a wait of 3600 s"),
        (Fault(401, f'{{"error": {{"message": "Incorrect API key: {KEY}"}}}}'.encode()), "Incorrect API key"),
    ],
)
async def test_a_failure_that_is_final_is_not_asked_again_and_names_no_key(
    model: ModelServer, fault: Fault, error: str
) -> None:
    model.faults = [fault]
    chat = Chat(llm(model))
    with pytest.raises(agl.ChatError, match=error) as caught:
        await chat.ask("hello")
    assert (chat.bill.failed_calls, len(model.calls)) == (1, 1)
    assert KEY not in str(caught.value)
    assert KEY not in repr(vars(chat))


async def test_retries_have_an_end_and_the_bill_has_them_all(model: ModelServer) -> None:
    model.faults = [Fault(500, headers=SOON) for _ in range(9)]
    chat = Chat(llm(model), retries=2)
    with pytest.raises(agl.ChatError, match="3 times"):
        await chat.ask("hello")
    assert (chat.bill.calls, chat.bill.retries, chat.bill.failed_calls) == (0, 2, 1)
    assert chat.bill.requests == len(model.calls) == 3


async def test_a_slow_server_is_given_up_and_asked_again(model: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.chat.chat._FIRST_DELAY", 0.01)
    model.hold()
    chat = Chat(llm(model), timeout_seconds=0.1, retries=1)
    with pytest.raises(agl.ChatError, match=r"did not respond within 0\.1 s"):
        await chat.ask("hello")
    await model.until(lambda calls: len(calls) == 2)


async def test_a_server_that_is_not_there_is_told_of() -> None:
    unreachable = agl.LLM(endpoint=f"http://127.0.0.1:{free_port()}/v1", model="m")
    with pytest.raises(agl.ChatError, match="did not return a complete response"):
        await Chat(unreachable, retries=0).ask("hello")


async def test_so_many_calls_run_at_a_time(model: ModelServer) -> None:
    model.hold()
    chat = Chat(llm(model), concurrency=3)
    pending = [asyncio.create_task(chat.ask(str(number))) for number in range(8)]
    await model.until(lambda calls: len(calls) == 3)
    await asyncio.sleep(0.1)
    assert len(model.calls) == 3
    model.release()
    await asyncio.gather(*pending)
    assert chat.bill.calls == 8


async def test_a_limit_on_calls_counts_retries_and_calls_under_way(model: ModelServer) -> None:
    model.faults = [Fault(500, headers=SOON)]
    chat = Chat(llm(model), limits={"calls": 5}, concurrency=8)
    replies = await asyncio.gather(*(chat.ask("hello") for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(reply, agl.LimitReached) for reply in replies) >= 4
    assert chat.bill.requests == len(model.calls) == 5
    with pytest.raises(agl.LimitReached, match=r"limit on calls is reached: 5 of 5"):
        chat.check_limits()


async def test_what_an_earlier_process_spent_counts(model: ModelServer) -> None:
    first = Chat(llm(model))
    await first.ask("hello")
    second = Chat(llm(model), limits={"calls": 2})
    second.start(agl.Bill.from_json(first.bill.as_json()))
    await second.ask("hello")
    with pytest.raises(agl.LimitReached, match="2 of 2"):
        await second.ask("hello")


async def test_a_cancelled_call_is_on_the_bill(model: ModelServer) -> None:
    model.hold()
    chat = Chat(llm(model))
    call = asyncio.create_task(chat.ask("hello"))
    await model.until(lambda calls: len(calls) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (chat.bill.failed_calls, chat.bill.requests) == (1, 1)


def test_one_chat_serves_several_loops_and_is_pickled(model: ModelServer) -> None:
    chat = Chat(llm(model), concurrency=1)
    for _ in range(2):
        asyncio.run(chat.ask("hello"))
    twin = pickle.loads(pickle.dumps(chat))
    asyncio.run(twin.ask("hello"))
    assert (chat.bill.calls, twin.bill.calls) == (2, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 0}, "concurrency of at least 1"),
        ({"timeout_seconds": 0}, "timeout_seconds above 0"),
        ({"prices": {"m": 3}}, r"prices\['m'\] must be \(prompt, completion\)"),
        ({"limits": {"call": 3}}, "with calls, tokens, seconds, cost"),
        ({"limits": {"calls": 0}}, "calls must be a number above 0"),
        ({"limits": {"cost": 2.0}}, r"limits=\{'cost': 2\} requires prices"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chat(**wrong)
