"""Conversion of datasets of all supported kinds into a sequence of tasks, and of files into lists of tasks.

Lists, arrays, Hugging Face datasets and anything else with a length and items by index are used unchanged. Data frames
become lists of rows. Iterators and generators are read to their end before the run, up to a limit, because algorithms
shuffle, repeat and count tasks. No library is imported; kinds are recognised by their methods.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

from agentlightning.errors import BadRequestError
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


def read_tasks(name: str, file: str | Path, *, other: str = "") -> Any:
    """Return the content of a `.json` file, or the tasks of a `.jsonl` or `.parquet` file, or of a folder of `.parquet`
    files in the order of their names. `other` are further kinds of values, for the error message.

    Raises:
        BadRequestError: the file does not exist or is damaged; the message has the number of the line.
        ImportError: pyarrow, which reads `.parquet` files, is not installed.
    """
    path = Path(file)
    if path.suffix == ".parquet" or path.is_dir():
        return _parquet_rows(name, path)
    if not path.is_file():
        expected = f"a .json, .jsonl or .parquet file{other}"
        raise BadRequestError(f"{name}: file {str(file)!r} not found. Expected {expected}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{name} {file} is not UTF-8: {error}") from None
    if path.suffix != ".jsonl":
        return _json_value(name, path, 1, text)
    lines = enumerate(text.split("\n"), start=1)  # a JSON text may contain the other line ends of str.splitlines
    return [_json_value(name, path, number, line) for number, line in lines if line.strip()]


def _json_value(name: str, path: Path, number: int, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{name} {path}, line {number} is not JSON: {error}") from None


def _parquet_rows(name: str, path: Path) -> list[Any]:
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise BadRequestError(f"{name}: the folder {str(path)!r} contains no .parquet file")
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} {path}: a .parquet file requires the package pyarrow, which is not installed. "
            "Run pip install pyarrow",
            name=error.name,
        ) from error
    rows: list[Any] = []
    for file in files:
        try:
            with parquet.ParquetFile(file) as opened:
                rows += opened.read().to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's errors are subclasses
            raise BadRequestError(f"{name} {file} cannot be read as Parquet: {error}") from error
    return rows
