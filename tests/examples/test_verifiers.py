"""examples/verifiers: an environment of the real package, whose rollouts run as programs, with a scripted model."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.ledger import RolloutRecord, read_rollout
from tests.examples.shown import EXAMPLES, ROOT
from tests.frameworks.engine import Engine, Json

pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make test-example NAMES=verifiers")

FOLDER = EXAMPLES / "verifiers"
README = (FOLDER / "README.md").read_text()
TASKS = [{"taskset": "sums", "harness": "sums", "index": index} for index in range(2)]
SAMPLING = {"temperature": 0.5, "max_tokens": 24}


def adds_small_numbers(request: Json) -> str:
    """A model that first writes no number, and is wrong if the first number is above 40."""
    if len(request["messages"]) == 1:
        return "Let me think."
    a, b = map(int, re.findall(r"\d+", request["messages"][0]["content"]))
    return f"{a} + {b} is {a + b if a <= 40 else 1}"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "measure", raising=False)
    return importlib.import_module("measure")


@agl.algo(auto_start_proxy=True)
async def one_pass(*, store: agl.LightningStore, llm_proxy: agl.LLMProxy) -> list[RolloutRecord]:
    """Run the tasks through the gateway and return what was recorded."""
    await store.add_resources({"llm": llm_proxy.as_resource(sampling_parameters=SAMPLING)})
    ids = [(await store.enqueue_rollout(task, mode="train")).rollout_id for task in TASKS]
    ended = {each.rollout_id: each for each in await store.wait_for_rollouts(rollout_ids=ids, timeout=100)}
    return [
        read_rollout(ended[one], await store.query_attempts(one), list(await store.query_spans(one))) for one in ids
    ]


def test_the_calls_of_an_environment_are_recorded_as_one_row_with_its_reward(measure: Any) -> None:
    with Engine(adds_small_numbers) as engine:
        proxy = agl.LLMProxy(model_list=[engine.entry("policy")])
        trainer = agl.Trainer(algorithm=one_pass, llm_proxy=proxy, strategy="shm", runner={"concurrency": 2})
        trainer.fit(measure.verifiers_agent())
        assert engine.trouble == []
        assert [{name: each.request.get(name) for name in SAMPLING} for each in engine.calls] == [SAMPLING] * 4
    records: list[RolloutRecord] = trainer.result
    assert [(record.outcome, record.reward) for record in records] == [("scored", 1.0), ("scored", 0.0)]
    assert [len(record.calls) for record in records] == [2, 2]
    assert [[len(row.call_ids) for row in record.samples] for record in records] == [[2], [2]]
    assert all(not record.exclusions for record in records)


def test_a_rollout_without_a_model_fails_and_has_no_reward(tmp_path: Path) -> None:
    resources = tmp_path / "resources.json"
    resources.write_text("{}")
    model = {
        "AGL_RESOURCES_FILE": str(resources),
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "k",
        "OPENAI_MODEL": "m",
    }
    done = subprocess.run(
        [sys.executable, FOLDER / "worker.py"],
        input=json.dumps(TASKS[0]),
        env={**os.environ, **model},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "RuntimeError: task {'taskset': 'sums'" in done.stderr


def test_the_example_measures_the_environment() -> None:
    [shown] = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    with Engine(adds_small_numbers) as server:
        command = [sys.executable, "examples/verifiers/measure.py", "--endpoint", server.base_url, "--model", "m"]
        done = subprocess.run([*command, "--tasks", "2"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.strip() in done.stdout, done.stdout + done.stderr
