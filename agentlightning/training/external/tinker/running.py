"""A Tinker run put together: the parts of GRPO's loop, with the service as learner and engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

import agentlightning.engine.torch_setup  # noqa: F401 -- before what imports torch # pyright: ignore[reportUnusedImport]
from agentlightning.engine.chat_server import ChatServer, ServedAs
from agentlightning.errors import EngineError
from agentlightning.training.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder
from agentlightning.training.checkpoint.keeper import CheckpointKeeper
from agentlightning.training.external.remote import RemoteEngine, RemotePolicy
from agentlightning.training.external.tinker.service import PLACE, TinkerService
from agentlightning.training.loop import GRPORun
from agentlightning.training.parts import RunParts
from agentlightning.training.policies.remote import RemoteLearners
from agentlightning.training.progress import make_progress
from agentlightning.training.resume import open_run
from agentlightning.training.rows import StepRows
from agentlightning.training.run_inputs import RunSource, check_tasks, triplet_adapter
from agentlightning.training.serving import serve_policies
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import items_of
from agentlightning.training.updater import Learner, StepUpdate
from agentlightning.training.weight_updates import WeightUpdates
from agentlightning.types import Dataset

if TYPE_CHECKING:
    from agentlightning.training.result import GRPOResult

_LONGEST: Final = 32_768
"""Tokens of a row at most, where the model's settings name more."""
_ANSWER_SECONDS: Final = 600.0
"""For the service to answer one request of a step; such requests wait there for others."""


async def run_tinker(
    algorithm: RunSource,
    settings: GRPOSettings,
    train: Dataset[Any] | None,
    val: Dataset[Any] | None,
    place: Mapping[str, Any],
) -> GRPOResult:
    """Train with the Tinker service; see `Tinker`, whose arguments of these names `place` has."""
    tasks, held_out = items_of(train), items_of(val)
    check_tasks("Tinker", settings, tasks, held_out)
    triplet_adapter(algorithm)  # refuses one that makes no triplets before anything is begun
    policy = await asyncio.to_thread(RemotePolicy, place["tokenizer"], _LONGEST, "tokenizer")
    async with AsyncExitStack() as stack:
        held, facts = stack.enter_context(ExitStack()), {"rank": place["rank"]}
        opened = await open_run(algorithm, settings, tasks, held_out, held, tinker=facts)
        resume, folder, state = opened.resume, opened.folder, None
        folder.write_config(tinker={**settings.as_json(), **facts})
        if resume.checkpoint is not None:
            policy.weight_version = resume.checkpoint.facts["weight_version"]
            state = json.loads((resume.checkpoint.path / PLACE).read_text())["state"]
        service = TinkerService(settings.model, place["base_url"], place["api_key"], seconds=_ANSWER_SECONDS)
        stack.callback(service.close)
        began = (place["rank"], settings.seed, state, policy.weight_version, place["connect_seconds"])
        await asyncio.to_thread(service.open, *began)
        served = ServedAs(
            *(RemoteEngine.model_name, policy.eos_ids, int(policy.config.vocab_size), policy.context_length),
            *(settings.max_completion_length, settings.seed, "agl.Tinker"),
        )
        server = ChatServer(service, policy.tokenizer, served, token=service.token)
        await server.start("127.0.0.1")
        stack.callback(server.stop)
        learners = RemoteLearners(Learner(None, settings, policy), service)
        learners.serve_at(server.base_url)
        proxy = await serve_policies(algorithm.get_llm_proxy(), algorithm.get_store(), learners, settings, stack)
        progress = make_progress(settings.progress)
        stack.callback(progress.close)
        parts = RunParts.of(algorithm, settings, learners, proxy, resume, progress, held_out=held_out)
        folder_of_states = _Checkpoints(folder.path / CHECKPOINTS, limit=settings.save_total_limit)
        keeper = CheckpointKeeper(
            folder=folder_of_states,
            learners=learners,
            log=algorithm.get_run_log(),
            run_facts=opened.facts,
            every=settings.save_steps,
            saved=resume.steps,
        )
        run = GRPORun(parts=parts, folder=folder, keeper=keeper, tasks=tasks, held_out=held_out)
        run._updates = updates = _Updates(parts)
        updates.service = folder_of_states.service = service
        result = await run.train()
    result.late_calls = await run.late_calls()
    return result


class _Updates(WeightUpdates):
    """Hands the rows of each step to the service while no call is served."""

    service: TinkerService

    @override
    def _update(self, step: int, rows: StepRows) -> StepUpdate:
        learners, settings = self._parts.learners, self._parts.settings
        rate, clip, version = settings.learning_rate_at(step), settings.max_grad_norm, learners.weight_version + 1
        share = rows.share("token")
        figures = self.service.learn(rows.samples, rows.advantages, share=share, learning_rate=rate, clip=clip)
        self.service.publish(version)
        learners.advance(version)
        return StepUpdate(figures, [], frozenset((None,)))


class _Checkpoints(CheckpointFolder):
    """Checkpoints that say where the service keeps the state of a step."""

    service: TinkerService

    @override
    def write(self, step: int, fill: Callable[[Path], None], facts: Mapping[str, object]) -> Checkpoint:
        try:
            return super().write(step, lambda folder: self.service.save(folder, step), facts)
        except EngineError as error:
            raise OSError(str(error)) from error  # a checkpoint that cannot be written: the run tells it and goes on
