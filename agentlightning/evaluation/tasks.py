"""Digests and slices of the tasks of evaluations."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from agentlightning.base.terminal import cut
from agentlightning.store.rules.values import to_json
from agentlightning.utils.masking import masked_text

SliceBy: TypeAlias = "str | Callable[[Any], object]"
"""A field of the task, such as the nested `meta.difficulty`, or a function of the task."""
MISSING = "(missing)"
"""Slice of the tasks without the field."""
MOST_SLICES = 100
"""Maximum number of slices of one field. A field with more values does not group tasks."""


def tasks_of(tasks: Iterable[object]) -> list[str]:
    """Return a digest of each task. Equal tasks have the same digest, and a task cannot be read from its digest."""
    texts = (json.dumps(to_json(task, "task"), sort_keys=True, separators=(",", ":")) for task in tasks)
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def repeats_of(tasks: Iterable[object]) -> list[int]:
    """Return the number of equal tasks before each task."""
    counts, repeats = Counter[str](), list[int]()
    for digest in tasks_of(tasks):
        repeats.append(counts[digest])
        counts[digest] += 1
    return repeats


def slices_of(tasks: Iterable[Any], by: SliceBy | Sequence[SliceBy] | None) -> list[tuple[str, ...]]:
    """Return the slices of each task, such as `("difficulty=hard",)`: one for each field or function.

    Tasks without the field, or for which a function returns None, are in the slice `(missing)`.

    Raises:
        TypeError: An item of `by` is neither a field nor a function.
        ValueError: No task has the field, a field has more than 100 values, `by` is empty, or a name occurs twice.
    """
    tasks = list(tasks)
    if by is None:
        return [()] * len(tasks)
    fields: Sequence[SliceBy] = [by] if isinstance(by, str) or callable(by) else by
    if not isinstance(fields, (list, tuple)):
        raise TypeError(f"slices must be a field, a function or a list of them; got {type(by).__name__}")
    if not fields:
        raise ValueError("slices is an empty list; expected a field or a function")
    names = [_name(field) for field in fields]
    if len(set(names)) < len(names):
        raise ValueError(f"slices contains a name twice: {', '.join(names)}. Use functions with different names")
    columns = [_labels(tasks, field, name) for field, name in zip(fields, names, strict=True)]
    return list(zip(*columns, strict=True))


def _name(field: object) -> str:
    if isinstance(field, str) and field:
        return field
    if not callable(field):
        raise TypeError(f"slices must contain names of fields or functions; got {field!r}")
    name = getattr(field, "__name__", "")
    return "slice" if name in ("", "<lambda>") else name


def _labels(tasks: Sequence[Any], field: SliceBy, name: str) -> list[str]:
    values = [_field(task, field) if isinstance(field, str) else field(task) for task in tasks]
    if isinstance(field, str) and tasks and all(value is None for value in values):
        keys = sorted(map(str, cast("Mapping[object, object]", tasks[0]))) if isinstance(tasks[0], Mapping) else []
        hint = f"; fields of the first task: {', '.join(keys[:20])}" if keys else ""
        raise ValueError(f"slices={field!r}: no task has this field{hint}")
    texts = [None if value is None else str(value) for value in values]
    shown = {text: MISSING if text is None else cut(masked_text(text), 80) for text in set(texts)}
    labels = [f"{name}={shown[text]}" for text in texts]
    if len(slices := set(labels)) > MOST_SLICES:
        raise ValueError(
            f"slices={name!r} has {len(slices)} values; the maximum is {MOST_SLICES}. Use a function that groups them"
        )
    return labels


def _field(task: object, path: str) -> object:
    """Return an entry or attribute of a task. A dotted path reads nested fields, unless a key equals the path."""
    whole = _entry(task, path)
    if whole is not None and not callable(whole):
        return whole
    value = task
    for name in path.split("."):
        value = _entry(value, name)
    return None if callable(value) else value


def _entry(holder: object, name: str) -> Any:
    if isinstance(holder, Mapping):
        return cast("Mapping[str, Any]", holder).get(name)
    return None if name.startswith("_") else getattr(holder, name, None)
