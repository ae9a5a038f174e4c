"""Print the spans of one attempt as a tree, and the rewards in them.

    python examples/minimal/write_traces.py

With `AGENT_LIGHTNING_OTLP_ENDPOINT=http://host:4318` a collector gets a copy of the spans.
"""

from __future__ import annotations

import asyncio

import agentlightning as agl
from agentlightning.adapter.tree.tree import TraceTree

PRICES = {"apple": 0.5, "pear": 0.75}


@agl.operation
def look_up(fruit: str) -> float:
    """Look up a price. An operation is a span with its name, arguments, result and times."""
    return PRICES[fruit]


@agl.rollout
async def shopper(task: dict[str, int]) -> None:
    with agl.operation(name="add up", fruits=len(task)) as step:
        total = sum(look_up(fruit) * count for fruit, count in task.items())
        step.set_output(total)
    agl.emit_message(f"the total is {total}")
    agl.emit_object({"basket": task, "total": total})
    agl.emit_reward({"reward": 1.0, "speed": 0.5}, primary_key="reward")  # or return the reward


def show(node: TraceTree, depth: int = 0) -> None:
    """Print a span and its descendants."""
    attributes = {key.removeprefix("agentlightning."): value for key, value in node.span.attributes.items()}
    print("  " * depth + node.span.name, attributes or "")
    for child in sorted(node.children, key=lambda child: child.span.start_time or 0.0):
        show(child, depth + 1)


async def main() -> None:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[dict[str, int]](agl.OtelTracer())
    async with runner.run_context(agent=shopper, store=store) as ready:
        rollout = await ready.step({"apple": 2, "pear": 4}, resources={})
    spans = await store.query_spans(rollout.rollout_id)
    show(TraceTree.from_spans(spans))
    print("reward:", agl.find_final_reward(spans))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main())
