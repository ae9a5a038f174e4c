"""A TRL run put together: the parts of GRPO's loop, with TRL's trainer as the learner."""

from __future__ import annotations

import asyncio
import copy
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import agentlightning.engine.torch_setup  # noqa: F401 -- before what imports torch # pyright: ignore[reportUnusedImport]
from agentlightning.errors import BadRequestError
from agentlightning.store import LightningStore
from agentlightning.training.checkpoint.keeper import CheckpointKeeper
from agentlightning.training.checkpoint.opening import open_run
from agentlightning.training.checkpoint.resume import CHECKPOINTS, Resumption
from agentlightning.training.external.trl.served import ServedModel
from agentlightning.training.external.trl.session import TRLSession
from agentlightning.training.external.trl.settings import TRLSettings
from agentlightning.training.external.trl.updates import TRLCheckpoints, TRLRun
from agentlightning.training.parts import RunParts
from agentlightning.training.policies.learners import Learner, Learners
from agentlightning.training.policies.serving import engine_for, serve_policies
from agentlightning.training.progress import make_progress
from agentlightning.training.result import GRPOResult
from agentlightning.training.run_inputs import RunSource, check_model, triplet_adapter
from agentlightning.training.runs.run_folder import RunFolder
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import items_of
from agentlightning.types import Dataset


async def run_trl(
    algorithm: RunSource, settings: TRLSettings, train: Dataset[Any] | None, val: Dataset[Any] | None
) -> GRPOResult:
    """Train with TRL's trainer; see `TRL.run`."""
    tasks, held_out = items_of(train), items_of(val)
    if not tasks:
        raise BadRequestError("TRL needs tasks: pass train_dataset to fit, with at least one task")
    grpo = settings.as_grpo(len(tasks))
    if grpo.eval_steps and not held_out:
        raise BadRequestError(
            f"eval_steps={grpo.eval_steps} has no effect without tasks to evaluate on: pass val_dataset to fit, or "
            "leave eval_steps out"
        )
    check_model(grpo.model)
    triplet_adapter(algorithm)  # refuses one that makes no triplets before anything is begun
    store, log = algorithm.get_store(), algorithm.get_run_log()
    async with AsyncExitStack() as stack:
        held = stack.enter_context(ExitStack())
        opened = await open_run(algorithm, grpo, tasks, held_out, held, trl=settings.facts())
        resume, folder = opened.resume, opened.folder
        folder.write_config(trl=settings.facts(), grpo=grpo.as_json())
        session = await asyncio.to_thread(_session, settings, folder, grpo, resume)
        stack.callback(session.stop)
        await asyncio.to_thread(session.start)
        learners = _learners(session, grpo, resume, store, folder)
        for engine in learners.engines:
            stack.callback(engine.stop)
            await asyncio.to_thread(engine.start)
        proxy = await serve_policies(algorithm.get_llm_proxy(), store, learners, grpo, stack)
        progress = make_progress(grpo.progress)
        stack.callback(progress.close)
        parts = RunParts.of(algorithm, grpo, learners, proxy, resume, progress, held_out=held_out)
        keeper = CheckpointKeeper(
            folder=TRLCheckpoints(folder.path / CHECKPOINTS, session, limit=grpo.save_total_limit),
            learners=learners,
            log=log,
            run_facts=opened.facts,
            every=grpo.save_steps,
            saved=resume.steps,
        )
        run = TRLRun(parts=parts, folder=folder, keeper=keeper, tasks=tasks, held_out=held_out)
        run.learn_by(session, settings)
        result = await run.train()
    result.late_calls = await run.late_calls()
    return result


def _session(settings: TRLSettings, folder: RunFolder, grpo: GRPOSettings, resume: Resumption) -> TRLSession:
    checkpoint = None if resume.checkpoint is None else resume.checkpoint.path
    return TRLSession(settings, folder.path / "trl", steps=grpo.max_steps, resume=checkpoint)


def _learners(
    session: TRLSession, grpo: GRPOSettings, resume: Resumption, store: LightningStore, folder: RunFolder
) -> Learners:
    """Return TRL's model as the only policy of the run, with the engine that serves it.

    Raises:
        BadRequestError: replies could be as long as the context of the model.
    """
    version = 0 if resume.checkpoint is None else resume.checkpoint.facts["weight_version"]
    policy = ServedModel(session.model, copy.deepcopy(session.tokenizer), weight_version=version)
    if grpo.max_completion_length >= policy.context_length:
        raise BadRequestError(
            f"max_completion_length={grpo.max_completion_length} leaves no room for a prompt: the context of the model "
            f"is {policy.context_length} tokens"
        )
    learner = Learner(None, grpo, policy)
    return Learners([learner], [engine_for(learner, store, folder.path, begun=resume.steps)])
