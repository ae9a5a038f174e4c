"""A training run whose agents crash, hang, kill their runner, cut streams, leave calls behind and are refused calls.

`python -m tests.chaos.learning MODEL FOLDER` trains with runner processes over a store in SQLite. What befalls each
rollout is drawn from a generator seeded with its step, task and sample. Then every update is made anew on another
policy, from the rollouts to which nothing was to happen and from nothing else; the program prints as one line of JSON
what the books say and the digests of the weights after each step, as the run left them and as made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.store import LightningStore
from agentlightning.training.learner.policy import Policy
from agentlightning.training.learner.update import UpdateSettings
from agentlightning.training.ledger import Ledger
from agentlightning.training.ledger_records import check_ledger
from agentlightning.training.policy_files import digest_of
from agentlightning.training.rollouts import evidence
from agentlightning.training.rows import choose_rows, read_records
from agentlightning.training.settings import GRPOSettings
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import ask, calls_of, refused, rollouts_of, say

STEPS, TASKS, EACH = 3, 4, 8
LIMIT_SECONDS = 12.0
"""Limit of an attempt; one that hangs goes on for longer."""
FATES = {
    "good": 12,
    "raises": 2,
    "no network": 1,
    "kills": 1,
    "hangs": 1,
    "cuts": 2,
    "is refused": 2,
    "leaves a call": 2,
}
"""The fates of a rollout, each with its relative frequency."""


def fate_of(metadata: Mapping[str, Any]) -> tuple[str, float]:
    """Return the fate of the rollout, and the part of its reward that its reply does not decide."""
    chance = random.Random(f"{metadata['step']} {metadata['task']} {metadata['sample']}")
    return chance.choices(list(FATES), list(FATES.values()))[0], chance.random()


@agl.rollout
def agent(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
    """Make two calls and return a reward, unless the fate of the rollout intervenes."""
    fate, share = fate_of(rollout.metadata or {})
    messages: list[dict[str, Any]] = [say(task)]
    messages.append(ask(llm, messages))
    match fate:
        case "raises":
            raise RuntimeError("the agent broke")
        case "no network":
            raise ConnectionResetError("the tool's server is gone")
        case "kills" if rollout.attempt.sequence_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(1.5 * LIMIT_SECONDS)
        case "cuts":
            _cut_a_stream(llm)
            raise ConnectionAbortedError("the stream broke")
        case "is refused":
            assert refused(llm, [say("1 " * 300)]) == 400
        case "leaves a call":
            threading.Thread(target=_ask_in_vain, args=(llm,), daemon=True).start()
            raise TimeoutError("the agent did not wait")
        case _:
            pass
    messages.append(say("go on"))
    return len(ask(llm, messages)["content"]) / 10 + share


def _ask_in_vain(llm: agl.LLM) -> None:
    with contextlib.suppress(OSError, urllib.error.HTTPError):
        ask(llm, [say("nobody waits for this")])


def _cut_a_stream(llm: agl.LLM) -> None:
    """Begin a streamed call, read a little, and close the connection."""
    parts = urllib.parse.urlsplit(llm.endpoint)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    body = {"model": llm.model, "messages": [say("cut")], "stream": True, **llm.sampling_parameters}
    connection.request("POST", f"{parts.path}/chat/completions", json.dumps(body), {"content-type": "application/json"})
    connection.getresponse().read(16)
    connection.close()


async def update_anew(store: LightningStore, settings: GRPOSettings) -> list[str]:
    """Make every update of the run on a policy of its own, without the rollouts that were to go wrong; return the
    digests of the weights after each step."""
    policy = Policy.load(settings.model, learning_rate=settings.learning_rate, seed=settings.seed)
    digests: list[str] = []
    for step in range(1, STEPS + 1):
        good = [
            rollout
            for rollout in await rollouts_of(store)
            if (rollout.metadata or {})["step"] == step
            and fate_of(rollout.metadata or {})[0] in ("good", "kills")
            and rollout.status == "succeeded"
        ]
        good.sort(key=lambda rollout: ((rollout.metadata or {})["task"], (rollout.metadata or {})["sample"]))
        rollout_evidence = [await evidence(store, rollout) for rollout in good]
        groups = [(rollout.metadata or {})["task"] for rollout in good]
        rows = choose_rows(read_records(rollout_evidence, TracerTraceToTriplet()), groups, Ledger(step=step), settings)
        policy.update(
            rows.samples,
            rows.advantages,
            UpdateSettings(
                loss=settings,
                constant_length=settings.max_completion_length,
                share=rows.share(settings.aggregates_by),
                num_iterations=settings.num_iterations,
                minibatch_rollouts=settings.minibatch_rollouts,
                learning_rate=settings.learning_rate,
            ),
        )
        digests.append(digest_of(policy))
    return digests


async def account(folder: Path, settings: GRPOSettings, result: Any) -> dict[str, Any]:
    """Return what the books of the run say, and the digests."""
    store = agl.SQLiteLightningStore(folder / "store.db")
    rollouts = await rollouts_of(store)
    ledger = await check_ledger(store, "r")
    entries = {
        "wrong": ledger.wrong,
        "captured": ledger.captured,
        "calls": len(await calls_of(store, rollouts)),
        "trained": [figures.calls_trained for figures in result.metrics],
        "excluded": [dict(figures.calls_excluded) for figures in result.metrics],
        "captured_of_steps": [figures.calls_captured for figures in result.metrics],
        "late": sum(result.late_calls.values()),
        "fates": Counter(fate_of(rollout.metadata or {})[0] for rollout in rollouts),
        "ends": sorted({(fate_of(rollout.metadata or {})[0], rollout.status) for rollout in rollouts}),
        "attempts": (await store.query_attempts(rollouts[0].rollout_id)).total,
        "killed": [
            (await store.query_attempts(rollout.rollout_id))[0].outcome_reason
            for rollout in rollouts
            if fate_of(rollout.metadata or {})[0] == "kills"
        ],
        "weights": [figures.weights for figures in result.metrics],
        "anew": await update_anew(store, settings),
    }
    await store.close()
    return entries


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    algorithm = agl.GRPO(
        model=model,
        max_steps=STEPS,
        batch_size=TASKS,
        num_generations=EACH,
        num_iterations=2,
        minibatch_rollouts=5,
        learning_rate=1e-3,
        max_completion_length=6,
        rollout_timeout_seconds=LIMIT_SECONDS,
        progress="none",
        output_dir=folder / "run",
    )
    trainer = agl.Trainer(
        algorithm=algorithm,
        runner={"heartbeat_interval": 0.2, "interval_jitter": 0.0, "concurrency": 8},
        store=agl.SQLiteLightningStore(folder / "store.db", lease_seconds=4.0, scan_debounce_seconds=0.1),
        rollout_config={"infrastructure_retries": 20},
        strategy={"type": "cs", "server_port": 0, "max_runner_restarts": 100},
        n_runners=2,
        run_id="r",
    )
    trainer.fit(agent, train_dataset=[f"task {number}" for number in range(TASKS)])
    asyncio.run(trainer.store.close())
    print(json.dumps(asyncio.run(account(folder, algorithm.settings, trainer.result))))


if __name__ == "__main__":
    main()
