"""Spans written by hand, in the notation of the worked examples: id, name, parent, times, attributes."""

from __future__ import annotations

from typing import Any

from agentlightning.semconv import LightningCallAttributes as Call
from agentlightning.types import Span, TraceStatus

CHAT = "openai.chat.completion"
NOTE = "agentlightning.annotation"


def span(
    id: str,
    name: str,
    parent: str | None,
    start: float | None,
    end: float | None,
    sequence_id: int = 0,
    status: str = "OK",
    attempt_id: str = "at",
    **attributes: Any,
) -> Span:
    return Span.from_attributes(
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
        rollout_id="ro",
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        name=name,
        trace_id="t" * 32,
        span_id=id,
        parent_id=parent,
        start_time=start,
        end_time=end,
        status=TraceStatus(status_code=status),
    )


def with_attributes(made: Span, attributes: dict[str, Any]) -> Span:
    return made.model_copy(update={"attributes": {**made.attributes, **attributes}})


def chat(
    id: str,
    parent: str | None,
    start: float | None,
    end: float | None,
    prompt: list[int] | None = None,
    completion: list[int] | None = None,
    response_id: str | None = None,
    **more: Any,
) -> Span:
    """One model call as an instrumented client sees it."""
    attributes: dict[str, Any] = {"gen_ai.response.id": response_id or id}
    if prompt is not None:
        attributes["prompt_token_ids"] = prompt
    if completion is not None:
        attributes["response_token_ids"] = completion
    return with_attributes(span(id, CHAT, parent, start, end, **more), attributes)


def reward(
    id: str, parent: str | None, at: float | None, value: Any, links: dict[str, str] | None = None, **more: Any
) -> Span:
    attributes: dict[str, Any] = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
    for index, (key, value_match) in enumerate((links or {}).items()):
        attributes[f"agentlightning.link.{index}.key_match"] = key
        attributes[f"agentlightning.link.{index}.value_match"] = value_match
    return with_attributes(span(id, NOTE, parent, at, at, **more), attributes)


def text_call(id: str, sequence_id: int, prompt: list[int], completion: list[int]) -> Span:
    """One model call as older gateways recorded it: Python literals in text."""
    choices = [{"index": 0, "token_ids": completion, "finish_reason": "stop"}]
    return with_attributes(
        span(f"raw-{id}", "raw_gen_ai_request", None, float(sequence_id), sequence_id + 0.5, sequence_id),
        {
            "llm.hosted_vllm.id": id,
            "llm.hosted_vllm.prompt_token_ids": str(prompt),
            "llm.hosted_vllm.choices": str(choices),
        },
    )


def gateway_call(
    call_id: str,
    sequence_id: int,
    prompt: list[int],
    completion: list[int],
    *,
    response_id: str | None = None,
    logprobs: list[float] | None = None,
    weight_version: int | None = 7,
    state: str = "ok",
    attempt_id: str = "at",
    start: float | None = None,
    **more: Any,
) -> list[Span]:
    """The two spans that the gateway stores for one call."""
    at = float(sequence_id) if start is None else start
    typed: dict[str, Any] = {
        Call.CALL_ID.value: call_id,
        Call.STATE.value: state,
        Call.FINISH_REASON.value: "stop",
    }
    if prompt:
        typed[Call.PROMPT_TOKEN_IDS.value] = prompt
    if completion:
        typed[Call.COMPLETION_TOKEN_IDS.value] = completion
        typed[Call.COMPLETION_LOGPROBS.value] = [-0.5] * len(completion) if logprobs is None else logprobs
    if weight_version is not None:
        typed[Call.WEIGHT_VERSION.value] = weight_version
    words: dict[str, Any] = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "hi"}
    if state in ("ok", "no_tokens"):
        words["gen_ai.response.id"] = response_id or call_id
        typed["llm.hosted_vllm.id"] = response_id or call_id
    place = {"sequence_id": sequence_id, "attempt_id": attempt_id}
    request = span(f"req-{call_id}", "litellm_request", None, at, at + 0.5, **place)
    record = span(f"raw-{call_id}", "raw_gen_ai_request", f"req-{call_id}", at, at + 0.5, **place)
    return [with_attributes(request, words), with_attributes(record, {**typed, **more})]


def said(messages: list[dict[str, Any]], answer: str | None = None) -> dict[str, Any]:
    """The words of a call as attributes of a span: roles and texts of the prompt, and the text of the answer."""
    attributes: dict[str, Any] = {}
    for index, message in enumerate(messages):
        attributes |= {f"gen_ai.prompt.{index}.{key}": value for key, value in message.items()}
    if answer is not None:
        attributes |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": answer}
    return attributes


def conversation(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """A prompt of user and assistant in turn; a text that begins with `tool:` is the result of a tool."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for index, text in enumerate(texts):
        role = "tool" if text.startswith("tool:") else "assistant" if index % 2 else "user"
        messages.append({"role": role, "content": text})
    return messages


def spoken_call(
    call_id: str,
    sequence_id: int,
    prompt: list[int],
    completion: list[int],
    messages: list[dict[str, Any]],
    answer: str = "yes",
    **more: Any,
) -> list[Span]:
    """The gateway's two spans of a call with its words."""
    request, record = gateway_call(call_id, sequence_id, prompt, completion, **more)
    others = {key: value for key, value in request.attributes.items() if not key.startswith("gen_ai.prompt")}
    request = request.model_copy(update={"attributes": {**others, **said(messages, answer)}})
    return [request, record]
