"""The retention of runs: limited by a policy, with their records and resources; else unlimited."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from agentlightning.store import InMemoryLightningStore
from agentlightning.types import PromptTemplate, RetentionPolicy, RunRecord

NOW = 1_800_000_000.0
PROMPT: Any = {"p": PromptTemplate(template="x", engine="f-string")}


async def told(policy: RetentionPolicy, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str], int]:
    """Return the runs, the resources and the vocabularies that remain an age after two of three runs ended."""
    clock = mock.Mock(return_value=NOW)
    monkeypatch.setattr("time.time", clock)
    monkeypatch.setattr("agentlightning.store.engine.clock.monotonic", clock)
    store = InMemoryLightningStore(retention=policy)
    for run_id in ("old", "alive", "young"):
        await store.start_run(run_id)
        await store.add_run_records(run_id, [RunRecord(kind="step", step=1)])
        await store.update_resources(f"of {run_id}", PROMPT, run_id=run_id)
    await store.add_vocabulary("v", ["a"])
    await store.update_run("old", state="succeeded")
    clock.return_value = NOW + 90_000
    await store.update_run("young", state="failed")
    clock.return_value = NOW + 100_000
    store._runtime.sweep_now()
    runs = [run.run_id for run in await store.query_runs()]
    for run_id in ("old", "alive", "young"):
        assert (await store.query_run_records(run_id)).total == (run_id in runs)
    resources = [update.resources_id for update in await store.query_resources()]
    return runs, resources, 1 if await store.get_vocabulary("v") else 0


async def test_runs_stay_for_good_unless_the_policy_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, resources, vocabularies = await told(RetentionPolicy(max_age=10.0), monkeypatch)
    assert runs == ["old", "alive", "young"]
    assert resources == ["of old", "of alive", "of young"]
    assert vocabularies == 1


async def test_a_run_goes_with_its_records_and_resources_and_a_running_one_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, resources, vocabularies = await told(RetentionPolicy(max_run_age=50_000.0), monkeypatch)
    assert runs == ["alive", "young"]
    assert resources == ["of alive", "of young"]
    assert vocabularies == 1
