"""Conversations that go on by an id: `previous_response_id` and `item_reference`, with OpenAI's client library."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.llm_proxy.responses_state import AttemptName, Item, ResponseMemory, StoredResponse, begin
from agentlightning.utils.http.byte_budget import PROCESS
from tests.llm_proxy.agents import Agent, ResponsesAgent
from tests.llm_proxy.harness import GatewayHarness
from tests.llm_proxy.test_store_faults import TroubledStore
from tests.stubs.model_server import Fault, encode

# --- the memory -------------------------------------------------------------------------------------------------------


A, B = ("ro-1", "at-1"), ("ro-2", "at-1")


def response(attempt: AttemptName, name: str, *texts: str) -> StoredResponse:
    items = tuple(Item(f"msg_{text[:20]}", text.encode()) for text in texts)
    return StoredResponse(attempt, name, b"{}", items[:-1], items[-1:])


def memory(count: int = 1024, own: int = 2**26, total: int = 2**28) -> ResponseMemory:
    limits = GatewayLimits(remembered_responses=count, remembered_bytes_per_attempt=own, remembered_bytes=total)
    return ResponseMemory(limits)


def test_a_conversation_that_is_sent_again_with_each_call_is_kept_once() -> None:
    remembered, texts = memory(), [f"{number} {'x' * 10_000}" for number in range(100)]
    for number in range(1, 100):
        remembered.add(response(A, f"r{number}", *texts[: number + 1]))
    assert remembered.size < 2 * sum(map(len, texts))


def test_the_response_that_was_not_used_for_longest_is_forgotten_first() -> None:
    remembered = memory(count=2)
    remembered.add(response(A, "r1", "one"))
    remembered.add(response(A, "r2", "two"))
    assert remembered.response(A, "r1") is not None
    remembered.add(response(A, "r3", "three"))
    assert [name for name in ("r1", "r2", "r3") if remembered.response(A, name)] == ["r1", "r3"]
    assert remembered.item(A, "msg_two") is None


def test_the_attempt_that_was_silent_for_longest_is_forgotten_first() -> None:
    remembered = memory(total=30_000)
    for attempt, name, text in ((A, "r", "a" * 12_000), (B, "r", "b" * 6000), (B, "s", "c" * 6000)):
        remembered.add(response(attempt, name, text))
    assert remembered.response(A, "r") is not None
    remembered.add(response(("ro-3", "at-1"), "r", "d" * 14_000))
    assert remembered.response(A, "r") is not None
    assert remembered.response(B, "r") is remembered.response(B, "s") is None


def test_a_response_beyond_the_bound_is_not_remembered_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    remembered = memory(own=1000)
    remembered.add(response(A, "r", "a" * 2000))
    assert remembered.response(A, "r") is None
    assert remembered.size == 0
    assert "beyond GatewayLimits.remembered_bytes" in caplog.text


STEPS = st.tuples(st.sampled_from([A, B]), st.integers(0, 5), st.lists(st.integers(0, 8), min_size=1, max_size=5))


@given(st.lists(st.one_of(STEPS, STEPS.map(lambda step: step[:2])), max_size=40))
def test_sizes_add_up_and_stay_within_the_bounds(steps: list[tuple[AttemptName, int, list[int]]]) -> None:
    remembered, number = memory(count=4, own=6000, total=9000), 0
    for attempt, which, *words in steps:
        if words:
            number += 1
            texts = [f"{place} {'x' * 100 * place}" for place in words[0]]
            remembered.add(response(attempt, f"r{number}", *texts))
            assert remembered.response(attempt, f"r{number}") is not None
        else:
            remembered.delete(attempt, f"r{which}")
        assert remembered.size <= 9000
    for attempt in (A, B):
        for name in range(number + 1):
            remembered.delete(attempt, f"r{name}")
    assert remembered.size == 0
    assert all(remembered.item(attempt, f"msg_{place} ") is None for attempt in (A, B) for place in range(9))


# --- a conversation goes on ------------------------------------------------------------------------------------------


Json = dict[str, Any]
TOOL = {"type": "function", "name": "add", "description": "sum", "parameters": {"type": "object"}, "strict": False}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
OUTPUT = {"type": "function_call_output", "call_id": "call-1", "output": "3"}


AGENT = ResponsesAgent


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("server_streams", [False, True])
async def test_a_continued_response_is_asked_as_if_all_had_been_sent_again(
    agent: Agent, streamed: bool, server_streams: bool
) -> None:
    answers = iter([{"reasoning_content": "let me see", "content": "one moment", "tool_calls": [CALL]}, "three", "bye"])
    agent.harness.model.answer = lambda request: next(answers)
    agent.harness.model.streams = server_streams
    first = await agent.whole(input="1 and 2", tools=[TOOL], instructions="Add.", streamed=streamed)
    second = await agent.whole(
        input=[OUTPUT], tools=[TOOL], instructions="Add.", previous_response_id=first.id, streamed=streamed
    )
    by_id = agent.asked["messages"]
    assert second.previous_response_id == first.id
    assert (first.store, second.output_text) == (True, "three")
    items = [{"role": "user", "content": "1 and 2"}, *first.output, OUTPUT]
    await agent.ask(input=items, tools=[TOOL], instructions="Add.")
    assert by_id == agent.asked["messages"]
    assert [message["role"] for message in by_id] == ["system", "user", "assistant", "tool"]
    assert by_id[2]["reasoning_content"] == "let me see"
    (_, call, _) = await agent.harness.raw()
    assert call["prompt_token_ids"] == encode(" ".join(f"{m['role']} {m.get('content')}" for m in by_id) + " assistant")


async def test_instructions_are_not_inherited(agent: Agent) -> None:
    first = await agent.ask(instructions="Be brief.")
    await agent.ask(input="and?", previous_response_id=first.id)
    assert [message["role"] for message in agent.asked["messages"]] == ["user", "assistant", "user"]
    await agent.ask(input="and?", previous_response_id=first.id, instructions="Be long.")
    assert agent.asked["messages"][0] == {"role": "system", "content": "Be long."}
    assert len(agent.asked["messages"]) == 4


async def test_several_conversations_branch_from_one_response_at_the_same_time(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: f"after {request['messages'][-1]['content']}"
    root = await agent.ask(input="root")
    branches = await asyncio.gather(
        *(agent.whole(input=f"b{i}", previous_response_id=root.id, streamed=bool(i % 2)) for i in range(8))
    )
    assert len({branch.id for branch in branches}) == 8
    twigs = await asyncio.gather(*(agent.ask(input="t", previous_response_id=branch.id) for branch in branches))
    assert len(twigs) == 8
    histories = [[message["content"] for message in call.request["messages"]] for call in agent.harness.model.calls[9:]]
    expected = [["root", "after root", f"b{i}", f"after b{i}", "t"] for i in range(8)]
    assert sorted(histories) == sorted(expected)


@pytest.mark.parametrize("streamed", [False, True])
async def test_items_are_named_by_their_id(agent: Agent, streamed: bool) -> None:
    answer = {"reasoning_content": "hm", "content": "one moment", "tool_calls": [CALL]}
    agent.harness.model.answer = lambda request: answer
    first = await agent.whole(input="1 and 2", tools=[TOOL], streamed=streamed)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    references[0].pop("type")  # which may be left out
    question = {"role": "user", "content": "1 and 2"}
    await agent.whole(input=[question, *references, OUTPUT], tools=[TOOL], streamed=streamed)
    by_id = agent.asked["messages"]
    await agent.ask(input=[question, *first.output, OUTPUT], tools=[TOOL])
    assert by_id == agent.asked["messages"]
    assert by_id[1]["reasoning_content"] == "hm"


async def test_items_of_the_input_and_of_a_continued_response_have_ids_too(agent: Agent) -> None:
    await agent.ask(input=[{"id": "msg_mine", "role": "user", "content": "mine"}])
    second = await agent.ask(input=[{"type": "item_reference", "id": "msg_mine"}])
    assert agent.asked["messages"] == [{"role": "user", "content": "mine"}]
    third = await agent.ask(input="go on", previous_response_id=second.id)
    listed = await agent.client.responses.input_items.list(third.id, order="asc")
    names = [item.id for item in listed.data]
    assert names[0] == "msg_mine"
    await agent.ask(input=[{"type": "item_reference", "id": name} for name in names])
    assert [message["content"] for message in agent.asked["messages"]] == ["mine", "you said mine", "go on"]


async def test_responses_of_a_server_that_gives_every_reply_the_same_id_are_told_apart(agent: Agent) -> None:
    model = agent.harness.model
    reply = {"id": "always-me", "object": "chat.completion", "created": 1, "model": "policy"}

    def answer(text: str) -> None:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        model.faults.append(Fault(200, json.dumps({**reply, "choices": [choice]}).encode()))

    made: list[Any] = []
    for number in range(3):
        answer(f"answer {number}")
        made.append(await agent.whole(input=f"question {number}", streamed=number == 2))
    assert made[0].id == "always-me"
    assert len({response.id for response in made}) == 3
    for number, response in enumerate(made):
        await agent.ask(input="?", previous_response_id=response.id)
        texts = [message["content"] for message in agent.asked["messages"]]
        assert texts == [f"question {number}", f"answer {number}", "?"]
    recorded = [span for span in await agent.harness.spans() if span.name == "litellm_request"]
    assert [span.attributes["gen_ai.response.id"] for span in recorded[:3]] == [response.id for response in made]


def test_a_call_that_is_not_stored_frees_no_id_that_another_one_holds() -> None:
    memory, attempt = ResponseMemory(GatewayLimits()), ("ro-1", "at-1")
    holds, passes, comes = (
        begin(memory, attempt, {"input": "hi", "store": store}, 1000) for store in (True, False, True)
    )
    assert holds.named(memory, "resp_1") == passes.named(memory, "resp_1") == "resp_1"
    passes.ended(memory, None)
    assert comes.named(memory, "resp_1") != "resp_1"
    holds.ended(memory, holds.to_remember({"id": "resp_1", "output": []}))
    assert memory.response(attempt, "resp_1") is not None
    assert memory.delete(attempt, "resp_1")
    assert memory.size == 0


# --- what is not remembered ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_not_stored_cannot_be_continued(agent: Agent, streamed: bool) -> None:
    first = await agent.whole(store=False, streamed=streamed)
    assert first.store is False
    await refused(agent, first.id, first.output[0].id)
    stored = await agent.ask()
    await agent.ask(input="more", previous_response_id=stored.id, store=False)  # it may go on from one that is
    assert len(agent.asked["messages"]) == 3


async def refused(agent: Agent, response_id: str, item_id: str) -> None:
    """Both are unknown, in the words and with the codes of the service."""
    calls = len(agent.harness.model.calls)
    for streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.whole(previous_response_id=response_id, streamed=streamed)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        assert f"Previous response with id '{response_id}' not found" in caught.value.message
        assert "Send the items of the conversation in" in caught.value.message
        with pytest.raises(openai.NotFoundError) as missing:
            await agent.whole(input=[{"type": "item_reference", "id": item_id}], streamed=streamed)
        assert missing.value.param == "input"
        assert f"Item with id '{item_id}' not found" in missing.value.message
    for operation in (agent.client.responses.retrieve, agent.client.responses.delete, agent.client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await operation(response_id)
    assert len(agent.harness.model.calls) == calls


async def test_an_id_of_another_attempt_is_unknown(agent: Agent) -> None:
    first = await agent.ask(input="my secret")
    other = ResponsesAgent(agent.harness, await agent.harness.attempt())
    retry = ResponsesAgent(agent.harness, await agent.harness.store.start_attempt(agent.attempt.rollout_id))
    async with other.client, retry.client:
        for stranger in (other, retry):
            await refused(stranger, first.id, first.output[0].id)
            with pytest.raises(openai.NotFoundError):
                await stranger.client.responses.input_items.list(first.id)


async def test_a_gateway_that_was_restarted_says_that_it_remembers_nothing(agent: Agent) -> None:
    first = await agent.ask()
    await agent.harness.proxy.restart()
    with pytest.raises(openai.BadRequestError, match="before a restart") as caught:
        await agent.ask(previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


async def broken_off(agent: Agent) -> str:
    """Ask for a stream that ends with an error; return the id that it began with."""
    names: list[str] = []

    async def read() -> None:
        async for event in await agent.client.responses.create(model="policy", input="hi", stream=True):
            names.extend([event.response.id] if event.type == "response.created" else [])

    with pytest.raises(openai.APIError):
        await read()
    (name,) = names
    return name


async def test_a_response_that_broke_off_is_not_remembered(agent: Agent) -> None:
    choice = {"index": 0, "delta": {"role": "assistant", "content": "so far"}, "finish_reason": None}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "policy", "choices": [choice]}
    frame = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    agent.harness.model.faults.append(Fault(body=frame, headers={"Content-Type": "text/event-stream"}))
    name = await broken_off(agent)
    assert name == "chatcmpl-1"
    await refused(agent, name, f"msg_{name}_0")


async def test_a_response_that_was_withheld_for_want_of_a_record_is_not_remembered() -> None:
    store = TroubledStore()
    async with GatewayHarness(store=store) as harness:
        agent = ResponsesAgent(harness)
        async with agent.client:
            store.errors.append(ValueError("full"))
            name = await broken_off(agent)
            await refused(agent, name, f"msg_{name}_0")


async def test_an_item_that_comes_with_the_history_already_is_refused_as_the_service_does(agent: Agent) -> None:
    first = await agent.ask()
    with pytest.raises(openai.BadRequestError, match="Duplicate item found with id"):
        await agent.ask(input=[first.output[0]], previous_response_id=first.id)


async def test_a_conversation_beyond_the_bound_of_a_request_is_refused() -> None:
    async with GatewayHarness(limits=GatewayLimits(body_bytes=4000)) as harness:
        agent = ResponsesAgent(harness)
        harness.model.answer = lambda request: "ok"
        async with agent.client:
            made = await agent.ask(input="a" * 1500)
            for _ in range(2):
                made = await agent.ask(input="a" * 1500, previous_response_id=made.id)
            with pytest.raises(openai.APIStatusError) as caught:
                await agent.ask(previous_response_id=made.id)
            assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


async def test_a_large_conversation_is_counted_as_the_value_that_is_made_of_it(agent: Agent) -> None:
    parts = [{"type": "input_text", "text": "a"}] * 5000
    body: Json = {"model": "policy", "input": [{"role": "user", "content": parts}]}
    url, held = agent.harness.url("/responses"), list[int]()
    agent.harness.model.answer = lambda request: held.append(PROCESS.held) or "yes"
    _, first = await agent.harness.post(url, body)
    await agent.harness.post(url, {"model": "policy", "input": "hi", "previous_response_id": first["id"]})
    sent, remembered = held
    assert remembered > 0.8 * sent > 2 * len(json.dumps(parts))


async def test_older_responses_are_forgotten_beyond_the_bound_and_what_went_on_from_them_stays() -> None:
    async with GatewayHarness(limits=GatewayLimits(remembered_responses=3)) as harness:
        agent = ResponsesAgent(harness)
        async with agent.client:
            made = [await agent.ask(input="0")]
            for number in range(1, 6):
                made.append(await agent.ask(input=str(number), previous_response_id=made[-1].id))
            await agent.ask(input="end", previous_response_id=made[-1].id)
            assert [message["content"] for message in agent.asked["messages"][::2]] == [*"012345", "end"]
            with pytest.raises(openai.BadRequestError, match="remembered_responses"):
                await agent.ask(previous_response_id=made[0].id)
            await agent.ask(input=[{"type": "item_reference", "id": made[0].output[0].id}])


# --- counting --------------------------------------------------------------------------------------------------------


async def test_the_tokens_of_a_conversation_are_counted(agent: Agent) -> None:
    first = await agent.ask(input="one two")
    count = await agent.client.responses.input_tokens.count(
        model="policy", input="three", previous_response_id=first.id
    )
    (tokenize_call,) = [call for call in agent.harness.model.calls if call.path == "/tokenize"]
    assert [message["content"] for message in tokenize_call.request["messages"]] == [
        "one two",
        "you said one two",
        "three",
    ]
    assert count.object == "response.input_tokens"
    assert count.input_tokens == len(encode(json.dumps(tokenize_call.request["messages"])))
    agent.harness.model.counts = False
    with pytest.raises(openai.InternalServerError) as caught:
        await agent.client.responses.input_tokens.count(model="policy", input="three")
    assert caught.value.status_code == 501


# --- nonsense --------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
KEYS = st.sampled_from(["id", "type", "role", "content", "call_id", "output", "summary", "text", "encrypted_content"])
KINDS = st.sampled_from(["item_reference", "message", "reasoning", "function_call", "function_call_output", "x", ""])
NESTED = st.recursive(
    SCALARS | KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
ITEMS = st.lists(NESTED | st.fixed_dictionaries({"type": KINDS, "id": NESTED}), max_size=4)


def test_nested_nonsense_is_answered_or_refused_and_never_remembered_wrongly() -> None:
    async def run() -> None:
        async with GatewayHarness() as harness:
            loop = asyncio.get_running_loop()

            async def ask(body: Json) -> int:
                status, reply = await harness.post("/responses", body)
                assert status in (200, 400, 404), reply
                assert status == 200 or reply["error"]["message"]
                if status == 200:
                    more = {"model": "policy", "input": [], "previous_response_id": reply["id"]}
                    again, second_reply = await harness.post("/responses", more)
                    assert (again == 200) is (body.get("store") is not False), second_reply
                return status

            @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
            @given(ITEMS | st.text(max_size=5), NESTED, st.sampled_from([True, False, None]))
            def each(items: Any, previous: Any, store: Any) -> None:
                body = {"model": "policy", "input": items, "previous_response_id": previous, "store": store}
                asyncio.run_coroutine_threadsafe(ask(body), loop).result()

            await asyncio.to_thread(each)
            assert "internal_error" not in {call.get("error_code") for call in await harness.raw()}

    asyncio.run(run())


# --- asking for responses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_is_shown_as_it_was_given(agent: Agent, streamed: bool) -> None:
    agent.harness.model.answer = lambda request: {"reasoning_content": "hm", "content": "yes"}
    made = (await agent.whole(streamed, metadata={"k": "v"})).to_dict()
    shown = await agent.resource.retrieve(made["id"])
    assert (shown.output_text, shown.metadata) == ("yes", {"k": "v"})
    for item in made["output"]:
        for part in item.get("content", ()):
            part.pop("parsed", None)  # by the library
    assert shown.to_dict() == made
    with pytest.raises(openai.BadRequestError, match="background"):
        await agent.resource.retrieve(made["id"], stream=True)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await agent.resource.cancel(made["id"])


async def test_what_was_said_before_a_response_is_listed_page_by_page(agent: Agent) -> None:
    first = await agent.ask(input="one", instructions="never listed")
    items = [{"role": "user", "content": str(number)} for number in range(30)]
    second = await agent.ask(input=items, previous_response_id=first.id)
    texts = ["one", "you said one", *map(str, range(30))]
    listing = agent.resource.input_items
    for order, expected in (("asc", texts), ("desc", texts[::-1])):
        listed = [item async for item in listing.list(second.id, order=order, limit=7)]
        assert [item.content[0].text for item in listed] == expected
        assert {(item.type, item.status) for item in listed} == {("message", "completed")}
    page = await listing.list(second.id)
    assert (len(page.data), page.has_more) == (20, True)
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nowhere"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await listing.list(second.id, **wrong)
        assert {caught.value.param} == set(wrong)


async def test_a_large_response_counts_as_bytes_of_its_attempt_while_it_is_shown() -> None:
    async with GatewayHarness(limits=GatewayLimits(bytes_per_attempt=1_000_000)) as harness:
        _, made = await harness.post("/responses", {"model": "policy", "input": "x" * 300_000})
        with PROCESS.hold((harness.own.rollout_id, harness.own.attempt.attempt_id), 1_000_000) as other:
            for held, status in ((0, 200), (900_000, 429)):
                other.add(held)
                async with harness.session.get(harness.url(f"/responses/{made['id']}/input_items")) as reply:
                    assert reply.status == status


@pytest.mark.parametrize("limit", ["0" * 8 + "199", "0" * 8 + "1" + "0" * 5000, "-1", "x", "²"])
async def test_a_limit_that_is_no_number_in_its_bounds_is_refused(harness: GatewayHarness, limit: str) -> None:
    _, made = await harness.post("/responses", {"model": "policy", "input": "hi"})
    url = harness.url(f"/responses/{made['id']}/input_items")
    async with harness.session.get(url, params={"limit": limit}) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "limit")


async def test_a_deleted_response_is_gone_and_what_went_on_from_it_stays(agent: Agent) -> None:
    first = await agent.ask(input="one")
    second = await agent.ask(input="two", previous_response_id=first.id)
    await agent.resource.delete(first.id)
    for operation in (agent.resource.retrieve, agent.resource.delete):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await operation(first.id)
    with pytest.raises(openai.BadRequestError):
        await agent.ask(input="?", previous_response_id=first.id)
    await agent.ask(input="three", previous_response_id=second.id)
    texts = [message["content"] for message in agent.asked["messages"]]
    assert texts == ["one", "you said one", "two", "you said two", "three"]


async def test_nothing_of_it_is_a_call_of_the_attempt(agent: Agent) -> None:
    made = await agent.ask()
    await agent.resource.retrieve(made.id)
    await agent.resource.input_items.list(made.id)
    await agent.resource.delete(made.id)
    assert await agent.harness.states() == ["ok"]
    wrong = [("POST", f"/responses/{made.id}"), ("GET", f"/responses/{made.id}/cancel"), ("PUT", "/models")]
    for method, tail in wrong:
        async with agent.harness.session.request(method, agent.harness.url(tail)) as reply:
            assert reply.status == 405
