"""GRPO: sample rollouts in groups, compare each with its group, learn from what was better, serve the new weights.

The algorithm as the Trainer sees it: settings, and the parts of a run put together. The loop is in `loop.py`. The
formulas are in `losses/`: `advantages.py` (group-relative advantage, DeepSeekMath, arXiv:2402.03300) and `objective.py`
(clipped objective), both pure. The weights and their optimizer are in `learner/`.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
from contextlib import AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

import agentlightning.engine.torch_setup  # noqa: F401 -- before what imports torch # pyright: ignore[reportUnusedImport]
from agentlightning.adapter import TraceToTripletBase
from agentlightning.algorithm.base import Algorithm
from agentlightning.errors import BadRequestError
from agentlightning.training.alarms import Alarms
from agentlightning.training.checkpoint.folder import CheckpointFolder
from agentlightning.training.checkpoint.keeper import CheckpointKeeper
from agentlightning.training.checkpoint.opening import open_run
from agentlightning.training.checkpoint.resume import CHECKPOINTS, Resumption
from agentlightning.training.chosen.choosing import Pick
from agentlightning.training.group_rewards import GroupReward, check_group_reward, name_of_group_reward
from agentlightning.training.learner.determinism import deterministic_torch
from agentlightning.training.learner.memory import check_memory
from agentlightning.training.loop import GRPORun
from agentlightning.training.parts import RunParts
from agentlightning.training.policies.learners import Learner, Learners
from agentlightning.training.policies.loading import load_policies
from agentlightning.training.policies.serving import engine_for, serve_policies
from agentlightning.training.progress import make_progress
from agentlightning.training.recording import RunRecorder
from agentlightning.training.result import GRPOResult
from agentlightning.training.run_checks import DriftGuard
from agentlightning.training.run_inputs import (
    check_device,
    check_model,
    check_one_time_limit,
    check_tasks,
    decoder_of,
    triplet_adapter,
)
from agentlightning.training.settings import GRPOSettings, make_settings
from agentlightning.training.tasks import items_of
from agentlightning.types import Dataset, RolloutConfig

__all__ = ["GRPO", "GRPOResult"]


class GRPO(Algorithm):
    """Train the weights of a transformers model on the rewards of an agent's rollouts.

    `GRPO(model="path", max_steps=20, batch_size=16, num_generations=8, ...)`; every setting, its meaning and its
    default are in `GRPOSettings`. Runs on a CPU for small models; on a GPU with `device="cuda"`.

    Args:
        model: folder of the model; with `policies` that of those that name none.
        group_reward: gives the rollouts of a task their rewards together, in the place of their own: an
            `agl.RankingReward`, or a function `(task, answers) -> rewards`, where an answer is the messages of the
            agent from its first reply on. Rollouts whose judge fails have no reward and are not trained.

    Raises:
        TypeError: an unknown setting, and the nearest right one; or `group_reward` is neither of these.
        BadRequestError: a value out of its range.
    """

    def __init__(
        self, model: str | Path | None = None, *, group_reward: GroupReward | None = None, **settings: Any
    ) -> None:
        self.settings: GRPOSettings = make_settings(model, settings)
        self.group_reward = check_group_reward(group_reward, self.settings.num_generations)

    pick: Pick | None = None
    """What a subclass that chooses rollouts by a function has; see `agl.SFT`."""

    @property
    @override
    def shows_progress(self) -> bool:
        return self.settings.progress != "none"

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        """Return a copy of so many steps."""
        twin = copy.copy(self)
        twin.settings = dataclasses.replace(self.settings, max_steps=max_iterations)
        return twin

    @override
    def recorded_settings(self) -> dict[str, object]:
        judged = {} if self.group_reward is None else {"group_reward": name_of_group_reward(self.group_reward)}
        return {**self.settings.as_json(), **judged}

    @override
    def check_rollout_config(self, config: RolloutConfig) -> None:
        check_one_time_limit(type(self).__name__, self.settings.rollout_timeout_seconds, config)

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> GRPOResult:
        """Train on `train_dataset`; measure on `val_dataset`, if given, before, between and after.

        Raises:
            BadRequestError: there is no task to train on, the model is not there, the adapter makes no triplets, the
                device or the output folder cannot be used, or a setting does not fit the model or the tasks.
            OutOfMemoryError: the run cannot fit into the memory, or one row alone does not in a step.
            NonFiniteLossError: the loss was not finite in three steps in a row.
            NoTrainableCallError: no rollout with a reward in the first step has a model call that can be trained.
            TooMuchDriftError: more turns drifted than `max_drift` allows.
            NoScoredRolloutError: no rollout of the whole run could be learned from.
        """
        tasks, held_out = items_of(train_dataset), items_of(val_dataset)
        check_tasks(type(self).__name__, self.settings, tasks, held_out)
        for own in self.settings.by_policy().values():
            check_model(own.model)
        check_device(self.settings.device)
        adapter = self._triplet_adapter()
        settings, store, log = self.settings, self.get_store(), self.get_run_log()
        async with AsyncExitStack() as stack:
            held = stack.enter_context(ExitStack())
            opened = await open_run(self, settings, tasks, held_out, held)
            resume, folder = opened.resume, opened.folder
            folder.write_config(**{type(self).__name__.lower(): settings.as_json()})
            stack.enter_context(deterministic_torch(settings.device) if settings.deterministic else nullcontext())
            own = list(settings.by_policy().values())
            await asyncio.to_thread(check_memory, *own)
            learners = await asyncio.to_thread(self._load_policies, resume)
            engines = [engine_for(each, store, folder.path, begun=resume.steps) for each in learners.all]
            learners = Learners(learners.all, engines)
            for engine in engines:
                stack.callback(engine.stop)
                await asyncio.to_thread(engine.start)
            proxy = await serve_policies(self.get_llm_proxy(), store, learners, settings, stack)
            progress = make_progress(self.settings.progress)
            stack.callback(progress.close)
            parts = RunParts(
                settings=settings,
                store=store,
                learners=learners,
                proxy=proxy,
                adapter=adapter,
                progress=progress,
                resume=resume,
                recorder=RunRecorder(log, learners, settings.record_tokens, has_held_out=bool(held_out)),
                guard=DriftGuard(settings.max_drift, decoder_of(learners)),
                rollout_config=self.get_rollout_config(),
                beside=self.get_initial_resources() or {},
                group_reward=self.group_reward,
                pick=self.pick,
                alarms=Alarms(settings.alarms, settings.other_names),
            )
            keeper = CheckpointKeeper(
                folder=CheckpointFolder(folder.path / CHECKPOINTS, limit=settings.save_total_limit),
                learners=learners,
                log=log,
                run_facts=opened.facts,
                every=settings.save_steps,
                saved=resume.steps,
            )
            run = GRPORun(parts=parts, folder=folder, keeper=keeper, tasks=tasks, held_out=held_out)
            result = await run.train()
        result.late_calls = await run.late_calls()
        return result

    def _load_policies(self, resume: Resumption) -> Learners:
        own, most = self.settings.by_policy(), self.settings.max_completion_length
        learners = [
            Learner(name, own[name], one) for name, one in load_policies(self.settings, resume.checkpoint).items()
        ]
        for each in learners:
            if most >= each.policy.context_length:
                raise BadRequestError(
                    f"max_completion_length={most} leaves no room for a prompt: the context of the model is "
                    f"{each.policy.context_length} tokens"
                )
        return Learners(learners)

    def _triplet_adapter(self) -> TraceToTripletBase:
        adapter = triplet_adapter(self)
        if self.settings.policies is not None and getattr(adapter, "policy", None) is not None:
            raise BadRequestError(
                f"GRPO trains {', '.join(self.settings.policies)}, and the adapter selects policy={adapter.policy!r}: "  # pyright: ignore[reportAttributeAccessIssue]
                "leave the adapter's policy= out"
            )
        return adapter


def _signature() -> inspect.Signature:
    """Return the constructor's signature with every setting by name, for help texts and command lines."""
    own = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str | Path")]
    own += [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in dataclasses.fields(GRPOSettings)
        if f.name != "model"
    ]
    return inspect.Signature(own)


GRPO.__signature__ = _signature()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
