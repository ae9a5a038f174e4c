"""Histograms of programs' own metrics, in the registry that the page of a store server shows."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping

from agentlightning.errors import BadRequestError
from agentlightning.utils.rewards import as_number

MOST_NAMES, MOST_SERIES = 100, 1000
"""Different metrics, and combinations of tags' values of one metric."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.]{0,199}")
_lock = threading.Lock()
_series: dict[str, set[tuple[tuple[str, str], ...]]] = {}
"""The combinations of tags that each metric has."""


def observe(name: str, value: float, tags: Mapping[str, str] | None) -> None:
    """Add a value to a histogram, which is made if there is none of this name.

    Raises:
        BadRequestError: the name or a tag is no name, other tags than before, or too many of either.
    """
    from agentlightning.utils.metrics import PrometheusMetricsBackend

    if as_number(value) is None or not math.isfinite(value):
        raise BadRequestError(f"The value of the metric {name!r} is {value!r}; expected a finite number")
    labels = tuple(sorted((str(tag), str(text)) for tag, text in (tags or {}).items()))
    wrong = [word for word in (name, *(tag for tag, _ in labels)) if not _NAME.fullmatch(word)]
    if wrong:
        raise BadRequestError(f"{wrong[0][:200]!r} is no name of a metric or a tag; expected letters, digits, _ and .")
    with _lock:
        known = _series.get(name, set())
        others = next(([tag for tag, _ in each] for each in known), None)
        if others is not None and others != [tag for tag, _ in labels]:
            raise BadRequestError(f"The metric {name!r} has the tags {others}; got {[tag for tag, _ in labels]}")
        if (name not in _series and len(_series) >= MOST_NAMES) or (labels not in known and len(known) >= MOST_SERIES):
            raise BadRequestError(
                f"The metric {name!r} is one too many: a store has at most {MOST_NAMES} metrics of programs, each with "
                f"{MOST_SERIES} combinations of tags. Give tags few values"
            )
        backend = PrometheusMetricsBackend()
        try:
            backend.register_histogram(name, [tag for tag, _ in labels])
        except ValueError as error:
            raise BadRequestError(f"The metric {name!r} cannot be recorded: {error}") from error
        _series.setdefault(name, set()).add(labels)
    backend.observe(name, value, dict(labels))
