"""A program that trains with runner processes, one of which is killed with SIGKILL in the middle of a rollout.

`python -m tests.training.killed MODEL FOLDER` prints what the run and its store hold, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import SMALL, ask, calls_of, rollouts_of, say


@agl.rollout
def agent(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
    """The reward is the length of the reply; one rollout takes its process with it, once."""
    reply = ask(llm, [say(task)])["content"]
    last_words = Path(os.environ["LAST_WORDS"])
    if task == "fatal" and (rollout.metadata or {})["step"] == 2 and not last_words.exists():
        last_words.write_text(f"{rollout.rollout_id} {rollout.attempt.attempt_id}")
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(reply)) + rollout.start_time % 1


async def account(store: Any, result: Any, dead: list[str]) -> dict[str, Any]:
    """Return what became of the rollout whose attempt was killed, and the books."""
    rollouts = await rollouts_of(store)
    attempts = await store.query_attempts(dead[0])
    rewards = [span for span in await store.query_spans(dead[0]) if agl.get_reward_value(span) is not None]
    await store.close()
    return {
        "statuses": [rollout.status for rollout in rollouts],
        "dead": dead[1],
        "attempts": [[a.attempt_id, a.status, a.outcome, a.outcome_reason] for a in attempts],
        "rewards": [span.attempt_id for span in rewards],
        "captured": sum(figures.calls_captured for figures in result.metrics) + sum(result.late_calls.values()),
        "excluded": [dict(figures.calls_excluded) for figures in result.metrics],
        "trained": [figures.calls_trained for figures in result.metrics],
        "steps": result.steps,
    }


async def everything(folder: Path, result: Any) -> dict[str, Any]:
    store = agl.SQLiteLightningStore(folder / "store.db")
    calls = await calls_of(store, await rollouts_of(store))
    return {"calls": len(calls), **await account(store, result, (folder / "dead").read_text().split())}


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    os.environ["LAST_WORDS"] = str(folder / "dead")
    trainer = agl.Trainer(
        algorithm=agl.GRPO(**{**SMALL, "model": model, "max_steps": 3, "output_dir": folder / "run"}),
        runner={"type": "agentlightning.LitAgentRunner", "heartbeat_interval": 0.2, "interval_jitter": 0.0},
        store=agl.SQLiteLightningStore(folder / "store.db", lease_seconds=2.0, scan_debounce_seconds=0.1),
        strategy={"type": "cs", "server_port": 0},
        n_runners=2,
    )
    trainer.fit(agent, train_dataset=["fatal", "harmless"])
    asyncio.run(trainer.store.close())
    print(json.dumps(asyncio.run(everything(folder, trainer.result))))


if __name__ == "__main__":
    main()
