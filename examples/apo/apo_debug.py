"""Three ways to debug an agent (that of `room_selector.py`) without training it.

python apo_debug.py --mode runner     one task, without the queue: its result, and its spans in the store
python apo_debug.py --mode hook       a hook that prints the spans of each rollout, failed ones too
python apo_debug.py --mode trainer    store, algorithm and runner in this process, with a detailed log
"""

# pyright: reportIncompatibleMethodOverride=false
# a callback of a hook takes only the parameters that it needs, and may be an ordinary function

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from room_selector import make_tasks, selects_room
from room_selector_apo import resources
from stand_in import model_server

import agentlightning as agl

TASKS = make_tasks()[0][:3]


def show(spans: Sequence[agl.Span]) -> None:
    for span in spans:
        print(f"  {span.name} {span.attributes.get('gen_ai.completion.0.content', '')}".rstrip())


async def debug_with_runner() -> None:
    """Run one task in this thread, so that breakpoints in the agent work and its exceptions are raised here."""
    store = agl.InMemoryLightningStore()
    with agl.LitAgentRunner[dict[str, Any]](tracer=agl.OtelTracer()).run_context(
        agent=selects_room, store=store
    ) as runner:
        rollout = await runner.step(TASKS[0], resources=resources())
    spans = await store.query_spans(rollout.rollout_id)
    print(f"{rollout.status}, reward {agl.find_final_reward(spans)}")
    show(spans)


class PrintSpans(agl.Hook):
    """Prints the spans of a rollout, or its exception."""

    def on_rollout_error(self, *, rollout: agl.AttemptedRollout, error: BaseException) -> None:
        print(f"{rollout.input} raised {error!r}")

    def on_rollout_end(self, *, rollout: agl.AttemptedRollout, spans: list[agl.Span]) -> None:
        print(f"{rollout.input['room']}: reward {agl.find_final_reward(spans)}")
        show(spans)


async def debug_with_hook() -> None:
    """Run the tasks through the queue, with a runner that has a hook and ends when the queue is empty."""
    store = agl.InMemoryLightningStore()
    await store.add_resources(resources())
    for task in TASKS:
        await store.enqueue_rollout(task)
    runner = agl.LitAgentRunner[dict[str, Any]](tracer=agl.OtelTracer())
    with runner.run_context(agent=selects_room, store=store, hooks=[PrintSpans()]):
        await runner.iter(exit_when_idle=0.0)


def debug_with_trainer() -> None:
    """Run the tasks with `fit` of a Trainer that learns nothing, on threads, with each step in the log."""
    agl.setup_logging("DEBUG")
    trainer = agl.Trainer(strategy="shm", initial_resources=resources(), hooks=[PrintSpans()])
    trainer.dev(selects_room, TASKS)
    print(f"rewards {trainer.result.rewards}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["runner", "hook", "trainer"], required=True)
    mode = parser.parse_args().mode
    with model_server():
        if mode == "trainer":
            debug_with_trainer()
        else:
            asyncio.run(debug_with_runner() if mode == "runner" else debug_with_hook())


if __name__ == "__main__":
    main()
