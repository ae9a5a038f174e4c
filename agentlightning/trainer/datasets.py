"""What may be given as a dataset, and the sequence of tasks that it becomes.

Lists, arrays, Hugging Face datasets and whatever else has a length and items by index are used as they are. Data
frames become their rows. Iterators and generators are read to their end before the run, up to a bound: algorithms
shuffle, repeat and count tasks. No library is imported for any of them; they are known by what they can do.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, cast

from agentlightning.types import Dataset

logger = logging.getLogger(__name__)

MOST_ITEMS = 1_000_000
"""Items that are read out of an iterator; one with more is taken for endless."""


def as_dataset(name: str, given: Any, *, most: int = MOST_ITEMS) -> Dataset[Any] | None:
    """Return a dataset with a length and items by index; None stays None.

    Raises:
        TypeError: it is nothing of the kind; says what would be.
        ValueError: an iterator gave nothing (it was read before), or more than `most` items.
    """
    if given is None:
        return None
    if isinstance(given, str | bytes):
        raise TypeError(
            f"{name} must be a dataset (a list will do); got the text {given!r}. "
            "An address of a server is not a dataset: give the Trainer store='http://...'"
        )
    if isinstance(given, Mapping):
        splits = cast("Mapping[Any, Any]", given)
        keys = ", ".join(map(repr, itertools.islice(splits, 5)))
        raise TypeError(
            f"{name} must be a sequence of tasks; got a {type(splits).__name__} with the keys {keys}. Of a collection "
            f"of splits give one of them: {name}=splits['train']; a single task goes into a list"
        )
    if hasattr(given, "columns") and hasattr(given, "to_dict") and hasattr(given, "iloc"):  # a pandas frame
        return cast("list[Any]", given.to_dict("records"))
    if hasattr(given, "to_dicts"):  # a polars frame
        return cast("list[Any]", given.to_dicts())
    if hasattr(given, "to_pylist"):  # an Arrow table
        return cast("list[Any]", given.to_pylist())
    if hasattr(given, "iloc"):  # a pandas series: its index need not be the position
        return list(cast("Iterable[Any]", given))
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return cast("Dataset[Any]", given)
    if isinstance(given, Iterable) and not isinstance(given, AbstractSet):
        return _read(name, cast("Iterable[Any]", given), most)
    raise TypeError(
        f"{name} must be a list, a data frame, an iterator, or anything with a length and items by index; got "
        f"{type(cast('object', given)).__name__}"
    )


def _read(name: str, items: Iterable[object], most: int) -> list[object]:
    again: Iterator[object] = iter(items)
    found = list(itertools.islice(again, most))
    if not found:
        raise ValueError(f"{name} is a {type(items).__name__} that gave no items; a generator can be read only once")
    if len(found) == most and next(again, _END) is not _END:
        raise ValueError(
            f"{name} is a {type(items).__name__} with more than {most} items, and is read whole before the run. Give a "
            "part of it, such as list(itertools.islice(tasks, 10_000)), or something with a length and items by index"
        )
    logger.info("%s: %d items read from a %s", name, len(found), type(items).__name__)
    return found


_END = object()
