"""Datasets of `fit` and `evaluate`: real libraries where installed, and stand-ins with their protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.trainer.datasets import as_dataset

ROWS = [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]


class Columns:
    """Speaks as a pandas frame does: columns by name, rows through `to_dict("records")`."""

    columns = ("x", "y")
    iloc = None

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in ROWS]

    def __len__(self) -> int:
        return len(ROWS)

    def to_dict(self, orient: str = "dict") -> Any:
        return [dict(row) for row in ROWS] if orient == "records" else {name: self[name] for name in self.columns}


class Splits(dict[str, Any]):
    """Speaks as a Hugging Face `DatasetDict` does: splits by name."""


class Table:
    """Speaks as a Hugging Face `Dataset` does: a row for an integer, a column for a name."""

    column_names = ("x", "y")

    def __getitem__(self, key: int | str) -> Any:
        return [row[key] for row in ROWS] if isinstance(key, str) else ROWS[key]

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


class Stream:
    """Speaks as a Hugging Face `IterableDataset` does: no length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def rows() -> Iterator[dict[str, Any]]:
    yield from ROWS


FORMS: dict[str, Any] = {
    "list": lambda: list(ROWS),
    "tuple": lambda: tuple(ROWS),
    "generator": rows,
    "iterator": lambda: iter(ROWS),
    "map": lambda: map(dict, ROWS),
    "frame": Columns,
    "table": Table,
    "stream": Stream,
}


@pytest.mark.parametrize("form", FORMS)
def test_fit_takes_every_form_of_tasks(form: str) -> None:
    def agent(task: dict[str, Any]) -> float:
        return task["x"] / 2

    trainer = agl.Trainer(algorithm="baseline", strategy="shm", initial_resources={})
    trainer.fit(agent, train_dataset=FORMS[form](), val_dataset=FORMS[form]())
    assert trainer.result.rewards == [0.5, 1.0, 0.5, 1.0]


def test_a_pandas_frame_gives_its_rows() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed; a stand-in is tested above")
    frame = pandas.DataFrame(ROWS, index=[7, 9])
    assert as_dataset("tasks", frame) == ROWS
    assert as_dataset("tasks", frame["x"]) == [1, 2]


def test_hugging_face_datasets_are_taken() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed; a stand-in is tested above")
    table = datasets.Dataset.from_list(ROWS)
    dataset = as_dataset("tasks", table)
    assert dataset is not None
    assert [dataset[index] for index in range(len(dataset))] == ROWS
    assert as_dataset("tasks", table.to_iterable_dataset()) == ROWS
    with pytest.raises(TypeError, match="splits"):
        as_dataset("tasks", datasets.DatasetDict(train=table))


def test_numpy_rows_become_plain_values_of_the_task() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    trainer = agl.Trainer(strategy="shm")
    assert trainer.evaluate(lambda task: float(sum(task)), numpy.ones((2, 3))).rewards == [3.0, 3.0]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("http://127.0.0.1:8000", TypeError, "got the string 'http.*To use a store server, pass its address"),
        (b"x", TypeError, "got the string"),
        (7, TypeError, "got int"),
        ({1, 2}, TypeError, "got set"),
        (Splits(train=ROWS, test=ROWS), TypeError, "Splits with the keys 'train', 'test'. .*tasks=splits"),
        ({"question": "?"}, TypeError, "If it is a single task, put it in a list"),
        (iter(()), ValueError, "without items; a generator can be read only once"),
        (itertools.count(), ValueError, r"a count with more than 50 items.*itertools.islice"),
    ],
)
def test_what_is_no_dataset_is_refused_with_what_would_be_one(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        as_dataset("tasks", value, most=50)


def test_an_iterator_of_exactly_the_bound_is_read() -> None:
    assert as_dataset("tasks", iter(range(50)), most=50) == list(range(50))
