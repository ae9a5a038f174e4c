"""What is kept of prompts and replies, and redaction before anything leaves the gateway."""

from __future__ import annotations

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.types import Span
from tests.llm_proxy.desk import Desk
from tests.stubs.model_server import encode

SECRET = "swordfish"


async def _everything(desk: Desk, **fields: object) -> tuple[list[Span], str]:
    attempt = await desk.attempt()
    assert (await desk.ask(attempt, f"the word is {SECRET}", **fields))[0] == 200
    spans = await desk.spans(attempt)
    return spans, "".join(span.model_dump_json() for span in spans)


async def test_by_default_prompts_and_replies_are_kept() -> None:
    async with Desk() as desk:
        _, text = await _everything(desk)
        assert SECRET in text


async def test_tokens_alone_can_be_kept() -> None:
    async with Desk(keep="tokens") as desk:
        spans, text = await _everything(desk)
        assert SECRET not in text
        parent, raw = spans
        assert parent.attributes["gen_ai.prompt.0.role"] == "user"
        assert raw.attributes["agentlightning.call.completion_token_ids"] == encode(f"you said the word is {SECRET}")
        assert raw.attributes["agentlightning.call.finish_reason"] == "stop"


async def test_counts_alone_can_be_kept() -> None:
    async with Desk(keep="counts") as desk:
        spans, text = await _everything(desk)
        assert SECRET not in text
        raw = spans[1].attributes
        assert "agentlightning.call.completion_token_ids" not in raw
        assert "agentlightning.call.completion_logprobs" not in raw
        assert str(encode(SECRET)[0]) not in text
        assert raw["agentlightning.call.completion_tokens"] == 6
        assert raw["agentlightning.call.state"] == "ok"


async def test_a_function_of_the_user_changes_what_leaves() -> None:
    def redact(span: Span) -> Span:
        attributes = {k: v.replace(SECRET, "***") if isinstance(v, str) else v for k, v in span.attributes.items()}
        return span.model_copy(update={"attributes": attributes})

    async with Desk(redact=redact) as desk:
        _, text = await _everything(desk)
        assert SECRET not in text
        assert "the word is ***" in text


async def test_if_the_users_function_fails_nothing_leaves_and_the_agent_is_told() -> None:
    def redact(span: Span) -> Span:
        raise RuntimeError("no dictionary")

    async with Desk(redact=redact) as desk:
        attempt = await desk.attempt()
        status, body = await desk.ask(attempt, SECRET)
        assert status == 503
        assert body["error"]["code"] == "record_lost"
        assert await desk.spans(attempt) == []
        assert desk.proxy.stats()["lost"] == 1


async def test_an_error_message_is_text_too() -> None:
    async with Desk(keep="tokens") as desk:
        attempt = await desk.attempt()
        await desk.post(desk.url(attempt), {"model": SECRET, "messages": []})
        spans = await desk.spans(attempt)
        assert spans[0].attributes["error.type"] == "refused"
        assert "There is no model" not in "".join(span.model_dump_json() for span in spans)


def test_a_wrong_choice_names_the_right_ones() -> None:
    with pytest.raises(ValueError, match="keep must be one of all, tokens, counts; got 'some'"):
        LLMProxy(keep="some")  # type: ignore[arg-type]
