"""What Prometheus reads of training runs: the figures of the last step of each of the newest ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from agentlightning.errors import DamagedRecordError
from agentlightning.store.base import LightningStore

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)
MOST_RUNS = 20
"""Runs on the page, the newest ones: each is a label of its own."""
GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "agl_run_step": ((), "the last recorded step of a run"),
    "agl_run_reward": (("mean_reward", "reward"), "mean reward of the last step of a run"),
    "agl_run_loss": (("update.loss", "loss"), "loss of the last step of a run"),
    "agl_run_calls_trained": (("calls_trained",), "model calls that the last step of a run trained"),
    "agl_run_calls_excluded": (("calls_excluded",), "model calls that the last step of a run excluded"),
}
"""Names, the figures of a step of which the first that is there counts, and what they say."""


async def figures_of_runs(store: LightningStore) -> list[tuple[str, str, float]]:
    """Return (gauge, run, value) for the newest runs; none of a store that keeps no runs."""
    found: list[tuple[str, str, float]] = []
    try:
        for run in await store.query_runs(sort_by="start_time", sort_order="desc", limit=MOST_RUNS):
            try:
                page = await store.query_run_records(run.run_id, kind_in=["step"], sort_order="desc", limit=1)
            except DamagedRecordError as error:
                logger.info("the figures of run %a are left out: %s", run.run_id, error)
                continue
            for record in page:
                found.append(("agl_run_step", run.run_id, float(record.step)))
                for gauge, (names, _) in GAUGES.items():
                    values = (_number(record.data, name) for name in names)
                    found += [(gauge, run.run_id, value) for value in values if value is not None][:1]
    except NotImplementedError:
        return []
    return found


def collect(figures: list[tuple[str, str, float]]) -> Iterator[Metric]:
    """Yield the gauges."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    for gauge, (_, text) in GAUGES.items():
        family = GaugeMetricFamily(gauge, text, labels=["run"])
        for name, run_id, value in figures:
            if name == gauge:
                family.add_metric([run_id or "-"], value)
        yield family


def _number(data: Mapping[str, Any], name: str) -> float | None:
    """Return a figure by its dotted name, of counts by reason their sum; None if it is no number."""
    value: object = data
    for part in name.split("."):
        value = cast("Mapping[str, object]", value).get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        counts = cast("Mapping[str, object]", value).values()
        value = sum(count for count in counts if isinstance(count, (int, float)))
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
