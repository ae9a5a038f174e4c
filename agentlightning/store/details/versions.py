"""Versions of a set of resources, a page at a time, without the keys of model servers."""

from __future__ import annotations

from agentlightning.errors import BadRequestError
from agentlightning.types import LLM, ResourcesUpdate


def page_of_versions(newest: int, sort_order: str, limit: int, offset: int) -> list[int]:
    """Return the numbers of a page of the versions 1 to `newest`.

    Raises:
        BadRequestError: an argument is out of its range.
    """
    if sort_order not in ("asc", "desc"):
        raise BadRequestError(f"Unsupported sort order {sort_order!r}; expected 'asc' or 'desc'")
    if not 1 <= limit <= 1000:
        raise BadRequestError(f"limit must be from 1 to 1000; got {limit}")
    if offset < 0:
        raise BadRequestError(f"offset must be 0 or more; got {offset}")
    numbers = range(1, newest + 1) if sort_order == "asc" else range(newest, 0, -1)
    return list(numbers[offset : offset + limit])


def without_keys(update: ResourcesUpdate) -> ResourcesUpdate:
    """Return a copy whose API keys are null."""
    copied = update.model_copy(deep=True)
    for resource in copied.resources.values():
        if isinstance(resource, LLM):
            resource.api_key = None
    return copied
