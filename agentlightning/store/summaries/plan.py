"""SummaryPlan, the filter, order and page of a query for summaries, and the creation of a page from facts in Python."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple, get_args

from pydantic import ValidationError

from agentlightning.errors import BadRequestError
from agentlightning.store.cursors import LARGEST_NUMBER, Place, check_not_both, cursor_behind, place_of
from agentlightning.store.summaries.facts import Facts, searched, summary_of, task_text
from agentlightning.types import RolloutFilter, RolloutSummary, SummaryPage, SummarySort
from agentlightning.types.mode import meant
from agentlightning.types.summaries import AnySummarySort

SORTS: Final[tuple[str, ...]] = get_args(SummarySort)
LARGEST_PAGE: Final = 1000


class Input:
    """The input of a rollout as text."""

    __slots__ = ("_preview", "_searched")

    def __init__(self, preview: str = "", searched: str = "") -> None:
        self._preview, self._searched = preview, searched

    def searched(self) -> str:
        """Return the searched part, in a form for case-insensitive search."""
        return self._searched

    def preview(self) -> str:
        """Return the part that a summary shows."""
        return self._preview


class Entry(NamedTuple):
    """One rollout as the input of a page in Python."""

    facts: Facts
    place: int | str
    """Position among rollouts with the same sort value; unique."""
    spans: int
    input: Input


@dataclass(frozen=True, slots=True)
class SummaryPlan:
    """The filter, order and page of a query for summaries. Summaries without the sort value are last in both
    directions. Summaries with the same value are in the order of their positions, in the direction of the page."""

    chosen: RolloutFilter = field(default_factory=RolloutFilter)
    sort_by: str = "start_time"
    descending: bool = True
    limit: int = 100
    offset: int = 0
    after: Place | None = None
    """The position after which the page begins."""

    @classmethod
    def of(
        cls, chosen: RolloutFilter | None, sort_by: str, sort_order: str, limit: int, offset: int, cursor: str | None,
        places: type[int] | type[str] = int,
    ) -> SummaryPlan:  # fmt: skip
        """Return the plan of a call. `places` is the type of positions in the store.

        Raises:
            BadRequestError: an argument is wrong, or the cursor belongs to another order.
        """
        sort_by = meant(AnySummarySort, sort_by)
        if sort_by not in SORTS:
            raise BadRequestError(f"Summaries cannot be sorted by {sort_by!r}; expected one of {', '.join(SORTS)}")
        if sort_order not in ("asc", "desc"):
            raise BadRequestError(f"Unsupported sort order {sort_order!r}; expected 'asc' or 'desc'")
        if type(limit) is not int or not 1 <= limit <= LARGEST_PAGE:
            raise BadRequestError(f"limit must be from 1 to {LARGEST_PAGE}; got {limit!r}")
        if type(offset) is not int or not 0 <= offset <= LARGEST_NUMBER:
            raise BadRequestError(f"offset must be an integer of at least 0; got {offset!r}")
        check_not_both(cursor, offset)
        after = None
        if cursor is not None:
            after, _ = place_of(cursor, sort_by, sort_order, texts=sort_by == "status", places=places)
        return cls(filter_of(chosen), sort_by, sort_order == "desc", limit, offset, after)

    def cursor(self, place: Place) -> str:
        """Return the cursor after a rollout."""
        return cursor_behind(self.sort_by, self.descending, place)

    def page(self, matches: list[tuple[RolloutSummary, Place]], total: int) -> SummaryPage:
        """Return the page with these matches. If another page follows, there is one match more than the limit."""
        more, matches = len(matches) > self.limit, matches[: self.limit]
        return SummaryPage.model_construct(
            items=[summary for summary, _ in matches],
            limit=self.limit,
            offset=self.offset,
            total=total,
            cursor=self.cursor(matches[-1][1]) if more else None,
        )


def filter_of(chosen: RolloutFilter | dict[str, Any] | None) -> RolloutFilter:
    """Return a validated filter.

    Raises:
        BadRequestError: a value has the wrong type, or a field does not exist.
    """
    if chosen is None:
        return RolloutFilter()
    try:
        return RolloutFilter.model_validate(chosen.model_dump() if isinstance(chosen, RolloutFilter) else chosen)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        got = repr(first["input"])[:100]
        raise BadRequestError(
            f"filter{place and f'.{place}'} has a wrong value: {first['msg'][:300]}; got {got}. The fields are: "
            f"{', '.join(RolloutFilter.model_fields)}"
        ) from None


def tests_of(chosen: RolloutFilter) -> list[tuple[str, str, Any]]:
    """Return a filter as tests (column of the facts, name in `_TESTS`, operand), without the test of the input."""
    tests: list[tuple[str, str, Any]] = [
        *((name, "in", getattr(chosen, f"{name}_in")) for name in ("status", "mode", "outcome", "rollout_id")),
        *((name, "=", getattr(chosen, name)) for name in ("outcome_reason", "worker_id", "resources_id")),
        ("resources_version", "=", chosen.resources_version),
        ("task", "=", None if chosen.task is None else task_text(chosen.task)),
        *((name, ">=", getattr(chosen, f"{name}_from")) for name in ("step", "reward")),
        *((name, "<=", getattr(chosen, f"{name}_to")) for name in ("step", "reward")),
        ("reward", "is given", chosen.has_reward),
        ("start_time", ">=", chosen.started_after),
        ("start_time", "<", chosen.started_before),
        ("rollout_id", "contains", chosen.rollout_id_contains or None),
    ]
    of_run = [("run_id", "in", [chosen.run_id or None])] if "run_id" in chosen.model_fields_set else []
    return [*of_run, *(test for test in tests if test[2] is not None)]


# --- in Python -----------------------------------------------------------------------------------------------------


def _values(entries: list[Entry], sort_by: str) -> list[Any]:
    """Return the sort value of each entry."""
    if sort_by == "spans":
        return [entry[2] for entry in entries]
    if sort_by != "duration":
        column = Facts._fields.index(sort_by)
        return [entry[0][column] for entry in entries]
    begin, end = Facts._fields.index("start_time"), Facts._fields.index("end_time")
    ends: list[tuple[float, float | None]] = [(entry[0][begin], entry[0][end]) for entry in entries]  # pyright: ignore[reportAssignmentType]
    return [None if ended is None else ended - started for started, ended in ends]


def matching(entries: Iterable[Entry], chosen: RolloutFilter) -> list[Entry]:
    """Return the entries that match a filter."""
    matches = list(entries)
    for column, test, operand in tests_of(chosen):
        place, passes = Facts._fields.index(column), _TESTS[test]
        operand = frozenset(operand) if test == "in" else operand
        matches = [entry for entry in matches if passes(entry[0][place], operand)]
    if chosen.input_contains:
        text = searched(chosen.input_contains)
        matches = [entry for entry in matches if text in entry[3].searched()]
    return matches


_TESTS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "in": lambda value, values: value in values,
    "=": operator.eq,
    "<": operator.lt,
    ">=": lambda value, bound: value is not None and value >= bound,
    "<=": lambda value, bound: value is not None and value <= bound,
    "contains": operator.contains,
    "is given": lambda value, given: (value is not None) == given,
}


def page_of_entries(entries: Iterable[Entry], plan: SummaryPlan) -> SummaryPage:
    """Return the page of a plan from all rollouts."""
    matches = matching(entries, plan.chosen)
    total = len(matches)
    values = _values(matches, plan.sort_by)
    ranked = [(value, entry[1], entry) for value, entry in zip(values, matches, strict=True) if value is not None]
    unranked = [(None, entry[1], entry) for value, entry in zip(values, matches, strict=True) if value is None]
    if plan.after is not None:
        ranked, unranked = _behind(plan, ranked), _behind(plan, unranked)
    end = plan.offset + plan.limit + 1
    page: list[_Ranked] = _first(ranked, end, plan.descending)
    if len(page) < end:
        unranked.sort(key=itemgetter(1), reverse=plan.descending)
        page += unranked[: end - len(page)]
    page = page[plan.offset :]
    return plan.page([(summary_of(e.facts, e.spans, e.input.preview()), (value, at)) for value, at, e in page], total)


_Ranked = tuple[Any, int | str, Entry]
"""Value, position, entry. Positions are unique, so entries are never compared."""


def _behind(plan: SummaryPlan, entries: list[_Ranked]) -> list[_Ranked]:
    """Return the entries after the position where the page begins. Either all of them have a value, or none."""
    after: Any = plan.after
    if not entries or (entries[0][0] is None) != (after[0] is None):
        return entries if entries and entries[0][0] is None else []
    begin = 1 if after[0] is None else 0
    if plan.descending:
        return [each for each in entries if each[begin:2] < after[begin:]]
    return [each for each in entries if each[begin:2] > after[begin:]]


def _first(entries: list[_Ranked], count: int, descending: bool) -> list[_Ranked]:
    """Return the first `count` entries in order."""
    if 8 * count < len(entries):
        return (heapq.nlargest if descending else heapq.nsmallest)(count, entries)
    return sorted(entries, reverse=descending)[:count]
