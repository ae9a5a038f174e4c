"""Conversion of datasets of all supported kinds into a sequence of tasks.

Lists, arrays, Hugging Face datasets and anything else with a length and items by index are used unchanged. Data frames
become lists of rows. Iterators and generators are read to their end before the run, up to a limit, because algorithms
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
"""Largest number of items to read from an iterator; a longer iterator is rejected."""


def as_dataset(name: str, dataset: Any, *, most: int = MOST_ITEMS) -> Dataset[Any] | None:
    """Return a dataset with a length and items by index; None stays None.

    Raises:
        TypeError: the value is not a dataset; the message lists the accepted types.
        ValueError: an iterator returned no items (it was read before), or more than `most`.
    """
    if dataset is None:
        return None
    if isinstance(dataset, str | bytes):
        raise TypeError(
            f"{name} must be a dataset, such as a list of tasks; got the string {dataset!r}. "
            "To use a store server, pass its address to the Trainer: store='http://...'"
        )
    if isinstance(dataset, Mapping):
        splits = cast("Mapping[Any, Any]", dataset)
        keys = ", ".join(map(repr, itertools.islice(splits, 5)))
        raise TypeError(
            f"{name} must be a sequence of tasks; got a {type(splits).__name__} with the keys {keys}. If it is a "
            f"collection of splits, pass one of them: {name}=splits['train']. If it is a single task, put it in a list"
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
        f"{name} must be a list, a data frame, an iterator, or an object with a length and items by index; got "
        f"{type(cast('object', dataset)).__name__}"
    )


def _read(name: str, items: Iterable[object], most: int) -> list[object]:
    again: Iterator[object] = iter(items)
    rows = list(itertools.islice(again, most))
    if not rows:
        raise ValueError(f"{name} is a {type(items).__name__} without items; a generator can be read only once")
    if len(rows) == most and next(again, _END) is not _END:
        raise ValueError(
            f"{name} is a {type(items).__name__} with more than {most} items, which must all be read before the run. "
            "Pass a part of it, such as list(itertools.islice(tasks, 10_000)), or an object with a length and items by "
            "index"
        )
    logger.info("%s: items read from a %s: %d", name, type(items).__name__, len(rows))
    return rows


_END = object()
