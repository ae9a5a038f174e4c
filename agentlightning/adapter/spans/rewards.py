"""Reads rewards from spans for adapters, with the emitter's readers; only a usable reward counts:
a finite number of at most 1e15 in size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.emitter.reward import find_final_reward, get_reward_value, get_rewards_from_span
from agentlightning.semconv import AGL_ANNOTATION, LightningSpanAttributes
from agentlightning.types import Span
from agentlightning.utils.otel import extract_links_from_attributes
from agentlightning.utils.rewards import as_reward

_PRIMARY: Final = LightningSpanAttributes.REWARD.value + ".0.value"


def reward_value(span: Span) -> float | None:
    """Return the primary reward of a span; None if it has no usable reward."""
    attributes = span.attributes
    stated = _PRIMARY in attributes or "agentops.task.output" in attributes or "agentops.entity.output" in attributes
    if stated or span.name == AGL_ANNOTATION:
        return as_reward(get_reward_value(span))
    return None  # after a cheap first test: most spans of a trace are no rewards


def is_unusable_reward(span: Span) -> bool:
    """True if the span has a reward that is not a finite number, or too large."""
    return _PRIMARY in span.attributes and reward_value(span) is None


def reward_dimensions(span: Span) -> dict[str, float]:
    """Return the usable dimensions of a span's reward by name, the primary one first."""
    return {each.name: each.value for each in get_rewards_from_span(span) if as_reward(each.value) is not None}


def final_reward(spans: Sequence[Span]) -> float | None:
    """Return the last reward in the order of the spans; None if there is none, or it is not usable."""
    return as_reward(find_final_reward(spans))


def final_dimensions(spans: Sequence[Span]) -> dict[str, float]:
    """Return the dimensions of the last usable reward, by name; empty if there is no reward."""
    last = next((span for span in reversed(spans) if get_reward_value(span) is not None), None)
    return {} if last is None else reward_dimensions(last)


def links(span: Span) -> list[tuple[str, str]]:
    """Return the links of a span as pairs of attribute key and value; a target span must match all of them.

    Unreadable links are ignored.
    """
    try:
        return [(link.key_match, link.value_match) for link in extract_links_from_attributes(span.attributes)]
    except ValueError:
        return []
