"""Print the metrics of a run as a Prometheus page, without a Prometheus server, and add a custom metric.

    python examples/minimal/write_metrics.py

With `--console` each metric is also logged to the terminal. Runners in separate processes share a page if
`PROMETHEUS_MULTIPROC_DIR` is set to a folder.
"""

from __future__ import annotations

import argparse
import logging
import random
import time

from prometheus_client import generate_latest

import agentlightning as agl
from agentlightning.utils.metrics import (
    ConsoleMetricsBackend,
    MetricsBackend,
    MultiMetricsBackend,
    PrometheusMetricsBackend,
    get_prometheus_registry,
)

metrics = PrometheusMetricsBackend()
metrics.register_counter("shop.coins", ["coin"])


@agl.rollout
def flips_coins(task: int) -> float:
    if task == 7:
        raise RuntimeError("the coin rolled away")
    time.sleep(0.01)
    heads = random.Random(task).random() < 0.5
    metrics.count("shop.coins", labels={"coin": "heads" if heads else "tails"})
    return float(heads)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run twenty tasks and print their metrics.")
    parser.add_argument("--console", action="store_true", help="also log each metric")
    tracker: MetricsBackend = metrics
    if parser.parse_args().console:
        logging.basicConfig(level=logging.INFO)
        tracker = MultiMetricsBackend([metrics, ConsoleMetricsBackend()])
    store = agl.InMemoryLightningStore(tracker=tracker)
    trainer = agl.Trainer(store=store, strategy="shm", n_runners=4, algorithm="baseline", initial_resources={})
    trainer.fit(flips_coins, train_dataset=list(range(20)))
    prefixes = ("agl_rollouts_total", "agl_attempts_total", "agl_rollouts_duration_count", "shop_coins_total")
    for line in sorted(generate_latest(get_prometheus_registry()).decode().splitlines()):
        if line.startswith(prefixes):
            print(line)


if __name__ == "__main__":
    main()
