"""Tags and links: attributes of a span with search words, and with references to other spans."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from opentelemetry import trace as trace_api
from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from agentlightning.semconv import (
    LightningResourceAttributes,
    LightningSpanAttributes,
    LinkAttributes,
    LinkPydanticModel,
)
from agentlightning.utils.attributes import filter_and_unflatten_attributes

_TAG = LightningSpanAttributes.TAG.value
_LINK = LightningSpanAttributes.LINK.value
_KEY = LinkAttributes.KEY_MATCH.value
_VALUE = LinkAttributes.VALUE_MATCH.value
_OWN = {
    LightningResourceAttributes.ROLLOUT_ID.value: "rollout_id",
    LightningResourceAttributes.ATTEMPT_ID.value: "attempt_id",
}
"""Keys of links to a span's rollout and attempt, and the fields of a span that hold them."""

S = TypeVar("S")


def make_tag_attributes(tags: Sequence[str] | Mapping[str, object]) -> dict[str, Any]:
    """Return the attributes that add these tags to a span; the entries of a dict become `key:value`.

    Pass them to the function that emits the span: `emit_reward(0.95, attributes=make_tag_attributes(["fast"]))`.

    Raises:
        ValueError: a tag is not a string, or `tags` is a single string instead of a list.
    """
    if isinstance(tags, str):
        raise ValueError(f"tags must be a list of strings or a dict; got the string {tags!r}")
    words = [f"{key}:{value}" for key, value in tags.items()] if isinstance(tags, Mapping) else list(tags)
    for word in words:
        if not isinstance(word, str):
            raise ValueError(f"A tag must be a string; got {type(cast(object, word)).__name__}: {word!r}")
    return {f"{_TAG}.{index}": word for index, word in enumerate(words)}


def extract_tags_from_attributes(attributes: Mapping[str, object]) -> list[str]:
    """Return the tags; an empty list without tags.

    Raises:
        ValidationError: pydantic's, a ValueError; a tag is not a string, or the keys are not numbered from 0.
    """
    tags = filter_and_unflatten_attributes(attributes, _TAG)
    if not tags:
        return []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in cast(list[Any], tags)):
        text = f"Tags must be strings with the keys {_TAG}.0, {_TAG}.1, ...; got: {{tags}}"
        wrong: InitErrorDetails = {
            "type": PydanticCustomError("tags", text, {"tags": repr(cast(object, tags))}),
            "input": tags,
        }
        raise ValidationError.from_exception_data(_TAG, [wrong])
    return cast(list[str], tags)


class LinkedBlock(dict[str, Any]):
    """Attributes of links; a `with` statement sets them on the open span of an operation."""

    def __enter__(self) -> LinkedBlock:
        span = trace_api.get_current_span()
        if not span.is_recording():
            if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
                return self
            raise RuntimeError(
                "No span is open to which the links can be added. Move the block into an operation of a rollout "
                "(`with operation(...):`, or a function with @operation), or pass the links to a function that emits "
                "a span: emit_annotation(make_link_attributes({...}))"
            )
        present = extract_links_from_attributes(cast("Mapping[str, Any]", getattr(span, "attributes", None) or {}))
        links = {link.key_match: link.value_match for link in (*present, *extract_links_from_attributes(self))}
        span.set_attributes(_attributes_of(links))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the links on the span, which stays open."""


def make_link_attributes(
    links: Mapping[str, str] | None = None,
    *,
    linked_rollout_id: str | None = None,
    linked_attempt_id: str | None = None,
) -> LinkedBlock:
    """Return the attributes that link a span to all spans with the attribute `key` equal to `value`, for each pair.

    The keys `trace_id` and `span_id` compare the ids of the span (hexadecimal); `linked_rollout_id` and
    `linked_attempt_id` those of its rollout and attempt. As a context manager, it sets the attributes on the open span:
    `with make_link_attributes(linked_rollout_id="ro-001"):` inside an operation.

    Raises:
        ValueError: a value is not a string, or no links are given.
        RuntimeError: it is used as a context manager and no span is open.
    """
    pairs: dict[str, object] = dict(links or {})
    for key, value in zip(_OWN, (linked_rollout_id, linked_attempt_id), strict=True):
        if value is not None:
            pairs[key] = value
    if links is None and not pairs:
        raise ValueError("At least one link is required, as in make_link_attributes({'gen_ai.response.id': '...'})")
    for key, value in pairs.items():
        if not isinstance(value, str):
            raise ValueError(f"Link value must be a string, got: {type(value).__name__} for key '{key}'")
    return LinkedBlock(_attributes_of(cast("dict[str, str]", pairs)))


def _attributes_of(links: Mapping[str, str]) -> dict[str, str]:
    pairs = enumerate(links.items())
    return {
        key: value
        for index, (name, match) in pairs
        for key, value in ((f"{_LINK}.{index}.{_KEY}", name), (f"{_LINK}.{index}.{_VALUE}", match))
    }


def extract_links_from_attributes(attributes: Mapping[str, object]) -> list[LinkPydanticModel]:
    """Return the links; an empty list without links.

    Raises:
        ValueError: a link has no key or value, or the keys are not numbered from 0.
    """
    links = filter_and_unflatten_attributes(attributes, _LINK)
    if not links:
        return []
    if not isinstance(links, list):
        raise ValueError(f"Links must have the keys {_LINK}.0, {_LINK}.1, ...; got: {links!r}")
    return [LinkPydanticModel.model_validate(link) for link in cast(list[Any], links)]


def query_linked_spans(spans: Sequence[S], links: Sequence[LinkPydanticModel]) -> list[S]:
    """Return the spans that match all links; every span without links."""
    return [span for span in spans if all(_matches(span, link) for link in links)]


def _matches(span: Any, link: LinkPydanticModel) -> bool:
    name = link.key_match
    if name not in ("trace_id", "span_id"):
        attributes: Mapping[str, object] = span.attributes or {}
        if name in _OWN and name not in attributes:
            return getattr(span, _OWN[name], None) == link.value_match
        return attributes.get(name) == link.value_match
    own = getattr(span, name, None)
    if not isinstance(own, str):
        context = span.get_span_context() if hasattr(span, "get_span_context") else None
        digits = "032x" if name == "trace_id" else "016x"
        own = None if context is None else format(getattr(context, name), digits)
    return own == link.value_match
