"""Conversion of spans into triplets: 1,000 and 10,000 calls of one rollout, from tracer and gateway, text and typed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.adapter.triplet import TraceToTripletBase
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.recording.spans import spans_of
from agentlightning.types import Span
from bench.store_figures import Figure, clock

PROMPT, COMPLETION = list(range(1000, 2000)), list(range(5000, 5200))
LOGPROBS = [-0.5] * len(COMPLETION)
_BEGAN = 1_700_000_000.0


def _span(number: int, name: str, attributes: dict[str, Any], span_id: str, parent_id: str | None = None) -> Span:
    return Span.from_attributes(
        attributes=attributes,
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=number,
        name=name,
        span_id=span_id,
        parent_id=parent_id,
        start_time=_BEGAN + number * 0.001,
        end_time=_BEGAN + number * 0.001 + 0.0005,
    )


def _reward(number: int, parent_id: str | None = None) -> Span:
    attributes = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0}
    return _span(number, "agentlightning.annotation", attributes, f"reward-{number}", parent_id)


def tracer_spans(calls: int, as_text: bool) -> list[Span]:
    """Return the spans of an older tracer: a root, a span for each call with its tokens, a reward."""
    root = _span(1, "session", {"agent.name": "solver"}, "root")
    root.end_time = _BEGAN + calls + 10
    spans = [root]
    for index in range(calls):
        attributes = {
            "gen_ai.response.id": f"resp-{index}",
            "gen_ai.request.model": "policy",
            "gen_ai.request.temperature": 0.7,
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": f"question {index}",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": "answer",
            "prompt_token_ids": str(PROMPT) if as_text else list(PROMPT),
            "response_token_ids": str(COMPLETION) if as_text else list(COMPLETION),
        }
        spans.append(_span(index + 2, "openai.chat.completion", attributes, f"call-{index}", "root"))
    return [*spans, _reward(calls + 2, "root")]


def text_records(calls: int) -> list[Span]:
    """Return the spans of the older gateway: token ids as Python literals in one span for each call."""
    spans: list[Span] = []
    for index in range(calls):
        choice = {"finish_reason": "stop", "index": 0, "token_ids": COMPLETION}
        attributes = {
            "llm.hosted_vllm.id": f"resp-{index}",
            "llm.hosted_vllm.prompt_token_ids": str(PROMPT),
            "llm.hosted_vllm.choices": str([choice]),
        }
        spans.append(_span(2 * index + 1, "raw_gen_ai_request", attributes, f"call-{index}"))
        if index % 10 == 9:
            spans.append(_reward(2 * index + 2))
    return spans


def records(calls: int) -> list[Span]:
    """Return the spans of this gateway: two spans for each call, with typed tokens beside the text form."""
    spans: list[Span] = []
    for index in range(calls):
        call = GatewayCall("ro-1", "at-1", 2 * index + 1, arrived_at=_BEGAN + 2 * index * 0.001)
        call.request = {"model": "policy", "messages": [{"role": "user", "content": f"question {index}"}]}
        message = {"role": "assistant", "content": "answer"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": COMPLETION}
        reply = {"id": f"resp-{index}", "model": "policy", "prompt_token_ids": PROMPT, "choices": [choice]}
        call.answered(reply, CallTokens(list(PROMPT), list(COMPLETION), list(LOGPROBS)))
        spans += [span.model_copy(update={"end_time": call.arrived_at + 0.0005}) for span in spans_of(call)]
        if index % 10 == 9:
            spans.append(_reward(2 * index + 2))
    return spans


_CASES: tuple[tuple[str, type[TraceToTripletBase], Callable[[int], list[Span]], float | None], ...] = (
    ("tracer's spans, token lists", TracerTraceToTriplet, lambda calls: tracer_spans(calls, False), 661),
    ("tracer's spans, tokens as text", TracerTraceToTriplet, lambda calls: tracer_spans(calls, True), None),
    ("gateway's records, by tree", TracerTraceToTriplet, records, None),
    ("gateway's records", LlmProxyTraceToTriplet, records, None),
    ("gateway's records of the older form", LlmProxyTraceToTriplet, text_records, 2579),
)


def milliseconds(work: Callable[[], Sequence[Any]], times: int) -> float:
    """Return the median time until a piece of work has its result, without the time to free it."""
    took: list[float] = []
    end = time.monotonic() + 8.0
    while len(took) < times and (len(took) < 2 or time.monotonic() < end):
        began = clock()
        result = work()
        took.append(1e3 * (clock() - began))
        del result
    return statistics.median(took)


def measure_adapters(quick: bool) -> list[Figure]:
    """Measure each adapter on each form of spans, and whether ten times the calls take ten times as long."""
    figures: list[Figure] = []
    times = 2 if quick else 10
    for label, adapter, make, older in _CASES:
        few, many = make(1000), make(1000 * times)
        read = adapter().adapt(few)
        assert len(read) == 1000
        assert read[7].prompt["token_ids"] == PROMPT
        assert read[7].response["token_ids"] == COMPLETION
        once = milliseconds(partial(adapter().adapt, few), 5 if quick else 11)
        more = milliseconds(partial(adapter().adapt, many), 2)
        figures += [
            Figure(f"1,000 calls into triplets, {label}, ms", once, 100, True, older),
            Figure(
                f"... per call with {times} times the calls, ratio",
                more / once / times,
                1.5,
                True,
                note=f"{more:.0f} ms",
            ),
        ]
    return figures
