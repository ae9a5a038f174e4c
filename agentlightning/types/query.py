"""Filters, sorting and pages of lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, Self, TypeVar, cast, get_args, overload

from pydantic import AliasChoices, ConfigDict, Field, model_validator
from typing_extensions import override

from agentlightning.base.field_help import Value
from agentlightning.errors import BadRequestError
from agentlightning.types.core import AnyRolloutStatus, AnyWorkerStatus, RolloutStatus, WorkerStatus
from agentlightning.types.mode import meant

T = TypeVar("T")


Operator = Literal["eq", "in", "contains"]
"""`eq`: the field has this value; `in`: it has one of these values; `contains`: its text contains this text."""

_TEXTS = ("trace_id", "span_id", "parent_id", "name", "resources_id")
_ARGUMENTS: dict[tuple[str, Operator], str] = {
    **{(name, "eq"): name for name in (*_TEXTS, "run_id")},
    **{(name, "contains"): f"{name}_contains" for name in (*_TEXTS, "rollout_id", "worker_id")},
    **{(name, operator): f"{name}_in" for name in ("status", "rollout_id") for operator in ("eq", "in")},
}
"""Argument of a store's query for each field that a query can filter by, by operator."""
_STATUSES = (*get_args(RolloutStatus), *get_args(WorkerStatus))  # a tuple, since the value may be unhashable
_MEANT: dict[str, str] = {
    "queued": "queuing",
    "enqueued": "queuing",
    "in_progress": "running",
    "finished": "succeeded",
    "success": "succeeded",
    "succeed": "succeeded",
    "done": "succeeded",
    "error": "failed",
    "canceled": "cancelled",
}
"""Words that are often used for a status, and the status that each one means."""


def status_hint(word: object) -> str:
    """Return a hint for a word that is not a status, to append to a message; empty if the word is unknown."""
    meant = _MEANT.get(word.lower()) if isinstance(word, str) else None
    return f"; use {meant!r}" if meant else ""


class FilterField(Value):
    """A condition on one field."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """Name of the field, such as `status`."""
    operator: Operator = "eq"
    """Comparison operator."""
    value: Any
    """Value to compare with; a list for `in`."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> Self:
        if (self.name, self.operator) not in _ARGUMENTS:
            filters = ", ".join(f"{name} {operator}" for name, operator in sorted(_ARGUMENTS))
            raise BadRequestError(f"Cannot filter by {self.name!r} with {self.operator!r}; expected one of: {filters}")
        if self.operator == "in" and (isinstance(self.value, str) or not isinstance(self.value, Sequence)):
            raise BadRequestError(f"{self.name} in: the value must be a list; got {self.value!r}")
        values = cast("Sequence[object]", self.value) if self.operator == "in" else [cast("object", self.value)]
        for value in values if self.name == "status" else ():
            if meant(AnyWorkerStatus, meant(AnyRolloutStatus, value)) not in _STATUSES:
                statuses = ", ".join(map(repr, get_args(RolloutStatus)))
                raise BadRequestError(f"Unknown status {value!r}; expected one of {statuses}{status_hint(value)}")
        return self


class SortOptions(Value):
    """The field and direction of a sort. `field` and `direction` are aliases of its arguments."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(validation_alias=AliasChoices("name", "field"))
    """Name of the field to sort by."""
    order: Literal["asc", "desc"] = Field(default="asc", validation_alias=AliasChoices("order", "direction"))
    """`asc` (ascending) or `desc` (descending)."""


class FilterOptions(Value):
    """Filters, order and page of a query of a store: `await store.query_rollouts(**filters)`.

    Unpack it into the arguments of a query, or pass it unchanged to `store.list_rollouts(filters)`. The query raises
    `TypeError` for a filter that it does not have, and `BadRequestError` for a field that it cannot sort by.
    """

    model_config = ConfigDict(extra="forbid")

    fields: Sequence[FilterField] = ()  # pyright: ignore[reportIncompatibleMethodOverride] -- a deprecated name of pydantic
    """Conditions on fields."""
    filter_logic: Literal["and", "or"] = "and"
    """`and`: all conditions must hold; `or`: at least one."""
    sort: SortOptions | None = None
    """Order of the items; None for the default of the query."""
    offset: int = Field(default=0, ge=0)
    """Number of matches to skip before the page."""
    limit: int = Field(default=-1, ge=-1)
    """Largest number of items; -1 for all."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        names = [_ARGUMENTS[field.name, field.operator] for field in self.fields]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadRequestError(f"{', '.join(twice)} has two conditions; combine the values with operator='in'")
        return self

    def keys(self) -> Sequence[str]:
        """Return the names of the arguments."""
        return tuple(self._arguments())

    def __getitem__(self, name: str) -> Any:
        return self._arguments()[name]

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for field in self.fields:
            argument = _ARGUMENTS[field.name, field.operator]
            arguments[argument] = [field.value] if argument.endswith("_in") and field.operator == "eq" else field.value
        if self.filter_logic != "and":
            arguments["filter_logic"] = self.filter_logic
        if self.sort is not None:
            arguments |= {"sort_by": self.sort.name, "sort_order": self.sort.order}
        return {**arguments, "offset": self.offset, "limit": self.limit}


class PaginatedResult(Value, Generic[T], Sequence[T]):  # pyright: ignore[reportUnsafeMultipleInheritance] -- both are data
    """One page of a list. It behaves like the sequence of its items."""

    items: Sequence[T]
    """Items of this page."""
    limit: int
    """Largest number of items requested; -1 for all."""
    offset: int
    """Number of matches before this page."""
    total: int
    """Number of matches on all pages. For a page after a cursor: the number at the time of the first page."""
    cursor: str | None = None
    """Cursor of the next page; None on the last page and for a list without cursors."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    @override
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.items[index]

    @override
    def __len__(self) -> int:
        return len(self.items)

    @override
    def __iter__(self) -> Iterator[T]:  # pyright: ignore[reportIncompatibleMethodOverride] -- items, not fields
        return iter(self.items)

    @override
    def __contains__(self, value: object) -> bool:
        return value in self.items

    @override
    def __repr__(self) -> str:
        end = "" if self.limit == -1 else str(self.offset + self.limit)
        if not self.items:
            tail = "empty"
        elif len(self.items) == 1:
            tail = repr(self.items[0])
        else:
            tail = f"[{self.items[0]!r}, ...]"
        return f"<PaginatedResult ({self.offset}:{end} of {self.total}) {tail}>"


AnyPage = PaginatedResult[Any]
"""A page of any items. Kept here because pydantic discards unused generated classes, and generating one takes 10 ms."""
