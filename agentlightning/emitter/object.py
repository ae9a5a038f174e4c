"""Objects: values that an agent adds to its trace. A value that is not a scalar must be a JSON value."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from agentlightning.emitter.annotation import OK, send
from agentlightning.semconv import AGL_OBJECT, LightningSpanAttributes
from agentlightning.tracer.base import get_active_tracer
from agentlightning.types import SpanCoreFields, SpanLike
from agentlightning.utils.otel import flatten_attributes, full_qualified_name, sanitize_attributes

TYPE = LightningSpanAttributes.OBJECT_TYPE.value
LITERAL = LightningSpanAttributes.OBJECT_LITERAL.value
JSON = LightningSpanAttributes.OBJECT_JSON.value
_FROM_LITERAL: Mapping[str, Callable[[str], object]] = {
    "str": str,
    "bool": lambda literal: literal.lower() == "true",
    "int": int,
    "float": float,
    "bytes": base64.b64decode,
}


def emit_object(
    object: object, attributes: Mapping[str, object] | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Add a value to the trace.

    Raises:
        RuntimeError: it is not JSON serializable; or no tracer is active and `propagate` is true.
    """
    payload = {**encode_object(object), **sanitize_attributes(flatten_attributes(attributes or {}))}
    return send(get_active_tracer() if propagate else None, AGL_OBJECT, payload, OK, propagate)


def encode_object(object: object) -> dict[str, str]:
    """Return the attributes that hold a value: its type, and a literal (base64 for bytes) or JSON text.

    Raises:
        RuntimeError: it is not JSON serializable.
    """
    if isinstance(object, (str, int, float, bool)):
        return {TYPE: type(object).__name__, LITERAL: str(object)}
    if isinstance(object, bytes):
        return {TYPE: "bytes", LITERAL: base64.b64encode(object).decode("ascii")}
    try:
        return {TYPE: full_qualified_name(cast(Any, type(object))), JSON: json.dumps(object)}
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"Object must be JSON serializable, got: {type(object).__name__} ({error})") from error


def get_object_value(span: SpanLike) -> Any:
    """Return the value of an object span; None if it has none. Tuples are returned as lists.

    Raises:
        RuntimeError: the text is not JSON, or the literal has an unknown type.
    """
    attributes = span.attributes or {}
    text, literal = attributes.get(JSON), attributes.get(LITERAL)
    if text is not None:
        try:
            return json.loads(str(text))
        except ValueError as error:
            raise RuntimeError(f"Object of span {span.name} is not valid JSON: {error}") from error
    if literal is None:
        return None
    kind = str(attributes.get(TYPE, "str"))
    if kind not in _FROM_LITERAL:
        raise RuntimeError(f"Unsupported object type for literal deserialization: {kind}")
    return _FROM_LITERAL[kind](str(literal))
