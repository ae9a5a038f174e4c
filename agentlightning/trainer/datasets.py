"""Conversion of datasets of all supported kinds into a sequence of tasks.

Lists, arrays, Hugging Face datasets and anything else with a length and items by index are used unchanged. Data frames
become their rows. Iterators and generators are read to their end before the run, up to a limit, because algorithms
shuffle, repeat and count tasks. No library is imported; kinds are recognised by their methods.
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
"""Largest number of items that are read from an iterator; a longer one counts as endless."""


def as_dataset(name: str, dataset: Any, *, most: int = MOST_ITEMS) -> Dataset[Any] | None:
    """Return a dataset with a length and items by index; None stays None.

    Raises:
        TypeError: the value is no dataset; lists what is accepted.
        ValueError: an iterator returned nothing (it was read before), or more than `most` items.
    """
    if dataset is None:
        return None
    if isinstance(dataset, str | bytes):
        raise TypeError(
            f"{name} must be a dataset (a list will do); got the text {dataset!r}. "
            "An address of a server is not a dataset: give the Trainer store='http://...'"
        )
    if isinstance(dataset, Mapping):
        splits = cast("Mapping[Any, Any]", dataset)
        keys = ", ".join(map(repr, itertools.islice(splits, 5)))
        raise TypeError(
            f"{name} must be a sequence of tasks; got a {type(splits).__name__} with the keys {keys}. Of a collection "
            f"of splits give one of them: {name}=splits['train']; a single task goes into a list"
        )
    if hasattr(dataset, "columns") and hasattr(dataset, "to_dict") and hasattr(dataset, "iloc"):  # a pandas frame
        return cast("list[Any]", dataset.to_dict("records"))
    if hasattr(dataset, "to_dicts"):  # a polars frame
        return cast("list[Any]", dataset.to_dicts())
    if hasattr(dataset, "to_pylist"):  # an Arrow table
        return cast("list[Any]", dataset.to_pylist())
    if hasattr(dataset, "iloc"):  # a pandas series: its index may differ from the position
        return list(cast("Iterable[Any]", dataset))
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return cast("Dataset[Any]", dataset)
    if isinstance(dataset, Iterable) and not isinstance(dataset, AbstractSet):
        return _read(name, cast("Iterable[Any]", dataset), most)
    raise TypeError(
        f"{name} must be a list, a data frame, an iterator, or anything with a length and items by index; got "
        f"{type(cast('object', dataset)).__name__}"
    )


def _read(name: str, items: Iterable[object], most: int) -> list[object]:
    again: Iterator[object] = iter(items)
    rows = list(itertools.islice(again, most))
    if not rows:
        raise ValueError(f"{name} is a {type(items).__name__} that gave no items; a generator can be read only once")
    if len(rows) == most and next(again, _END) is not _END:
        raise ValueError(
            f"{name} is a {type(items).__name__} with more than {most} items, and is read whole before the run. Give a "
            "part of it, such as list(itertools.islice(tasks, 10_000)), or something with a length and items by index"
        )
    logger.info("%s: items read: %d, from a %s", name, len(rows), type(items).__name__)
    return rows


_END = object()
