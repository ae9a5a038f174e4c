"""A run that TRL trains. Its `GRPOTrainer` learns, and our engine serves the model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer
from typing_extensions import override

from agentlightning.engine.served import ServedModel
from agentlightning.engine.torch_setup import one_thread
from agentlightning.training.batch import Batch, make_batch
from agentlightning.training.external.trl.rows import trl_rows
from agentlightning.training.external.trl.session import TRLSession
from agentlightning.training.external.trl.settings import TRLSettings
from agentlightning.training.learner.figures import measured_rows
from agentlightning.training.learner.forward import score
from agentlightning.training.losses.kl import update_figures
from agentlightning.training.policies import check_context, engine_for
from agentlightning.training.policy_files import digest_of
from agentlightning.training.result import GRPOResult
from agentlightning.training.resume import OpenRun
from agentlightning.training.rows import StepRows
from agentlightning.training.run import train
from agentlightning.training.run_inputs import RunSource, check_model, check_tasks
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import items_of
from agentlightning.training.updater import Learner, StepUpdate, Updater
from agentlightning.types import Dataset


async def run_trl(
    source: RunSource, settings: TRLSettings, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
) -> GRPOResult:
    """Train with TRL's trainer; see `TRL.run`."""
    tasks, held_out = items_of(train_dataset), items_of(val_dataset)
    grpo, facts = settings.as_grpo(len(tasks)), settings.facts()
    check_tasks("TRL", grpo, tasks, held_out)
    if len(tasks) < grpo.batch_size:  # TRL's batch has one size: it has several groups of each task then
        tasks = tasks * math.ceil(grpo.batch_size / len(tasks))
    check_model(grpo.model)

    async def make_updater(opened: OpenRun, stack: AsyncExitStack) -> TRLUpdater:
        checkpoint, folder = opened.resume.checkpoint, opened.folder.path
        place = None if checkpoint is None else checkpoint.path
        session = await asyncio.to_thread(TRLSession, settings, folder / "trl", steps=grpo.max_steps, resume=place)
        stack.callback(session.stop)
        await asyncio.to_thread(session.start)
        updater = TRLUpdater(
            session, settings, grpo, version=0 if checkpoint is None else checkpoint.facts["weight_version"]
        )
        engine = engine_for(updater.learners[0], source.get_store(), folder, begun=opened.resume.steps)
        updater.engines = (engine,)
        stack.callback(engine.stop)
        await asyncio.to_thread(engine.start)
        return updater

    config = {"trl": facts, "grpo": grpo.as_json()}
    return await train(source, grpo, tasks, held_out, make_updater, config=config, facts={"trl": facts})


class TRLUpdater(Updater):
    """Passes the rows of each step to TRL's trainer."""

    def __init__(self, session: TRLSession, settings: TRLSettings, grpo: GRPOSettings, *, version: int) -> None:
        self._session, self._trl = session, settings
        # not TRL's own tokenizer, which it changes
        tokenizer = AutoTokenizer.from_pretrained(grpo.model, local_files_only=True, trust_remote_code=False)
        self._policy = ServedModel(session.model, tokenizer, weight_version=version)
        super().__init__([Learner(None, grpo, self._policy)])
        check_context(self.learners[0])

    @override
    def update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        filler = cast("int", self._policy.tokenizer.eos_token_id)
        of_step = trl_rows(rows, self._trl.rollouts, filler=filler, masks_equal=self._trl.trains_without_reward)
        numbers = measured_rows([len(sample.mask) for sample in rows.samples])
        device = self._policy.model.device
        measured = [make_batch([rows.samples[number]], [0.0], device=device) for number in numbers]
        with self.locked():
            before = self._logprobs(measured)
            figures, advantages = self._session.learn(of_step)
            if measured and figures["steps"]:
                engine = torch.cat([row.logprobs[row.mask] for row in measured])  # (N,)
                figures |= update_figures(engine, before, self._logprobs(measured))
        places = {record.rollout_id: place for place, record in enumerate(rows.records)}
        rows.advantages[:] = [advantages[places[sample.rollout_id]] for sample in rows.samples]
        tokens = sum(sum(sample.mask) for sample in rows.samples)
        figures |= {"rows": len(rows.samples), "rollouts": len(rows.samples), "tokens": tokens}
        if not figures["steps"]:
            return StepUpdate(figures)
        self.advance(self.weight_version + 1)
        return StepUpdate(figures, changed=frozenset((None,)))

    def _logprobs(self, rows: Sequence[Batch]) -> Tensor:
        """Return the natural log-probability of each trained token, row after row: (N,)."""
        model, temperature = self._policy.model, self.learners[0].settings.temperature
        with torch.no_grad(), one_thread() if self._policy.is_small else nullcontext():
            logprobs = [score(model, row, temperature, packed=False).logprobs[row.mask] for row in rows]
            return torch.cat(logprobs) if logprobs else torch.zeros(0)

    @override
    def digest(self) -> str:
        return digest_of(self._policy)

    @override
    def save_checkpoint(self, folder: Path, step: int) -> None:
        self._session.save(folder)

    @override
    def save_model(self, folder: Path) -> None:
        self._policy.save(folder)
