"""One whole `fit` of the trainer benchmark, in a separate process, with the workload of the older system's figures.

A no-op agent emits four small spans and returns a reward; the algorithm enqueues all tasks, waits for them and reads
everything back. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import psutil

import agentlightning as agl

SPANS = 4
marks: dict[str, float] = {}


class NoOp(agl.LitAgent[Any]):
    """Emits its spans and returns; first waits for the seconds in the task's `pause`, as for a model."""

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        agl.emit_annotation({"step": 0, "task": task["index"], "began": time.time()})
        if pause := task.get("pause"):
            time.sleep(pause)
        for step in range(1, SPANS):
            agl.emit_annotation({"step": step, "task": task["index"]})
        return 0.5


@agl.algo
async def algorithm(*, store: agl.LightningStore, train_dataset: Any = None, val_dataset: Any = None) -> None:
    """Enqueue, wait, read back; then measure the time until single tasks reach an idle runner."""
    marks["algorithm"] = time.time()
    await store.add_resources({"prompt": agl.PromptTemplate(template="{x}", engine="f-string")})
    ids = [(await store.enqueue_rollout(input=task, mode="train")).rollout_id for task in train_dataset]
    await finish(store, ids)
    marks["finished"] = time.time()
    attempts = [attempt for rollout_id in ids for attempt in await store.query_attempts(rollout_id)]
    marks["succeeded"] = sum(attempt.status == "succeeded" for attempt in attempts)
    marks["first_start"] = min(attempt.start_time for attempt in attempts)
    marks["last_end"] = max(attempt.end_time or 0.0 for attempt in attempts)
    marks["spans"] = sum([(await store.query_spans(rollout_id, "latest")).total for rollout_id in ids])
    delays: list[float] = []
    for _ in range(int(os.environ.get("BENCH_SINGLE", "0"))):
        await asyncio.sleep(0.05)
        enqueued_at = time.time()
        single = await store.enqueue_rollout(input={"index": -1}, mode="train")
        await finish(store, [single.rollout_id])
        spans = await store.query_spans(single.rollout_id)
        delays += [float(span.attributes["began"]) - enqueued_at for span in spans if "began" in span.attributes]
    marks["delay"] = sorted(delays)[len(delays) // 2] if delays else 0.0
    marks["algorithm_end"] = time.time()


async def finish(store: agl.LightningStore, rollout_ids: list[str]) -> None:
    """Wait until all have ended, as the script of the older system does."""
    pending = set(rollout_ids)
    while pending:
        done = await store.wait_for_rollouts(rollout_ids=sorted(pending), timeout=0.05)
        pending -= {rollout.rollout_id for rollout in done}


def main() -> None:
    kind, n_runners, start_method, rollouts, pause = sys.argv[1:]
    strategy: dict[str, Any] = {"type": kind, "n_runners": int(n_runners)}
    strategy |= {"main_thread": "algorithm"} if kind == "shm" else {"start_method": start_method, "server_port": 0}
    trainer = agl.Trainer(algorithm=algorithm, n_runners=int(n_runners), strategy=strategy)
    tasks = [{"index": number, "pause": float(pause)} for number in range(int(rollouts))]
    began, cpu = time.time(), _cpu()
    trainer.fit(NoOp(), train_dataset=tasks)
    ended = time.time()
    assert marks["succeeded"] == len(tasks), marks
    assert marks["spans"] == len(tasks) * (SPANS + 1), marks
    print(
        json.dumps(
            {
                "per_second": len(tasks) / (marks["last_end"] - marks["first_start"]),
                "first": marks["first_start"] - began,
                "after": ended - marks["algorithm_end"],
                "delay": marks["delay"],
                "cpu_ms": 1e3 * (_cpu() - cpu) / len(tasks),
                "left_over": sum(not _is_python_s(child) for child in psutil.Process().children(recursive=True)),
            }
        )
    )


def _is_python_s(process: psutil.Process) -> bool:
    """Return whether this is the process that `multiprocessing` keeps as long as this one lives, after a spawn."""
    return "resource_tracker" in " ".join(process.cmdline())


def _cpu() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
