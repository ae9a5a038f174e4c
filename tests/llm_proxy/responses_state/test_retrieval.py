"""Remembered responses are shown, listed and deleted, with OpenAI's client library."""

from __future__ import annotations

import openai
import pytest

from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.types import AttemptedRollout
from agentlightning.utils.http.byte_budget import PROCESS
from tests.llm_proxy.harness import GatewayHarness


def client_of(harness: GatewayHarness, attempt: AttemptedRollout) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=harness.url(attempt, "/v1"), api_key="none", max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_is_shown_as_it_was_given(harness: GatewayHarness, streamed: bool) -> None:
    harness.model.answer = lambda request: {"reasoning_content": "hm", "content": "yes"}
    async with client_of(harness, await harness.attempt()) as client:
        if streamed:
            async with client.responses.stream(model="policy", input="hi", metadata={"k": "v"}) as stream:
                made = (await stream.get_final_response()).to_dict()
        else:
            made = (await client.responses.create(model="policy", input="hi", metadata={"k": "v"})).to_dict()
        shown = await client.responses.retrieve(made["id"])
        assert (shown.output_text, shown.metadata) == ("yes", {"k": "v"})
        for item in made["output"]:
            for part in item.get("content", ()):
                part.pop("parsed", None)  # by the library
        assert shown.to_dict() == made
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.retrieve(made["id"], stream=True)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await client.responses.cancel(made["id"])


async def test_what_was_said_before_a_response_is_listed_page_by_page(harness: GatewayHarness) -> None:
    async with client_of(harness, await harness.attempt()) as client:
        first = await client.responses.create(model="policy", input="one", instructions="never listed")
        items = [{"role": "user", "content": str(number)} for number in range(30)]
        second = await client.responses.create(model="policy", input=items, previous_response_id=first.id)
        texts = ["one", "you said one", *map(str, range(30))]
        for order, expected in (("asc", texts), ("desc", texts[::-1])):
            found = [item async for item in client.responses.input_items.list(second.id, order=order, limit=7)]
            assert [item.content[0].text for item in found] == expected
            assert {(item.type, item.status) for item in found} == {("message", "completed")}
        page = await client.responses.input_items.list(second.id)
        assert (len(page.data), page.has_more) == (20, True)
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nowhere"}):
            (name,) = wrong
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.input_items.list(second.id, **wrong)
            assert caught.value.param == name


async def test_a_large_response_counts_as_bytes_of_its_attempt_while_it_is_shown() -> None:
    async with GatewayHarness(limits=GatewayLimits(bytes_per_attempt=1_000_000)) as harness:
        attempt = await harness.attempt()
        url = harness.url(attempt, "/responses")
        _, made = await harness.post(url, {"model": "policy", "input": "x" * 300_000})
        other = PROCESS.hold((attempt.rollout_id, attempt.attempt.attempt_id), 1_000_000)
        with other:
            for held, status in ((0, 200), (900_000, 429)):
                other.add(held)
                async with harness.session.get(f"{url}/{made['id']}/input_items") as reply:
                    assert reply.status == status


@pytest.mark.parametrize("limit", ["0" * 8 + "199", "0" * 8 + "1" + "0" * 5000, "-1", "x", "²"])
async def test_a_limit_that_is_no_number_in_its_bounds_is_refused(harness: GatewayHarness, limit: str) -> None:
    attempt = await harness.attempt()
    _, made = await harness.post(harness.url(attempt, "/responses"), {"model": "policy", "input": "hi"})
    url = harness.url(attempt, f"/responses/{made['id']}/input_items")
    async with harness.session.get(url, params={"limit": limit}) as reply:
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "limit")


async def test_a_deleted_response_is_gone_and_what_went_on_from_it_stays(harness: GatewayHarness) -> None:
    async with client_of(harness, await harness.attempt()) as client:
        first = await client.responses.create(model="policy", input="one")
        second = await client.responses.create(model="policy", input="two", previous_response_id=first.id)
        await client.responses.delete(first.id)
        for asked in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await asked(first.id)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="policy", input="?", previous_response_id=first.id)
        await client.responses.create(model="policy", input="three", previous_response_id=second.id)
        said = [message["content"] for message in harness.model.calls[-1].request["messages"]]
        assert said == ["one", "you said one", "two", "you said two", "three"]


async def test_nothing_of_it_is_a_call_of_the_attempt(harness: GatewayHarness) -> None:
    attempt = await harness.attempt()
    async with client_of(harness, attempt) as client:
        made = await client.responses.create(model="policy", input="one")
        await client.responses.retrieve(made.id)
        await client.responses.input_items.list(made.id)
        await client.responses.delete(made.id)
    assert await harness.states(attempt) == ["ok"]
    for method, tail in (
        ("POST", f"/responses/{made.id}"),
        ("GET", f"/responses/{made.id}/cancel"),
        ("PUT", "/models"),
    ):
        async with harness.session.request(method, harness.url(attempt, tail)) as reply:
            assert reply.status == 405
