"""Every metric that the board and the alert rules name is on the page of a used server, with the named labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.store import InMemoryLightningStore
from agentlightning.store.http.metrics import exported_metrics
from agentlightning.types import RunRecord
from agentlightning.utils.metrics import PrometheusMetricsBackend
from tests.stubs.running import run_through_gateway, serving
from tests.test_one_rollout import agent as asks_twice

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_PROMETHEUS = {"up": {"job", "instance"}}
ADDED_BY_PROMETHEUS = {"instance", "job"}
ABSENT_IN_MEMORY: set[str] = set()
Samples = dict[str, list[tuple[dict[str, str], float]]]


async def scraped() -> Samples:
    """Use a store server as a run does, gateway included, and return its page: label sets and values by sample name."""
    tracker = PrometheusMetricsBackend()
    store = InMemoryLightningStore(tracker=tracker)
    async with serving(store, tracker=tracker) as server:
        await run_through_gateway(server, asks_twice, "hello")
        failed = await server.start_rollout("hello", worker_id="w")
        await server.fail_rollout(failed.rollout_id, reason="of_my_own")
        await server.enqueue_rollout("later")
        await server.start_run("run-1")
        figures = {"mean_reward": 0.5, "update": {"loss": 0.1}, "calls_trained": 2, "calls_excluded": {"no_reward": 1}}
        await server.add_run_records("run-1", [RunRecord(kind="step", step=1, data=figures)])
        async with aiohttp.ClientSession() as session:
            for _ in range(2):  # the first page is the first request that is counted
                async with session.get(f"{server.endpoint}/v1/prometheus") as reply:
                    text = await reply.text()
    await store.close()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples


@pytest.fixture(scope="module")
def page() -> Samples:
    import asyncio

    return asyncio.run(scraped())


def expressions() -> Iterator[tuple[str, str]]:
    """Yield where each expression stands, and the expression."""
    board = json.loads((DEPLOY / "grafana/board.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("place", "expression"), [pytest.param(*each, id=each[0]) for each in expressions()])
def test_what_a_board_or_rule_asks_for_is_on_the_page(page: Samples, place: str, expression: str) -> None:
    plain = re.sub(r'"[^"]*"', '""', expression)
    names = set(re.findall(r"\b(?:agl|process)_\w+|\bup\b", plain))
    assert names
    assert {name for name in names if name not in page and name not in OF_PROMETHEUS} == set()
    labels = {label for name in names for labels, _ in page.get(name, []) for label in labels}
    grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", plain) for label in by.split(",")}
    chosen = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*""', plain))
    assert (grouped | chosen) - labels - ADDED_BY_PROMETHEUS == set()
    assert all(plain.count(left) == plain.count(right) for left, right in ("()", "{}", "[]"))


def value(page: Samples, name: str, **labels: str) -> float:
    return sum(number for own, number in page[name] if labels.items() <= own.items())


def test_a_run_is_told_in_numbers(page: Samples) -> None:
    assert value(page, "agl_rollouts_open", status="queuing") == 1
    assert value(page, "agl_rollouts_total", status="succeeded", mode="train") >= 1
    assert value(page, "agl_rollouts_claim_delay_count", mode="train") >= 1
    assert value(page, "agl_attempts_total", outcome="scored") >= 1
    assert value(page, "agl_attempts_total", outcome="infrastructure_fault", reason="of_my_own") >= 1
    assert value(page, "agl_calls_total", state="ok") >= 2
    assert value(page, "agl_calls_duration_count", state="ok") >= 2
    assert value(page, "agl_tokens_total", kind="completion") > 0
    assert value(page, "agl_tokens_total", kind="prompt") > 0
    assert value(page, "agl_workers") >= 1


def test_every_metric_of_the_guide_is_on_the_page(page: Samples) -> None:
    guide = (DEPLOY.parent / "docs/how-to/operate.md").read_text()
    names = {
        name for row in re.findall(r"^\| (`agl_[^|]+)\|", guide, re.MULTILINE) for name in re.findall(r"agl_\w+", row)
    }
    assert len(names) > 10
    assert {name for name in names if name not in page and f"{name}_count" not in page} == set()


def test_every_metric_of_ours_on_the_page_is_known_with_its_labels_and_its_kind(page: Samples) -> None:
    """The known metrics are those from which `docs/reference/settings.md` is made."""
    metrics = {metric.name: metric for metric in exported_metrics()}
    endings = {"histogram": ("_bucket", "_count", "_sum", "_created"), "counter": ("", "_created"), "gauge": ("",)}
    expected = {name.removesuffix("_total") + "_created" for name in metrics} | {
        name + ending for name, metric in metrics.items() for ending in endings[metric.kind]
    }
    shown = {name for name in page if name.startswith("agl_")}
    assert shown - expected == set()
    assert {name for name in metrics if not shown & {name, name + "_count"}} == ABSENT_IN_MEMORY
    for name, metric in metrics.items():
        for labels, _ in page.get(name, []) + page.get(name + "_count", []):
            assert set(labels) == set(metric.labels), name


def test_every_rule_says_what_is_wrong_and_what_to_do() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    assert all({"summary", "action"} <= set(rule["annotations"]) for rule in rules)
    assert all(rule["labels"]["severity"] in ("warning", "critical") for rule in rules)


def test_prometheus_is_told_the_path_and_the_rules() -> None:
    settings: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    [job] = settings["scrape_configs"]
    assert job["metrics_path"] == "/v1/prometheus"
    assert [(DEPLOY / "prometheus" / name).is_file() for name in settings["rule_files"]] == [True]
