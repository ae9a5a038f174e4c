"""examples/own_tracer: its output, the spans in the store, and attempts side by side."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.examples.shown import EXAMPLES, run, same, shown


def test_the_program_prints_what_its_readme_shows() -> None:
    [one] = shown("own_tracer")
    printed = run(one.command)
    assert same(printed, one.output), printed


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES / "own_tracer")
    from file_tracer import FileTracer  # type: ignore[import-not-found]

    return FileTracer(tmp_path / "spans.jsonl")


@agl.rollout
async def waits(task: int) -> None:
    with agl.operation(name="wait", task=task):
        await asyncio.sleep(0.01)
    agl.emit_message(str(task))
    if task == 3:
        raise ValueError("no")
    agl.emit_reward(task / 10)


def test_attempts_side_by_side_keep_their_spans_apart_also_those_that_fail(tracer: Any, tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(tracer=tracer, store=store, strategy="shm", runner={"concurrency": 8})
    assert trainer.evaluate(waits, list(range(8))).rewards == [0.0, 0.1, 0.2, None, 0.4, 0.5, 0.6, 0.7]
    for rollout in asyncio.run(store.query_rollouts()):
        spans = asyncio.run(store.query_spans(rollout.rollout_id))
        assert [span.sequence_id for span in spans] == [1, 2, 3][: len(spans)]
        bodies = [span.attributes.get("agentlightning.message.body") for span in spans]
        assert [each for each in bodies if each] == [str(rollout.input)]
        assert len(spans) == (2 if rollout.input == 3 else 3)
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 7 * 3 + 2


def test_an_operation_that_raises_is_kept_with_its_error(tracer: Any) -> None:
    async def attempt() -> list[agl.Span]:
        async with tracer.trace_context():
            with pytest.raises(KeyError), agl.operation(name="fails"):
                raise KeyError("x")
        return tracer.get_last_trace()

    [span] = asyncio.run(attempt())
    assert span.status.status_code == "ERROR"


def test_it_can_be_sent_to_a_runner_that_is_spawned(tracer: Any) -> None:
    assert type(pickle.loads(pickle.dumps(tracer))) is type(tracer)
