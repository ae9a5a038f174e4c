"""The forms of spans in the memory store: rows of plain values for the latest spans, packed rows for earlier ones.

A row shares nothing mutable with a `Span`, so reading it is a copy, which takes a quarter of the time of reading JSON.
A row takes twice the memory of its bytes, so the size of rows is limited. Spans of a bulk load are kept as JSON, and so
are spans with more content than most, such as events or values of other classes.
"""

from __future__ import annotations

import marshal
from collections import deque
from operator import itemgetter
from typing import Any, cast

from agentlightning.store.rules.values import new_object, set_extra, set_fields, set_names, set_private
from agentlightning.types import OtelResource, Span, SpanContext, TraceStatus
from agentlightning.utils.otlp.unread import UnreadSpan

DEFAULT_DECODED_BYTES = 32 << 20
BULK = 32
"""Largest number of spans in a normal call. A larger call is encoded in one step, which is faster and keeps rows."""
_Row = tuple[Any, ...]
_fields_of = itemgetter(*Span.model_fields)
_NUMBERS = frozenset((int, float, bool))
_TEXT = frozenset((str,))
_TEXT_OR_NONE = frozenset((str, type(None)))
_TIME_OR_NONE = frozenset((float, type(None)))
_SPAN_SIZE, _ROW_SIZE, _ITEM_SIZE = 430, 1000, 100
"""Size in bytes, without texts, of the JSON of a span, of its row, and of each value in it."""


class KeptSpan:
    """A span in memory. Its form can change, but its value does not. Usable from any thread."""

    __slots__ = ("form", "sequence_id")

    def __init__(self, form: _Row | bytes | UnreadSpan, sequence_id: int) -> None:
        self.form = form
        """The row, the packed row, or (until it is first read) the bytes from an exporter."""
        self.sequence_id = sequence_id

    def read(self) -> Span:
        """Return the span, with copies of the values."""
        form = self.form
        if type(form) is tuple:
            return _span(form, True)  # pyright: ignore[reportArgumentType] -- `type` is asked, `isinstance` takes longer
        if type(form) is bytes:
            return _span(marshal.loads(form), False)  # pyright: ignore[reportArgumentType] -- the same
        span = cast(UnreadSpan, form).read()
        row = row_of(span)
        if row is not None:
            self.form = marshal.dumps(row[0])
        return span

    def pack(self) -> None:
        """Pack a row into bytes."""
        self.form = marshal.dumps(cast(_Row, self.form))


class Rows:
    """The spans that are kept as rows, within a limit in bytes. The caller must hold the lock of the store."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._batches: deque[tuple[list[KeptSpan], int]] = deque()

    def add(self, spans: list[KeptSpan], size: int) -> None:
        """Keep these spans as rows of `size` bytes; pack the oldest rows until all rows are within the limit."""
        self._batches.append((spans, size))
        self._left -= size
        while self._left < 0:
            packed, room = self._batches.popleft()
            for span in packed:
                span.pack()
            self._left += room


class _OtherValue(Exception):
    """Raised when a span has a value that a row cannot hold."""


def row_of(span: Span) -> tuple[_Row, int, int] | None:
    """Return a span as a row, and the approximate sizes of its JSON and of the row; None if a row cannot hold it.

    Raises:
        UnicodeEncodeError: a text in it cannot be stored.
    """
    try:
        return _row_of(span)
    except (_OtherValue, KeyError, TypeError, AttributeError):  # a field is missing, or is not a text
        return None


def _row_of(span: Span) -> tuple[_Row, int, int]:
    (
        rollout_id, attempt_id, number, trace_id, span_id, parent_id, name, status, attributes, events, links,
        start_time, end_time, context, parent, resource, kind, scope, dropped, flags,
    ) = _fields_of(span.__dict__)  # fmt: skip
    judged, produced_by = status.__dict__, resource.__dict__
    code, description, schema_url = judged["status_code"], judged["description"], produced_by["schema_url"]
    if (
        type(span) is not Span
        or type(status) is not TraceStatus
        or type(resource) is not OtelResource
        or events
        or links
        or span.__pydantic_extra__
        or status.__pydantic_extra__
        or dropped is not None
        or type(number) is not int
        or type(start_time) not in _TIME_OR_NONE
        or type(end_time) not in _TIME_OR_NONE
        or not (flags is None or (type(flags) is int and 0 <= flags < 2**32))
    ):
        raise _OtherValue
    texts: list[str] = [rollout_id, attempt_id, trace_id, span_id, name, code, schema_url]
    if not (parent_id is description is kind is None):
        texts += [text for text in (parent_id, description, kind) if text is not None]
    if not _TEXT.issuperset(map(type, texts)):
        raise _OtherValue
    own, lists, items = _plain(attributes, texts)
    made_by, made_by_lists, more = _plain(produced_by["attributes"], texts)
    items += more
    own_context = _context(context, trace_id, span_id, texts)
    own_parent = None if parent is None else _context(parent, trace_id, parent_id, texts)
    own_scope = None if scope is None else _scope(scope, texts)
    size = _SPAN_SIZE + 6 * items + _length("".join(texts))
    row = (
        rollout_id, attempt_id, number, trace_id, span_id, parent_id, name, code, description, own,
        start_time, end_time, own_context, own_parent, made_by, schema_url, kind, own_scope, flags,
        lists, made_by_lists,
    )  # fmt: skip
    return row, size, _ROW_SIZE + size + _ITEM_SIZE * items


def _plain(attributes: Any, texts: list[str]) -> tuple[dict[str, Any], tuple[str, ...], int]:
    """Return a copy of attributes, the names of list attributes, and the number of values. A large integer counts as
    several values. Adds the texts in them to `texts`."""
    if type(attributes) is not dict:
        raise _OtherValue
    own = cast("dict[str, Any]", attributes).copy()
    if not own:
        return own, (), 0
    lists: list[str] = []
    items = len(own)
    for name, value in own.items():
        kind = type(value)  # pyright: ignore[reportUnknownVariableType] -- of what a span holds
        if type(name) is not str:
            raise _OtherValue
        if kind is str:
            texts.append(value)
        elif kind is list:
            own[name] = value = value.copy()
            kinds = set(map(type, value))
            if kinds == _TEXT:
                texts += value
            elif not kinds <= _NUMBERS:
                raise _OtherValue
            lists.append(name)
            # the version of `marshal` that does not look for equal objects takes a third of the time
            items += max(len(value), len(marshal.dumps(value, 2)) // 6) if int in kinds else len(value)
        elif kind is int:
            items += value.bit_length() // 48
        elif kind not in _NUMBERS:
            raise _OtherValue
    texts += own
    return own, tuple(lists), items


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _context(context: Any, trace_id: str, span_id: str, texts: list[str]) -> tuple[str, str, bool] | bool | None:
    """Return the context of a span as three values, or True if it is the default context with the ids of the span.
    Adds the texts in it to `texts`."""
    if context is None:
        return None
    fields = context.__dict__
    if type(context) is not SpanContext or context.__pydantic_extra__ or fields["trace_state"]:
        raise _OtherValue
    if fields["trace_id"] == trace_id and fields["span_id"] == span_id and fields["is_remote"] is False:
        return True
    values = fields["trace_id"], fields["span_id"], fields["is_remote"]
    if [*map(type, values)] != [str, str, bool]:
        raise _OtherValue
    texts += values[:2]
    return values


def _scope(scope: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    own = scope.copy()
    for name, value in own.items():
        if type(name) is not str or type(value) not in _TEXT_OR_NONE:
            raise _OtherValue
        texts.append(name)
        if value is not None:
            texts.append(value)
    return own


# --- reading -------------------------------------------------------------------------------------------------------

_SPAN, _STATUS, _CONTEXT, _RESOURCE = (set(cls.model_fields) for cls in (Span, TraceStatus, SpanContext, OtelResource))


def _span(row: _Row, copied: bool) -> Span:
    (
        rollout_id, attempt_id, number, trace_id, span_id, parent_id, name, code, description, own,
        start_time, end_time, context, parent, made_by, schema_url, kind, scope, flags, lists, made_by_lists,
    ) = row  # fmt: skip
    if copied:
        own, made_by = own.copy(), made_by.copy()
        scope = None if scope is None else scope.copy()
        for each in lists:
            own[each] = own[each].copy()
        for each in made_by_lists:
            made_by[each] = made_by[each].copy()
    status = new_object(TraceStatus)
    set_fields(status, {"status_code": code, "description": description})
    set_names(status, _STATUS)
    set_extra(status, {})
    set_private(status, None)
    resource = new_object(OtelResource)
    set_fields(resource, {"attributes": made_by, "schema_url": schema_url})
    set_names(resource, _RESOURCE)
    set_extra(resource, None)
    set_private(resource, None)
    span = new_object(Span)
    fields: dict[str, object] = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": number,
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_id": parent_id,
        "name": name,
        "status": status,
        "attributes": own,
        "events": [],
        "links": [],
        "start_time": start_time,
        "end_time": end_time,
        "context": None if context is None else _context_of(context, trace_id, span_id),
        "parent": None if parent is None else _context_of(parent, trace_id, parent_id),
        "resource": resource,
        "kind": kind,
        "scope": scope,
        "dropped": None,
        "flags": flags,
    }
    set_fields(span, fields)
    set_names(span, _SPAN)
    set_extra(span, {})
    set_private(span, None)
    return span


def _context_of(values: tuple[str, str, bool] | bool, trace_id: str, span_id: str) -> SpanContext:
    is_remote = False
    if values is not True:
        trace_id, span_id, is_remote = cast("tuple[str, str, bool]", values)
    context = new_object(SpanContext)
    set_fields(context, {"trace_id": trace_id, "span_id": span_id, "is_remote": is_remote, "trace_state": {}})
    set_names(context, _CONTEXT)
    set_extra(context, {})
    set_private(context, None)
    return context
