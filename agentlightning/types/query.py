"""Filters, sorting and pages: how a list is asked for and what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NotRequired, TypeVar, overload

from typing_extensions import TypedDict, override

from agentlightning.field_help import Value

T = TypeVar("T")


class FilterField(TypedDict, total=False):
    """Conditions on one field."""

    exact: Any
    """The field has this value."""
    within: Sequence[Any]
    """The field has one of these values."""
    contains: str
    """The field is a text with this in it."""


FilterOptions = Mapping[str, Any]
"""Field name to `FilterField`, and the reserved keys `_aggregate` ("and" or "or") and `_must`."""


class SortOptions(TypedDict):
    """The field to sort by; ascending unless said otherwise."""

    name: str
    """The field to sort by."""
    order: NotRequired[Literal["asc", "desc"]]
    """`asc` if it is not given."""


class PaginatedResult(Value, Generic[T], Sequence[T]):  # pyright: ignore[reportUnsafeMultipleInheritance] -- both are data
    """One page of a list; behaves as the sequence of its items."""

    items: Sequence[T]
    """The items of this page."""
    limit: int
    """Largest number of items asked for; -1 is all."""
    offset: int
    """How many matches come before this page."""
    total: int
    """Matches before paging."""

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
