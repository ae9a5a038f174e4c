"""Filters, sorting and pages as values: their two ways to be written, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from agentlightning.types import FilterField, FilterOptions, SortOptions


def field(**fields: Any) -> FilterField:
    return FilterField(**fields)


def sort(**fields: Any) -> SortOptions:
    return SortOptions(**fields)


def options(**fields: Any) -> FilterOptions:
    return FilterOptions(**fields)


def test_filters_are_the_arguments_of_a_query() -> None:
    filters = options(
        fields=[
            field(name="status", operator="in", value=["failed"]),
            {"name": "rollout_id", "operator": "contains", "value": "ro-"},
            field(name="run_id", value=None),
        ],
        sort={"field": "end_time", "direction": "desc"},
        filter_logic="or",
        offset=10,
        limit=50,
    )
    assert dict(**filters) == {
        "status_in": ["failed"],
        "rollout_id_contains": "ro-",
        "run_id": None,
        "filter_logic": "or",
        "sort_by": "end_time",
        "sort_order": "desc",
        "offset": 10,
        "limit": 50,
    }
    assert dict(**options()) == {"offset": 0, "limit": -1}


def test_a_sort_has_two_words_for_each_of_its_fields() -> None:
    assert sort(name="end_time", order="desc") == sort(field="end_time", direction="desc")
    assert sort(field="end_time").order == "asc"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: field(name="status", operator="eq", value="done"), "'succeeded', 'cancelled'.*use 'succeeded'"),
        (lambda: field(name="status", operator="in", value=["failed", "Queued"]), "'Queued'.*use 'queuing'"),
        (lambda: field(name="status", value=["failed"]), r"Unknown status \['failed'\]; expected one of 'queuing'"),
        (lambda: field(name="status", value="lost"), "Unknown status 'lost'; expected one of 'queuing'.*'requeuing'"),
        (lambda: field(name="status", operator="in", value="failed"), "the value must be a list; got 'failed'"),
        (lambda: field(name="status", operator="gt", value="failed"), "'eq', 'in' or 'contains'"),
        (
            lambda: field(name="status", operator="contains", value="fail"),
            "by 'status' with 'contains'; expected one of",
        ),
        (lambda: field(name="reward", value=1.0), "by 'reward' with 'eq'; expected one of: .*status eq, status in"),
        (lambda: field(nam="status", value="failed"), "nam\n.*not permitted"),
        (lambda: field(name="status"), "value\n.*Field required"),
        (lambda: sort(name="a", order="down"), "'asc' or 'desc'"),
        (lambda: sort(name="a", fild="b"), "fild\n.*not permitted"),
        (lambda: sort(order="asc"), "name\n.*Field required"),
        (lambda: options(where=1), "where\n.*not permitted"),
        (lambda: options(offset=-1), "offset\n.*greater than or equal to 0"),
        (lambda: options(fields=[field(name="status", value="failed")] * 2), "status_in has two conditions"),
    ],
)
def test_what_no_query_knows_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        make()
