"""A VERL run put together: the parts of GRPO's loop, with VERL's processes as learner and engine."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from omegaconf import OmegaConf

import agentlightning.engine.torch_setup  # noqa: F401 -- before what imports torch # pyright: ignore[reportUnusedImport]
from agentlightning.errors import BadRequestError
from agentlightning.training.checkpoint.folder import CheckpointFolder
from agentlightning.training.checkpoint.opening import open_run
from agentlightning.training.checkpoint.resume import CHECKPOINTS, Resumption
from agentlightning.training.external.verl.adapters import copy_newest_model
from agentlightning.training.external.verl.session import VERLSession
from agentlightning.training.external.verl.settings import VERLSettings
from agentlightning.training.external.verl.updates import PLACE, VERLKeeper, VERLRun
from agentlightning.training.loop import result_so_far
from agentlightning.training.parts import RunParts
from agentlightning.training.policies.learners import Learner
from agentlightning.training.policies.remote import RemoteEngine, RemoteLearners, RemotePolicy
from agentlightning.training.policies.serving import serve_policies
from agentlightning.training.progress import make_progress
from agentlightning.training.result import GRPOResult
from agentlightning.training.run_inputs import RunSource, triplet_adapter
from agentlightning.training.runs.run_folder import RunFolder
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import items_of
from agentlightning.types import Dataset

logger = logging.getLogger(__name__)


async def run_verl(
    algorithm: RunSource, settings: VERLSettings, train: Dataset[Any] | None, val: Dataset[Any] | None
) -> GRPOResult:
    """Train with VERL's trainer; see `VERL.run`."""
    tasks, held_out = items_of(train), items_of(val)
    config = _scheduled(settings, len(tasks), len(held_out))
    settings = VERLSettings(config=config, given=settings.given)
    grpo = settings.as_grpo(len(tasks))
    triplet_adapter(algorithm)  # refuses one that makes no triplets before anything is begun
    store, log = algorithm.get_store(), algorithm.get_run_log()
    longest = config.data.max_prompt_length + config.data.max_response_length
    policy = await asyncio.to_thread(RemotePolicy, grpo.model, longest, "actor_rollout_ref.model.path")
    async with AsyncExitStack() as stack:
        held = stack.enter_context(ExitStack())
        opened = await open_run(algorithm, grpo, tasks, held_out, held, verl=settings.recorded())
        resume, folder = opened.resume, opened.folder
        folder.write_config(verl=settings.recorded(), grpo=grpo.as_json())
        if resume.checkpoint is not None and resume.steps >= grpo.max_steps:
            return _ended_before(resume, folder)
        if resume.checkpoint is not None:
            policy.weight_version = resume.checkpoint.facts["weight_version"]
        session = VERLSession(
            _resumed(config, resume),
            _link(policy, grpo),
            folder.path.resolve() / "verl",
            steps=grpo.max_steps,
            held_out=len(held_out),
        )
        stack.push_async_callback(asyncio.to_thread, session.stop)
        await asyncio.to_thread(session.start)
        progress = make_progress(grpo.progress)
        stack.callback(progress.close)
        progress.note("VERL starts its processes and loads the model")
        learners = RemoteLearners(Learner(None, grpo, policy), session)
        learners.serve_at((await asyncio.to_thread(session.call, "addresses"))[0])
        proxy = await serve_policies(algorithm.get_llm_proxy(), store, learners, grpo, stack)
        parts = RunParts.of(
            algorithm, grpo, learners, proxy, resume, progress, held_out=held_out, tokens=grpo.record_tokens
        )
        keeper = VERLKeeper(
            folder=CheckpointFolder(folder.path / CHECKPOINTS, limit=grpo.save_total_limit),
            learners=learners,
            log=log,
            run_facts=opened.facts,
            every=session.saves_every,
            saved=resume.steps,
        )
        keeper.session = session
        run = VERLRun(parts=parts, folder=folder, keeper=keeper, tasks=tasks, held_out=held_out)
        run.learn_by(session, evaluates_first=bool(config.trainer.val_before_train))
        result = await run.train()
        await asyncio.to_thread(session.wait_for_end)
    result.late_calls = await run.late_calls()
    return result


def _ended_before(resume: Resumption, folder: RunFolder) -> GRPOResult:
    """Return the result of a run whose last step an earlier start has taken: VERL would end before it serves."""
    assert resume.checkpoint is not None
    copy_newest_model(folder.path / "verl", folder.model)
    if not resume.state["evaluated"]:
        logger.warning("The run ended before its last evaluation, and VERL serves nothing after its last step")
    return result_so_far(resume, folder, resume.checkpoint.facts["weight_version"])


def _scheduled(settings: VERLSettings, tasks: int, held_out: int) -> Any:
    """Return the configuration with validation where there is something to validate on.

    Raises:
        BadRequestError: there is no task, or a schedule of validation without held-out tasks.
    """
    config = settings.config
    if not tasks:
        raise BadRequestError("VERL needs tasks: pass train_dataset to fit, with at least one task")
    if not held_out:
        if config.trainer.test_freq > 0:
            raise BadRequestError(
                f"trainer.test_freq={config.trainer.test_freq} has no effect without tasks to validate on: pass "
                "val_dataset to fit, or leave it out"
            )
        return OmegaConf.merge(config, {"trainer": {"val_before_train": False, "test_freq": -1}})
    every = config.trainer.test_freq if config.trainer.test_freq > 0 else settings.steps(tasks)
    return OmegaConf.merge(config, {"trainer": {"test_freq": every}})


def _link(policy: RemotePolicy, grpo: GRPOSettings) -> dict[str, Any]:
    """Return what VERL's processes need to know to serve the model as the run does."""
    return {
        "model_name": RemoteEngine.model_name,
        "eos_ids": sorted(policy.eos_ids),
        "vocabulary": int(policy.config.vocab_size),
        "context_length": policy.context_length,
        "max_new_tokens": grpo.max_completion_length,
        "seed": grpo.seed,
        "tells_tokens": grpo.record_tokens != "none",
    }


def _resumed(config: Any, resume: Resumption) -> Any:
    """Return the configuration that goes on from the checkpoint of an earlier start."""
    if resume.checkpoint is None:
        return OmegaConf.merge(config, {"trainer": {"resume_mode": "disable"}})
    place = json.loads((resume.checkpoint.path / PLACE).read_text())["path"]
    told = {"resume_mode": "resume_path", "resume_from_path": place, "val_before_train": False}
    return OmegaConf.merge(config, {"trainer": told})
