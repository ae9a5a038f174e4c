"""The content of a heartbeat."""

from __future__ import annotations

import json

from agentlightning.utils.system_snapshot import system_snapshot

KEYS = {
    "timestamp",
    "host",
    "os",
    "cpu_name",
    "cpu_cores",
    "cpu_threads",
    "cpu_usage_pct",
    "mem_used_gb",
    "mem_total_gb",
    "mem_pct",
    "disk_used_gb",
    "disk_total_gb",
    "disk_pct",
    "bytes_sent_mb",
    "bytes_recv_mb",
}


def test_a_snapshot_is_json_with_every_figure() -> None:
    snapshot = system_snapshot()
    assert set(snapshot) == KEYS
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert 0 < snapshot["mem_used_gb"] <= snapshot["mem_total_gb"]


def test_gpus_are_a_list_even_without_one() -> None:
    assert isinstance(system_snapshot(include_gpu=True)["gpus"], list)
