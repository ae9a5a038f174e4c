"""What a program passes around, as attributes of a span, whatever it is. Tracing never ends a program."""

from __future__ import annotations

from typing import Any

from agentlightning.utils.otel import flatten_attributes, sanitize_attributes


def lenient_attributes(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten and sanitise values; what cannot be flattened is kept as text. Never raises."""
    try:
        return sanitize_attributes(flatten_attributes(values))
    except Exception:  # keys that are no strings, cycles, a broken __str__: the user's program goes on
        return {key: _text(value) for key, value in values.items()}


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # a broken __str__ of the user's must not end the user's program
        return f"<{type(value).__name__}: {type(error).__name__} in __str__>"
