"""Cursors and iteration over pages. A cursor is the position in a sorted list after which the next page begins."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from agentlightning.errors import BadRequestError
from agentlightning.types import PaginatedResult

Place = tuple[Any, Any]
"""The sort value of an item (or None), and its position among items with the same value: its number in the order of
insertion, or its id in a store without such numbers."""
T = TypeVar("T")
PAGE = 500
"""Number of items that are read in one query."""
LARGEST_NUMBER = 2**53
"""Largest integer that every JSON parser reads exactly."""


def cursor_behind(sort_by: str | None, descending: bool, place: Place, *more: int) -> str:
    """Return the cursor after a position in this order, with `more` numbers to store in it."""
    text = json.dumps([sort_by, "desc" if descending else "asc", *place, *more], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def place_of(
    cursor: str,
    sort_by: str | None,
    sort_order: str,
    *,
    texts: bool,
    places: type[int] | type[str] = int,
    more: int = 0,
) -> tuple[Place, list[int]]:
    """Return the position of a cursor, and the `more` additional numbers in it.

    `texts`: the sort values are texts, not numbers.

    Raises:
        BadRequestError: the text is not a cursor, or is a cursor of another order.
    """
    try:
        sorted_by, order, value, place, *numbers = json.loads(
            base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4))
        )
    except (ValueError, TypeError, RecursionError):
        raise _no_cursor(cursor) from None
    if order in ("asc", "desc") and (sorted_by, order) != (sort_by, sort_order):
        raise BadRequestError(
            f"The cursor belongs to a list sorted by {sorted_by!r} {order!r}, but this list is sorted by {sort_by!r} "
            f"{sort_order!r}. Start again without a cursor."
        )
    right = type(value) in ((str,) if texts else (int, float)) and (texts or abs(value) <= LARGEST_NUMBER)
    right = (right or value is None) and type(place) is places and len(numbers) == more
    if not right or (isinstance(place, int) and abs(place) >= 2**63):
        raise _no_cursor(cursor)
    if any(type(number) is not int or not 0 <= number <= LARGEST_NUMBER for number in numbers):
        raise _no_cursor(cursor)
    return (value, place), numbers


def _no_cursor(text: str) -> BadRequestError:
    return BadRequestError(f"{text[:60]!r} is not a cursor of this store; use the cursor of an earlier page")


def check_not_both(cursor: str | None, offset: int) -> None:
    """Check that a page has a cursor or an offset, not both.

    Raises:
        BadRequestError: it has both.
    """
    if cursor is not None and offset:
        raise BadRequestError(f"Pass a cursor or an offset, not both; got offset={offset}")


async def pages_of(
    query: Callable[..., Awaitable[PaginatedResult[T]]],
    *,
    limit: int | None = None,
    cursor: str | None = None,
    **filters: Any,
) -> AsyncGenerator[PaginatedResult[T]]:
    """Yield the pages of a list, for example of `store.query_rollouts`. The first page can be empty.

    With cursors, no item is skipped or read twice while the store changes. A store without cursors is read by offsets.
    """
    where: dict[str, Any] = {} if cursor is None else {"cursor": cursor}
    while True:
        page = await query(**filters, limit=PAGE if limit is None else limit, **where)
        yield page
        if page.cursor is not None:
            where = {"cursor": page.cursor}
            continue
        read = where.get("offset", 0) + len(page.items)
        if "cursor" in where or not page.items or read >= page.total:
            return
        where = {"offset": read}
