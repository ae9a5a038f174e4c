"""The updates and the checkpoints of a run that TRL makes: the loop of GRPO drives them as its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from typing_extensions import override

from agentlightning.training.checkpoint.folder import Checkpoint, CheckpointFolder
from agentlightning.training.external.trl.rows import trl_rows
from agentlightning.training.external.trl.served import ServedModel, engine_logprobs
from agentlightning.training.external.trl.session import TRLSession
from agentlightning.training.external.trl.settings import TRLSettings
from agentlightning.training.learner.update import measured_rows
from agentlightning.training.loop import GRPORun
from agentlightning.training.losses.kl import update_figures
from agentlightning.training.parts import RunParts
from agentlightning.training.policies.updating import StepUpdate
from agentlightning.training.rows import StepRows
from agentlightning.training.weight_updates import WeightUpdates


class TRLRun(GRPORun):
    """The loop of GRPO, with TRL in the place of its learner."""

    def learn_by(self, session: TRLSession, settings: TRLSettings) -> None:
        """Let TRL take the updates."""
        self._updates = TRLUpdates(self.parts, session, settings)


class TRLUpdates(WeightUpdates):
    """Hands the rows of each step to TRL while no call is served."""

    def __init__(self, parts: RunParts, session: TRLSession, settings: TRLSettings) -> None:
        super().__init__(parts)
        self._session, self._trl = session, settings

    @override
    def _update(self, step: int, rows: StepRows) -> StepUpdate:
        learners, settings = self._parts.learners, self._parts.settings
        tokenizer = self._session.tokenizer
        trl = trl_rows(
            rows, self._trl.rollouts, filler=tokenizer.eos_token_id, masks_idle=self._trl.trains_without_reward
        )
        measured = [rows.samples[number] for number in measured_rows([len(each.mask) for each in rows.samples])]
        policy = cast("ServedModel", learners.all[0].policy)
        with learners.swap(settings.step_timeout_seconds), learners.locked():
            before = policy.logprobs_of(measured, settings.temperature)
            figures, advantages = self._session.learn(trl)
            if measured and figures["steps"]:
                after = policy.logprobs_of(measured, settings.temperature)
                figures |= update_figures(engine_logprobs(measured).to(after.device), before, after)
        places = {record.rollout_id: place for place, record in enumerate(rows.records)}
        rows.advantages[:] = [advantages[places[sample.rollout_id]] for sample in rows.samples]
        tokens = sum(sum(sample.mask) for sample in rows.samples)
        figures |= {"rows": len(rows.samples), "rollouts": len(rows.samples), "tokens": tokens}
        if not figures["steps"]:
            return StepUpdate(figures, [], frozenset())
        learners.advance(learners.weight_version + 1)
        return StepUpdate(figures, [], frozenset((None,)))


class TRLCheckpoints(CheckpointFolder):
    """Checkpoints of TRL, written whole or not at all, and checked before they are used."""

    def __init__(self, path: Path, session: TRLSession, *, limit: int | None) -> None:
        super().__init__(path, limit=limit)
        self._session = session

    @override
    def write(self, step: int, fill: Callable[[Path], None], facts: Mapping[str, object]) -> Checkpoint:
        return super().write(step, self._session.save, facts)
