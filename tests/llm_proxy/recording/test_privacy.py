"""The stored part of prompts and replies, and redaction before anything leaves the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.semconv import HIDDEN_KEYS
from agentlightning.types import Span
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import encode

SECRET = "swordfish"


async def _everything(harness: GatewayHarness, **fields: object) -> tuple[list[Span], str]:
    attempt = await harness.attempt()
    assert (await harness.ask(f"the word is {SECRET}", of=attempt, **fields))[0] == 200
    spans = await harness.spans(attempt)
    return spans, "".join(span.model_dump_json() for span in spans)


async def test_what_has_the_shape_of_a_key_is_hidden_and_its_tokens_stay() -> None:
    key = "sk-" + "a1B2c3D4e5F6g7H8i9J0" * 2
    async with GatewayHarness() as harness:
        status, reply = await harness.ask(f"the key is {key}")
        spans = await harness.spans()
    assert status == 200
    assert key in str(reply)
    assert key not in "".join(span.model_dump_json() for span in spans)
    assert any(span.attributes.get(HIDDEN_KEYS) for span in spans)
    raw = spans[1].attributes
    assert raw["agentlightning.call.completion_token_ids"] == encode(f"you said the key is {key}")


@pytest.mark.parametrize("keep", ["all", "tokens", "counts"])
async def test_prompts_and_replies_are_kept_or_tokens_or_counts_alone(keep: Any) -> None:
    async with GatewayHarness(keep=keep) as harness:
        spans, text = await _everything(harness)
    parent, raw = (span.attributes for span in spans)
    assert (SECRET in text) == (keep == "all")
    assert parent["gen_ai.prompt.0.role"] == "user"
    assert (raw["agentlightning.call.state"], raw["agentlightning.call.finish_reason"]) == ("ok", "stop")
    ids = encode(f"you said the word is {SECRET}")
    if keep != "counts":
        assert raw["agentlightning.call.completion_token_ids"] == ids
        return
    assert not {"agentlightning.call.completion_token_ids", "agentlightning.call.completion_logprobs"} & set(raw)
    assert str(encode(SECRET)[0]) not in text
    assert raw["agentlightning.call.completion_tokens"] == len(ids)


async def test_a_function_of_the_user_changes_what_leaves() -> None:
    def redact(span: Span) -> Span:
        attributes = {k: v.replace(SECRET, "***") if isinstance(v, str) else v for k, v in span.attributes.items()}
        return span.model_copy(update={"attributes": attributes})

    async with GatewayHarness(redact=redact) as harness:
        _, text = await _everything(harness)
        assert SECRET not in text
        assert "the word is ***" in text


async def test_if_the_users_function_fails_nothing_leaves_and_the_agent_is_told() -> None:
    def redact(span: Span) -> Span:
        raise RuntimeError("no dictionary")

    async with GatewayHarness(redact=redact) as harness:
        status, body = await harness.ask(SECRET)
        assert status == 503
        assert body["error"]["code"] == "record_lost"
        assert await harness.spans() == []
        assert harness.proxy.stats()["lost"] == 1


async def test_an_error_message_is_text_too() -> None:
    async with GatewayHarness(keep="tokens") as harness:
        await harness.post("/chat/completions", {"model": SECRET, "messages": []})
        spans = await harness.spans()
        assert spans[0].attributes["error.type"] == "refused"
        assert "does not exist" not in "".join(span.model_dump_json() for span in spans)


def test_a_wrong_choice_names_the_right_ones() -> None:
    with pytest.raises(ValueError, match="keep must be one of all, tokens, counts; got 'some'"):
        LLMProxy(keep="some")  # type: ignore[arg-type]
