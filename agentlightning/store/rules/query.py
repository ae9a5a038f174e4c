"""Filters, sorting and pages: on Python values, and as a plan that a backend converts to its own query."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from agentlightning.errors import BadRequestError
from agentlightning.store.cursors import Place
from agentlightning.types import RecordKind, Rollout, RunRecord
from agentlightning.types.core import AnyRolloutStatus
from agentlightning.types.mode import meant
from agentlightning.types.query import status_hint

M = TypeVar("M", bound=BaseModel)
_ALL = 2**31 - 1
PAGE_BYTES = 16 << 20
"""Size in bytes at which a page of records ends early. It is below the limit of a request or a response."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The filter, order and page of a query for rollouts."""

    status_in: Sequence[str] | None = None
    ids: Sequence[str] | None = None
    id_contains: str | None = None
    any_of: bool = False
    """Combine the three filters above with `or`."""
    run_id: tuple[str | None] | None = None
    """A tuple with the run; None for all runs."""
    ended_before: float | None = None
    """Only rollouts with an earlier `end_time`."""
    sort_by: str | None = None
    descending: bool = False
    limit: int = -1
    offset: int = 0
    after: Place | None = None
    """The position after which the page begins."""
    total: int | None = None
    """Number of matching rollouts, if known. Counting them can take longer than reading the page."""
    _chosen: frozenset[str] = field(default=frozenset(), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sort_by", check_page(Rollout, self.sort_by, self.limit, self.offset))
        object.__setattr__(self, "status_in", check_choices("status_in", self.status_in, AnyRolloutStatus))
        if isinstance(self.ids, str):
            raise BadRequestError(f"rollout_id_in must be a list of ids; got the string {self.ids!r}")
        object.__setattr__(self, "_chosen", frozenset(self.ids or ()))

    @property
    def one_more(self) -> int:
        """Number of rollouts to read: the page and one more, to detect a next page; -1 for all."""
        return -1 if self.limit == -1 else self.limit + 1

    def matches(self, rollout: Rollout) -> bool:
        """Return True if the rollout matches the filters."""
        if self.run_id is not None and rollout.run_id != self.run_id[0]:
            return False
        if self.ended_before is not None and (rollout.end_time is None or rollout.end_time >= self.ended_before):
            return False
        tests = self.tests(rollout)
        if not tests:
            return True
        return any(tests) if self.any_of else all(tests)

    def tests(self, rollout: Rollout) -> list[bool]:
        """Return the result of each filter that is set."""
        results: list[bool] = []
        if self.status_in is not None:
            results.append(rollout.status in self.status_in)
        if self.ids is not None:
            results.append(rollout.rollout_id in self._chosen)
        if self.id_contains is not None:
            results.append(self.id_contains in rollout.rollout_id)
        return results


@lru_cache(maxsize=32)
def sortable_fields(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields by which a list of `model` can be sorted (texts and numbers), in the order of declaration."""
    return tuple(name for name, field in model.model_fields.items() if _has_an_order(field.annotation))


def has_texts(model: type[BaseModel], sort_by: str | None) -> bool:
    """Return True if a sortable field of `model` contains texts, not numbers."""
    return sort_by is not None and _is_text(model.model_fields[sort_by].annotation)


def _is_text(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(map(_is_text, get_args(kind)))
    if get_origin(kind) is Annotated:
        return _is_text(get_args(kind)[0])
    return kind is str or get_origin(kind) is Literal


def _has_an_order(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return all(map(_has_an_order, get_args(kind)))
    return get_origin(kind) in (Annotated, Literal) or kind in (str, int, float, type(None))


class FoundRecords(NamedTuple):
    """One page of the records of a run."""

    bodies: list[bytes | str]
    total: int
    """The number of records that match."""
    last: tuple[int, int] | None
    """The step and the number of the last record on the page; None on the last page."""


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """The filter, order and page of a query for records of a run."""

    run_id: str
    kind_in: Sequence[str] | None = None
    step_from: int | None = None
    step_to: int | None = None
    name: str | None = None
    descending: bool = False
    limit: int = -1
    offset: int = 0
    total: int | None = None
    """The number of records that match, if the run's row or a cursor has it. Counting takes longer than reading."""
    after: tuple[int, int] | None = None
    """The step and the number of the record after which the page begins."""

    def __post_init__(self) -> None:
        check_page(RunRecord, None, self.limit, self.offset)
        check_choices("kind_in", self.kind_in, RecordKind)

    def window(self, total: int) -> tuple[int, int, bool]:
        """Return the numbers of matches to skip and to take, and whether to read from the end. The nearer end is used,
        so that the last page is as fast as the first."""
        if self.after is not None:  # one more than requested, which shows that there is another page
            return 0, _ALL if self.limit == -1 else self.limit + 1, self.descending
        remaining = max(0, total - self.offset)
        count = remaining if self.limit == -1 else min(self.limit, remaining)
        behind = remaining - count
        return (behind, count, not self.descending) if behind < self.offset else (self.offset, count, self.descending)

    def cut(self, sizes: Iterable[int]) -> int:
        """Return the number of records with these sizes that fit on a page. A page ends early if they take more than
        `PAGE_BYTES`, but has at least one record."""
        if self.limit == -1:
            return len(list(sizes))
        count = total = 0
        for size in itertools.islice(sizes, self.limit):
            total += size
            if count and total > PAGE_BYTES:
                break
            count += 1
        return count

    def ends_at(self, places: Sequence[tuple[int, int]], length: int, total: int) -> tuple[int, int] | None:
        """Return the position of the last record on a page with `length` records; None on the last page."""
        more = len(places) > length if self.after is not None else self.offset + length < total
        return places[length - 1] if length and more and self.limit != -1 else None


def check_choices(name: str, chosen: Sequence[str] | None, known: object) -> list[str] | None:
    """Return the values of a filter for a list of values of a `Literal`, with aliases replaced.

    Raises:
        BadRequestError: it is not a list, or contains an unknown value.
    """
    words = get_args(get_args(known)[0] if get_origin(known) is Annotated else known)
    if isinstance(chosen, str):
        raise BadRequestError(f"{name} must be a list of {', '.join(words)}; got the string {chosen!r}")
    meanings = None if chosen is None else [meant(known, word) for word in chosen]
    for word in meanings or ():
        if word not in words:
            raise BadRequestError(f"{name} contains {word!r}; expected any of {', '.join(words)}{status_hint(word)}")
    return meanings


def check_page(model: type[BaseModel], sort_by: str | None, limit: int, offset: int) -> str | None:
    """Check the arguments of a list and return the field to sort by. `create_time` is an alias of `start_time`.

    Raises:
        BadRequestError: the field is unknown or cannot be sorted, the limit is below -1, or the offset is negative.
    """
    allowed = sortable_fields(model)
    if sort_by == "create_time" and sort_by not in allowed and "start_time" in allowed:
        sort_by = "start_time"
    if sort_by is not None and sort_by not in allowed:
        problem = "cannot be ordered" if sort_by in model.model_fields else "field does not exist"
        raise BadRequestError(
            f"Failed to sort items by {sort_by!r}: {problem} on {model.__name__}. "
            f"Invalid sort_by: {sort_by}, allowed fields are: {', '.join(allowed)}"
        )
    if limit < -1:
        raise BadRequestError(f"Limit must be greater than 0 or -1 for no limit; got {limit}")
    if offset < 0:
        raise BadRequestError(f"Offset must be greater than or equal to 0; got {offset}")
    return sort_by


def page_of(items: Iterable[M], sort_by: str | None, descending: bool, limit: int, offset: int) -> tuple[list[M], int]:
    """Sort items; return the page and the number of all items. Items with the same value keep their order."""
    matches = list(items)
    if sort_by is not None:
        matches.sort(key=lambda item: rank(sort_by, getattr(item, sort_by)), reverse=descending)
    end = None if limit == -1 else offset + limit
    return matches[offset:end], len(matches)


def rank(sort_by: str, value: Any) -> tuple[bool, Any]:
    """Return the sort key of an item with this value. A null time is last; other nulls are first."""
    null_is_last = sort_by.endswith("_time")
    return (null_is_last, 0) if value is None else (not null_is_last, value)


def read_cursor(text: str, last: int) -> int:
    """Return the number in a cursor; `last` is the number of the store's last change.

    Raises:
        BadRequestError: it is not a cursor, or belongs to another store (or to this one before its data was lost).
    """
    cursor = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= cursor <= last:
        raise BadRequestError(
            f"{text[:40]!r} is not a cursor of this store. Use the cursor of an earlier page, None to start now, "
            "or '0' to start at the beginning."
        )
    return cursor


def text_filter(exact: str | None, contains: str | None, value: str | None) -> list[bool]:
    """Return the results of the text filters that are set. `contains` is case-sensitive."""
    results: list[bool] = []
    if exact is not None:
        results.append(value == exact)
    if contains is not None:
        results.append(value is not None and contains in value)
    return results


def combine(results: list[bool], logic: str) -> bool:
    """Combine filter results. Without filters, everything matches.

    Raises:
        BadRequestError: `logic` is neither "and" nor "or".
    """
    if logic not in ("and", "or"):
        raise BadRequestError(f"Unsupported filter aggregate {logic!r}; expected 'and' or 'or'")
    if not results:
        return True
    return all(results) if logic == "and" else any(results)
