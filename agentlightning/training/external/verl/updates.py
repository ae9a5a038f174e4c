"""The updates, evaluations and checkpoints of a run that VERL takes: the loop of GRPO drives them as its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from agentlightning.training.checkpoint.keeper import AfterStep, CheckpointKeeper
from agentlightning.training.external.verl.endpoints import Endpoints
from agentlightning.training.external.verl.rows import rows_of_evaluation, rows_of_step
from agentlightning.training.external.verl.session import VERLSession
from agentlightning.training.external.verl.trainer import OURS
from agentlightning.training.held_out import HeldOut
from agentlightning.training.learner.update import RowFigures
from agentlightning.training.ledger import Ledger
from agentlightning.training.loop import GRPORun
from agentlightning.training.parts import RunParts
from agentlightning.training.progress import StepFigures
from agentlightning.training.result import Evaluation, GRPOResult
from agentlightning.training.rollouts import evidence
from agentlightning.training.rows import StepRows
from agentlightning.training.updater import StepUpdate
from agentlightning.training.weight_updates import NothingTaken, WeightUpdates

PLACE: Final = "verl.json"
"""File of a checkpoint that says where VERL's own one is."""
_FIGURES: Final = {
    "actor/pg_loss": "loss",
    "actor/loss": "loss",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "approx_kl",
    "actor/kl_loss": "kl",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    f"{OURS}update_kl": "update_kl",
    f"{OURS}first_ratio_error": "first_ratio_error",
    "training/rollout_probs_diff_max": "sampler_difference",
}
"""VERL's figures of an update, and their names in ours."""
_COLUMNS: Final = [column.name for column in fields(RowFigures)]


class VERLRun(GRPORun):
    """The loop of GRPO, with VERL in the place of its learner and its engine."""

    def learn_by(self, session: VERLSession, endpoints: Endpoints, *, evaluates_first: bool) -> None:
        """Let VERL take the updates, and validate where the loop evaluates."""
        self._endpoints, self._evaluates_first = endpoints, evaluates_first
        self._updates = VERLUpdates(self.parts, session)
        self._held_out = VERLHeldOut(self.parts, self.held_out, session)

    @override
    async def _evaluate_at_start(self, result: GRPOResult) -> None:
        if self._evaluates_first or self.parts.resume.steps:  # then only what was missed
            await super()._evaluate_at_start(result)

    @override
    async def _step(self, step: int, tasks: Sequence[object], resources_id: str) -> StepFigures:
        await self._endpoints.refresh()
        return await super()._step(step, tasks, resources_id)


class VERLUpdates(WeightUpdates):
    """Hands the rows of each step to VERL while no call is served."""

    def __init__(self, parts: RunParts, session: VERLSession) -> None:
        super().__init__(parts)
        self._session = session
        self._lost: frozenset[str] = frozenset()

    @override
    async def learn(self, step: int, rows: StepRows, ledger: Ledger) -> tuple[dict[str, float], Sequence[RowFigures]]:
        update = await self._change_weights(step, rows)
        changed, lost = bool(update.changed), self._lost
        rows.enter(ledger, trained=lambda sample: changed and sample.rollout_id not in lost)
        self._count_skipped(update.figures)
        return update.figures, update.rows

    @override
    async def _change_weights(self, step: int, rows: StepRows) -> StepUpdate:
        settings, learners = self._parts.settings, self._parts.learners
        told: dict[str, Any] = {}
        with contextlib.suppress(NothingTaken):
            async with self._parts.proxy.weight_change(
                learners.weight_version + 1, drain_timeout=settings.step_timeout_seconds
            ):
                told = await self._taken(step, rows)
                if not told["optimizer_steps"]:
                    raise NothingTaken
        figures = {
            ours: value for theirs, ours in _FIGURES.items() if (value := told["metrics"].get(theirs)) is not None
        }
        tokens = sum(sum(sample.mask) for sample in rows.samples)
        figures |= {
            "rows": len(rows.samples),
            "tokens": tokens,
            "steps": told["optimizer_steps"],
            "skipped_steps": told["skipped_steps"],
        }
        self._lost = self._take_advantages(rows, told) if rows.samples else frozenset()
        if not told["optimizer_steps"]:
            return StepUpdate(figures, [], frozenset())
        learners.advance(learners.weight_version + 1)
        return StepUpdate(figures, self._tokens(rows, told), frozenset((None,)))

    async def _taken(self, step: int, rows: StepRows) -> dict[str, Any]:
        settings = self._parts.settings
        filler = min(self._parts.learners.all[0].policy.eos_ids)
        given = rows_of_step(rows, settings.batch_size, settings.num_generations, filler=filler)
        await self._session.give("train", step, given, skips=not rows.samples)
        return await self._session.step(step)

    def _take_advantages(self, rows: StepRows, told: Mapping[str, Any]) -> frozenset[str]:
        """Note the advantage that VERL gave each row; return the rollouts that it left out, which it did not train."""
        sessions, places = self._parts.settings.num_generations, told["places"]
        found: dict[tuple[int, int], float] = {}
        for key, advantage in told["advantages"].items():
            uid, session, _ = key.rsplit("_", 2)
            found[places[uid], int(session)] = advantage
        numbers = {record.rollout_id: divmod(n, sessions) for n, record in enumerate(rows.records)}
        rows.advantages[:] = [found.get(numbers[sample.rollout_id], 0.0) for sample in rows.samples]
        lost = frozenset(sample.rollout_id for sample in rows.samples if numbers[sample.rollout_id] not in found)
        if lost:
            text = f"VERL left out {len(lost)} rollouts, {min(lost)} among them; its own log says why"
            self._parts.alarm(text, "left_out_by_verl")
        return lost

    def _tokens(self, rows: StepRows, told: Mapping[str, Any]) -> list[RowFigures]:
        """Return what VERL's loss began with, of each row; none where VERL left rows out, or tells of no tokens."""
        sessions, places = self._parts.settings.num_generations, told["places"]
        found: dict[tuple[int, int, int], Mapping[str, Any]] = {}
        for key, columns in told["tokens"].items():
            uid, session, index = key.rsplit("_", 2)
            found[places[uid], int(session), int(index)] = columns
        keys = {
            id(sample): (*divmod(number, sessions), index)
            for number, record in enumerate(rows.records)
            for index, sample in enumerate(record.samples)
        }
        if any(keys[id(sample)] not in found for sample in rows.samples):
            return []
        none: dict[str, Any] = dict.fromkeys(_COLUMNS)
        return [RowFigures(**none | dict(found[keys[id(sample)]])) for sample in rows.samples]


class VERLHeldOut(HeldOut):
    """Evaluates when VERL validates, and gives VERL the same rollouts."""

    def __init__(self, parts: RunParts, tasks: list[object], session: VERLSession) -> None:
        super().__init__(parts, tasks)
        self._session = session

    @override
    async def measure(self, step: int, *, greedy: bool, earlier: Sequence[Evaluation] = ()) -> list[Evaluation]:
        found = await super().measure(step, greedy=greedy, earlier=earlier)
        if found:
            store = self._parts.store
            rollouts = await store.query_rollouts(rollout_id_in=found[0].rollout_ids)
            known = {rollout.rollout_id: rollout for rollout in rollouts}
            read = [await evidence(store, known[rollout_id]) for rollout_id in found[0].rollout_ids]
            filler = min(self._parts.learners.all[0].policy.eos_ids)
            await self._session.give("val", step, rows_of_evaluation(read, found[0].rewards, filler=filler))
        return found


class VERLKeeper(CheckpointKeeper):
    """Keeps where the run stood after those steps whose weights VERL has saved."""

    session: VERLSession

    @override
    def _write(self, after: AfterStep) -> None:
        place = self.session.saved(after.step)
        if place is None or after.step <= self.saved:
            return
        facts = {**self.run_facts, "digest": after.digest, "weight_version": after.weight_version}
        with self._writing:
            self._unrecorded = self.folder.write(
                after.step, lambda folder: _tell(folder, place), {**facts, "state": after.state()}
            )
            self.saved = after.step


def _tell(folder: Path, place: Path) -> None:
    (folder / PLACE).write_text(json.dumps({"path": str(place.resolve())}))
