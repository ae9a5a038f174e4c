"""`LegacyAgentRunner` polls a v0.1 client for tasks, runs an agent on them, and posts the results."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel

from agentlightning.adapter import TraceAdapter
from agentlightning.legacy.client import AgentLightningClient, warn_once
from agentlightning.litagent.litagent import LitAgent, is_v0_1_rollout_api
from agentlightning.tracer.base import Tracer
from agentlightning.types import NamedResources, ParallelWorkerBase, Rollout, RolloutLegacy, Span, Task, Triplet

logger = logging.getLogger(__name__)


class LegacyAgentRunner(ParallelWorkerBase):
    """Deprecated: the runner of the v0.1 protocol; use `LitAgentRunner`. The caller initialises the tracer.

    `client` provides the tasks, and `triplet_exporter` converts the spans of an attempt into triplets. `iter` ends
    after `max_tasks` tasks.
    """

    def __init__(
        self,
        agent: LitAgent[Any],
        client: AgentLightningClient,
        tracer: Tracer,
        triplet_exporter: TraceAdapter[Any],
        worker_id: int | None = None,
        max_tasks: int | None = None,
    ) -> None:
        warn_once("LegacyAgentRunner", "use agl.LitAgentRunner")
        super().__init__()
        self.agent = agent
        self.client = client
        self.tracer = tracer
        self.triplet_exporter = triplet_exporter
        self.worker_id = worker_id
        self.max_tasks = max_tasks

    def run(self) -> bool:
        """Run one task; return False if no task was available or its resources are missing."""
        return asyncio.run(self.run_async())

    def iter(self) -> int:
        """Run tasks until `max_tasks` are done and return their number."""
        return asyncio.run(self.iter_async())

    async def iter_async(self) -> int:
        done = 0
        while self.max_tasks is None or done < self.max_tasks:
            done += await self.run_async()
        return done

    async def run_async(self) -> bool:
        task = await self.client.poll_next_task_async()
        if task is None:
            return False
        if task.resources_id is None:
            resources = await self.client.get_latest_resources_async()
        else:
            resources = await self.client.get_resources_by_id_async(task.resources_id)
        if resources is None:
            logger.error("[Rollout %s] no resources %s", task.rollout_id, task.resources_id or "are published")
            return False
        rollout = RolloutLegacy(rollout_id=task.rollout_id, task=task)
        try:
            self._call_hook("on_rollout_start", task, runner=self, tracer=self.tracer)
            async with self.tracer.trace_context(name=task.rollout_id):
                output = await self._call(task, resources.resources)
            try:
                spans = list(self.tracer.get_last_trace())
            except NotImplementedError:
                spans = []
            rollout = as_rollout(output, task, spans, self.triplet_exporter)
            self._call_hook("on_rollout_end", task, rollout, runner=self, tracer=self.tracer)
        except Exception:  # the boundary: a failed attempt is posted like any other, and the next task is done
            logger.exception("[Rollout %s] the agent failed", task.rollout_id)
        await self.client.post_rollout_async(rollout)
        return True

    async def _call(self, task: Task, resources: NamedResources) -> object:
        name = "training_rollout" if task.mode == "train" else "validation_rollout"
        method = getattr(self.agent, f"{name}_async" if self.agent.is_async() else name)
        if is_v0_1_rollout_api(method):
            arguments: tuple[object, ...] = (task.input, task.rollout_id, resources)
        else:
            rollout = Rollout(
                rollout_id=task.rollout_id,
                input=task.input,
                start_time=task.create_time or time.time(),
                mode=task.mode,
                resources_id=task.resources_id,
                status="running",
            )
            arguments = (task.input, resources, rollout)
        output = method(*arguments) if self.agent.is_async() else await asyncio.to_thread(method, *arguments)
        return await output if inspect.isawaitable(output) else output

    def _call_hook(self, hook: str, *about: object, **parts: object) -> None:
        try:
            getattr(self.agent, hook)(*about, **parts)
        except Exception:  # a failing hook must not fail the rollout
            logger.exception("%s of %s failed", hook, type(self.agent).__name__)


def as_rollout(output: object, task: Task, spans: Sequence[Span], exporter: TraceAdapter[Any]) -> RolloutLegacy:
    """Return a result: the agent's return value, completed from the trace. The reward is that of the last triplet.

    Raises:
        TypeError: `output` is not a number, None, a `RolloutLegacy`, or a list of triplets, dicts or spans.
    """
    fields: dict[str, Any] = {}
    if isinstance(output, (int, float)):
        fields["final_reward"] = float(output)
    elif isinstance(output, list) and output:
        items = cast("list[Any]", output)
        if all(isinstance(item, Triplet) for item in items):
            fields["triplets"] = items
        elif all(isinstance(item, (dict, ReadableSpan, BaseModel)) for item in items):
            fields["trace"] = [_plain(item) for item in items]
        else:
            raise TypeError(f"A list from a v0.1 agent must hold triplets, dicts or spans; got {items[:3]!r}")
    elif output is not None and not isinstance(output, (list, RolloutLegacy)):
        raise TypeError(f"A v0.1 agent must return None, a number, a RolloutLegacy or a list; got {output!r}")
    result = output if isinstance(output, RolloutLegacy) else RolloutLegacy(rollout_id=task.rollout_id, **fields)
    triplets = result.triplets
    if triplets is None and spans:
        export: object = exporter.adapt(spans)
        triplets = [triplet for triplet in export if isinstance(triplet, Triplet)] if isinstance(export, list) else None  # pyright: ignore[reportUnknownVariableType] -- an exporter of the user's
    rewards = [triplet.reward for triplet in triplets or () if triplet.reward is not None]
    return result.model_copy(
        update={
            "task": result.task or task,
            "triplets": triplets,
            "trace": result.trace if result.trace is not None else [_plain(span) for span in spans],
            "final_reward": result.final_reward if result.final_reward is not None or not rewards else rewards[-1],
        }
    )


def _plain(span: ReadableSpan | BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(span, ReadableSpan):
        return json.loads(span.to_json())
    return span.model_dump(mode="json") if isinstance(span, BaseModel) else dict(span)
