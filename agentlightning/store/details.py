"""Details for the dashboard: outlines of spans (made from stored JSON, without attributes), versions of resources, and
the texts of token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from pydantic_core import from_json

from agentlightning.errors import BadRequestError
from agentlightning.semconv import (
    AGL_ANNOTATION,
    AGL_EXCEPTION,
    AGL_MESSAGE,
    AGL_OBJECT,
    AGL_OPERATION,
    AGL_REWARD,
    RAW_SPAN,
    REQUEST_SPAN,
    STALE,
    LightningCallAttributes,
    LightningSpanAttributes,
)
from agentlightning.types import LLM, ResourcesUpdate, Span, SpanKind, SpanOutline, TokenText

MOST_OUTLINES: Final = 20_000
"""Largest number of outlines on one page."""
MOST_TOKENS: Final = 200_000
"""Largest number of token ids in one call."""
_DESCRIPTION: Final = 200
_PARTIAL = re.compile(r"\\x[89a-f][0-9a-f]")
"""A byte of an incomplete character, as written in a vocabulary."""
_NAMES: Final[Mapping[str, SpanKind]] = {
    REQUEST_SPAN: "call",
    RAW_SPAN: "call",
    AGL_REWARD: "reward",
    AGL_MESSAGE: "message",
    AGL_OBJECT: "message",
    AGL_EXCEPTION: "message",
    AGL_OPERATION: "operation",
}
_SAID_BY: Final = ("gen_ai.operation.name", "openinference.span.kind", "traceloop.span.kind", "agentops.span.kind")
"""Attributes in which instrumentation libraries set the kind of a span."""
_SAID: Final[Mapping[str, SpanKind]] = {
    "chat": "call",
    "completion": "call",
    "text_completion": "call",
    "generate_content": "call",
    "embeddings": "call",
    "embedding": "call",
    "llm": "call",
    "execute_tool": "tool",
    "tool": "tool",
    "invoke_agent": "agent",
    "create_agent": "agent",
    "agent": "agent",
    "workflow": "operation",
    "task": "operation",
    "chain": "operation",
    "operation": "operation",
    "session": "operation",
}
_MODELS: Final = ("gen_ai.request.model", "gen_ai.response.model", "llm.model_name")
_TOKENS_IN: Final = (
    LightningCallAttributes.PROMPT_TOKENS.value,
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.token_count.prompt",
)
_TOKENS_OUT: Final = (
    LightningCallAttributes.COMPLETION_TOKENS.value,
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.completion_tokens",
    "llm.token_count.completion",
)
_REWARD = LightningSpanAttributes.REWARD.value
_CALL_ID = LightningCallAttributes.CALL_ID.value
_STATE = LightningCallAttributes.STATE.value
_VERSION = LightningCallAttributes.WEIGHT_VERSION.value


def check_outline_page(limit: int, offset: int) -> None:
    """Check the limit and offset of a page of outlines.

    Raises:
        BadRequestError: `limit` or `offset` is out of range.
    """
    if not 1 <= limit <= MOST_OUTLINES:
        raise BadRequestError(f"limit must be from 1 to {MOST_OUTLINES}; got {limit}")
    if offset < 0:
        raise BadRequestError(f"offset must be 0 or more; got {offset}")


def outline_of_json(body: bytes | str) -> SpanOutline:
    """Return the outline of a span in the JSON that `Span` writes."""
    fields: dict[str, Any] = from_json(body)
    return _outline(fields, fields["attributes"], fields["status"]["status_code"], fields["status"].get("description"))


def outline_of_span(span: Span) -> SpanOutline:
    """Return the outline of a span."""
    return _outline(vars(span), span.attributes, span.status.status_code, span.status.description)


def _outline(
    fields: Mapping[str, Any], attributes: Mapping[str, Any], status_code: str, description: str | None
) -> SpanOutline:
    name = fields["name"]
    call_id = attributes.get(_CALL_ID)
    return SpanOutline.model_construct(
        rollout_id=fields["rollout_id"],
        attempt_id=fields["attempt_id"],
        sequence_id=fields["sequence_id"],
        trace_id=fields["trace_id"],
        span_id=fields["span_id"],
        parent_id=fields["parent_id"] or None,
        name=name,
        kind=kind_of(name, attributes),
        start_time=fields["start_time"],
        end_time=fields["end_time"],
        status_code=status_code,
        status_description=description[:_DESCRIPTION] if description else None,
        call_id=call_id if isinstance(call_id, str) else None,
        call_state=_text(attributes.get(_STATE)),
        model=next((value for value in map(attributes.get, _MODELS) if isinstance(value, str)), None),
        tokens_in=_count(attributes, _TOKENS_IN),
        tokens_out=_count(attributes, _TOKENS_OUT),
        weight_version=_whole(attributes.get(_VERSION)),
        stale=bool(attributes.get(STALE)),
        attributes=len(attributes),
    )


def kind_of(name: str, attributes: Mapping[str, Any]) -> SpanKind:
    """Return the kind of a span, by its name or by the attributes of its instrumentation."""
    if name == AGL_ANNOTATION:
        return "reward" if any(key.startswith(_REWARD) for key in attributes) else "message"
    if (kind := _NAMES.get(name)) is not None:
        return kind
    for key in _SAID_BY:
        value = attributes.get(key)
        if isinstance(value, str) and (kind := _SAID.get(value.lower())) is not None:
            return kind
    return "other"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(attributes: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((cast("int", v) for v in map(attributes.get, keys) if _whole(v) is not None), None)


def page_of_versions(newest: int, sort_order: str, limit: int, offset: int) -> list[int]:
    """Return the numbers of a page of the versions 1 to `newest`.

    Raises:
        BadRequestError: an argument is out of range.
    """
    if sort_order not in ("asc", "desc"):
        raise BadRequestError(f"Unsupported sort order {sort_order!r}; expected 'asc' or 'desc'")
    if not 1 <= limit <= 1000:
        raise BadRequestError(f"limit must be from 1 to 1000; got {limit}")
    if offset < 0:
        raise BadRequestError(f"offset must be 0 or more; got {offset}")
    numbers = range(1, newest + 1) if sort_order == "asc" else range(newest, 0, -1)
    return list(numbers[offset : offset + limit])


def without_keys(update: ResourcesUpdate) -> ResourcesUpdate:
    """Return a copy with API keys set to null."""
    copied = update.model_copy(deep=True)
    for resource in copied.resources.values():
        if isinstance(resource, LLM):
            resource.api_key = None
    return copied


def texts_of(tokens: Sequence[str] | None, token_ids: Sequence[int]) -> list[TokenText] | None:
    """Return the text of each id in a vocabulary (None for an unknown id); None without a vocabulary.

    Raises:
        BadRequestError: there are more than `MOST_TOKENS` ids.
    """
    if len(token_ids) > MOST_TOKENS:
        raise BadRequestError(f"At most {MOST_TOKENS:,} token ids are allowed in one call; got {len(token_ids):,}")
    if tokens is None:
        return None
    texts: list[TokenText] = []
    for token_id in token_ids:
        text = tokens[token_id] if 0 <= token_id < len(tokens) else None
        partial = text is not None and _PARTIAL.search(text) is not None
        texts.append(TokenText.model_construct(id=token_id, text=text, partial=partial))
    return texts
