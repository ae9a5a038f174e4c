"""Requests of the gateway to the store: numbers of calls, and their spans, stored before the agent gets the reply.

The user chooses which parts of prompts and replies are kept, before anything leaves the process. Keys with a known
format are always hidden first; token ids are unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar, get_args

from agentlightning.errors import AgentLightningError, BusyError, TooLargeError
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.off_loop import OffLoop
from agentlightning.llm_proxy.recording.spans import KEPT_BYTES, bare_spans_of, spans_of
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.semconv import LightningCallAttributes
from agentlightning.store.base import LightningStore
from agentlightning.store.rules.values import evolve
from agentlightning.tracer.delivery import span_without_keys
from agentlightning.tracer.mirror import mirror_spans
from agentlightning.types import Span, TraceStatus
from agentlightning.utils.backoff import Outage, backoff_delays

logger = logging.getLogger(__name__)
T = TypeVar("T")
_FIRST_DELAY = 0.05
_LEAST_BYTES = 4096

Kept = Literal["all", "tokens", "counts"]
"""`tokens`: token ids and log-probabilities, no text; `counts`: numbers, times, model and outcome only."""
Redact = Callable[[Span], Span]

_TEXT = ("gen_ai.prompt.", "gen_ai.completion.", "llm.request.functions.", "llm.hosted_vllm.", "error.message")
_SHORT = (".role", ".finish_reason", ".id", ".model")
"""Suffixes of keys below `_TEXT` that contain no text of the conversation."""
_TOKENS = (
    LightningCallAttributes.PROMPT_TOKEN_IDS.value,
    LightningCallAttributes.COMPLETION_TOKEN_IDS.value,
    LightningCallAttributes.COMPLETION_LOGPROBS.value,
)
_COUNTS = {
    LightningCallAttributes.PROMPT_TOKEN_IDS.value: LightningCallAttributes.PROMPT_TOKENS.value,
    LightningCallAttributes.COMPLETION_TOKEN_IDS.value: LightningCallAttributes.COMPLETION_TOKENS.value,
}


class Privacy:
    """Removes the parts of a call's spans that are not to be kept.

    Raises:
        ValueError: `keep` is not one of the choices.
    """

    def __init__(self, keep: Kept = "all", redact: Redact | None = None) -> None:
        if keep not in get_args(Kept):
            raise ValueError(f"keep must be one of {', '.join(get_args(Kept))}; got {keep!r}")
        self._keep: Kept = keep
        self._redact = redact

    def apply(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans that may leave the process. If the user's function fails, raise its error."""
        result = list(spans)
        if self._keep != "all":
            left_out, counts = (_TOKENS, _COUNTS) if self._keep == "counts" else ((), {})
            for place, span in enumerate(spans):
                attributes = {
                    key: value
                    for key, value in span.attributes.items()
                    if key not in left_out and (not key.startswith(_TEXT) or key.endswith(_SHORT))
                }
                for key, count in counts.items():
                    if isinstance(ids := span.attributes.get(key), (list, tuple)):
                        attributes[count] = len(ids)
                status = TraceStatus(status_code=span.status.status_code)
                result[place] = evolve(span, attributes=attributes, status=status)
        return result if self._redact is None else [self._redact(span) for span in result]


async def ask_store(question: Awaitable[T], seconds: float) -> T:
    """Await a request to the store.

    Raises:
        CallFailed: 503, the store did not respond in time or failed. A `CallFailed` of the request is raised unchanged.
    """
    try:
        async with asyncio.timeout(seconds):
            return await question
    except CallFailed:
        raise
    except Exception as error:  # boundary: any failure of a store, ours or a user's, is an answer for the agent
        logger.error("the store failed before a model call: %r", error)
        text = f"The store is unavailable ({type(error).__name__}), so the call was not made. Retry later"
        raise CallFailed(503, text, code="store_unavailable", retry_after=1.0) from error


async def keep(
    store: LightningStore, call: GatewayCall, privacy: Privacy, seconds: float, off_loop: OffLoop | None = None
) -> Exception | None:
    """Store the two spans of a call in one step, and offer them to the mirror; return None, or why they are lost.

    Retries for `seconds`, unless the store rejects them as invalid. Safe to repeat: the store identifies the spans by
    their ids.
    """
    outage, delays, kept_bytes = Outage(seconds), backoff_delays(_FIRST_DELAY), KEPT_BYTES
    spans: list[Span] | None = None
    while True:
        try:
            if spans is None:
                spans = privacy.apply(await _written(call, kept_bytes, off_loop or OffLoop()))
        except Exception as error:  # boundary: `redact` is the user's; if it fails, nothing leaves
            return error
        began, limit = time.monotonic(), max(0.01, seconds - outage.away)
        outage.expect(limit)
        try:
            async with asyncio.timeout(limit):
                await store.add_many_spans(spans)
            mirror_spans(spans)
            return None
        except Exception as error:  # boundary: any failure of a store is retried or returned
            if isinstance(error, TooLargeError) and kept_bytes > _LEAST_BYTES:
                spans, kept_bytes = None, kept_bytes // 16  # a store, or a proxy before it, has a lower limit
                continue
            delay = next(delays)
            if is_final(error) or outage.failed(began, delay):
                return error
        await asyncio.sleep(delay)


async def _written(call: GatewayCall, kept_bytes: int, off_loop: OffLoop) -> list[Span]:
    """Return the spans of a call; only its outcome if a part of it cannot be written."""
    try:
        spans = await off_loop.run(call.bytes, lambda: [span_without_keys(span) for span in spans_of(call, kept_bytes)])
    except Exception as error:  # boundary: a call that cannot be written has a bare record
        logger.exception("%s: the call cannot be recorded in full; only its outcome is recorded", call.call_id)
        return [span_without_keys(span) for span in bare_spans_of(call, error)]
    if spans[1].attributes.get(LightningCallAttributes.STATE.value) == "no_tokens":
        call.state = "no_tokens"  # for want of room
    return spans


def is_final(error: Exception) -> bool:
    """True if the store would reject the same spans again."""
    if isinstance(error, AgentLightningError):
        return error.http_status < 500 and not isinstance(error, BusyError)
    return isinstance(error, (TypeError, ValueError, NotImplementedError))
