"""The updates, evaluations and checkpoints of a run that VERL takes: the loop of GRPO drives them as its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from agentlightning.llm_proxy import LLMProxy
from agentlightning.training.checkpoint.keeper import AfterStep, CheckpointKeeper
from agentlightning.training.collect import evidence
from agentlightning.training.external.verl.rows import rows_of_evaluation, rows_of_step
from agentlightning.training.external.verl.session import VERLSession
from agentlightning.training.external.verl.trainer import OURS
from agentlightning.training.held_out import HeldOut
from agentlightning.training.learner.row_figures import RowFigures
from agentlightning.training.ledger.ledger import Ledger
from agentlightning.training.loop import GRPORun
from agentlightning.training.parts import RunParts
from agentlightning.training.policies.remote import RemoteEngine
from agentlightning.training.policies.serving import entry_of
from agentlightning.training.policies.updating import StepUpdate
from agentlightning.training.progress import StepFigures
from agentlightning.training.result import Evaluation, GRPOResult
from agentlightning.training.rows import StepRows
from agentlightning.training.weight_updates import WeightUpdates

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
"""Names of figures of an update in VERL, and in ours."""


class VERLRun(GRPORun):
    """The loop of GRPO, with VERL in the place of its learner and its engine."""

    def learn_by(self, session: VERLSession, *, evaluates_first: bool) -> None:
        """Let VERL take the updates, and validate where the loop evaluates."""
        self._session, self._evaluates_first, self._known = session, evaluates_first, 1
        self._updates = VERLUpdates(self.parts, session)
        self._held_out = VERLHeldOut(self.parts, self.held_out, session)

    @override
    async def _evaluate_at_start(self, result: GRPOResult) -> None:
        if self._evaluates_first or self.parts.resume.steps:  # then only what was missed
            await super()._evaluate_at_start(result)

    @override
    async def _step(self, step: int, tasks: Sequence[object], resources_id: str) -> StepFigures:
        """Let the gateway spread calls over the agent loop workers that serve by now, and take the step."""
        addresses = await asyncio.to_thread(self._session.call, "addresses")
        if len(addresses) != self._known:
            self._known = len(addresses)
            proxy: LLMProxy = self.parts.proxy
            models: list[Any] = [each for each in proxy.model_list if each["model_name"] != RemoteEngine.model_name]
            engines = [RemoteEngine(address, self._session.token) for address in addresses]
            proxy.update_model_list([*models, *(entry_of(engine, self.parts.settings) for engine in engines)])
        return await super()._step(step, tasks, resources_id)


class VERLUpdates(WeightUpdates):
    """Hands the rows of each step to VERL while no call is served."""

    def __init__(self, parts: RunParts, session: VERLSession) -> None:
        super().__init__(parts)
        self._session = session
        self._left_out: set[str] = set()

    @override
    async def learn(self, step: int, rows: StepRows, ledger: Ledger) -> tuple[dict[str, float], Sequence[RowFigures]]:
        update = await self._change_weights(step, rows)  # also without rows: VERL counts every step
        if self._left_out:
            text = (
                f"VERL left out {len(self._left_out)} rollouts, {min(self._left_out)} among them; its own log says why"
            )
            self._parts.alarm(text, "left_out_by_verl")
        changed, left_out = bool(update.changed), self._left_out
        rows.enter(ledger, trained=lambda sample: changed and sample.rollout_id not in left_out)
        self._count_skipped(update.figures)
        return update.figures, update.rows

    @override
    def _update(self, step: int, rows: StepRows) -> StepUpdate:
        settings, learners, count = self._parts.settings, self._parts.learners, len(rows.samples)
        filler = min(learners.all[0].policy.eos_ids)
        theirs = rows_of_step(rows, settings.batch_size, settings.num_generations, filler=filler)
        self._session.call("give", "train", step, theirs, not count)
        report = self._session.call("step", step)
        metrics = report["metrics"]
        figures = {ours: metrics[theirs] for theirs, ours in _FIGURES.items() if theirs in metrics}
        figures |= {"rows": count, "tokens": sum(sum(sample.mask) for sample in rows.samples)}
        figures |= {"steps": report["optimizer_steps"], "skipped_steps": report["skipped_steps"]}
        seen = _rows_of(report, rows, settings.num_generations)
        rows.advantages[:] = [0.0 if row is None else float(row["advantage"][0]) for row in seen]
        self._left_out = {sample.rollout_id for sample, row in zip(rows.samples, seen, strict=True) if row is None}
        if not report["optimizer_steps"]:
            return StepUpdate(figures, [], frozenset())
        learners.advance(learners.weight_version + 1)
        if self._left_out or settings.record_tokens == "none":
            return StepUpdate(figures, [], frozenset((None,)))
        none: dict[str, Any] = dict.fromkeys(column.name for column in fields(RowFigures))
        return StepUpdate(figures, [RowFigures(**none | dict(row or {})) for row in seen], frozenset((None,)))


def _rows_of(report: Mapping[str, Any], rows: StepRows, sessions: int) -> list[Mapping[str, Any] | None]:
    """Return the figures that VERL reports of each row: (B,), None where it left the row out."""
    found: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for key, columns in report["rows"].items():
        uid, session, index = key.rsplit("_", 2)
        found[report["places"][uid], int(session), int(index)] = columns
    keys = {
        id(sample): (*divmod(number, sessions), index)
        for number, record in enumerate(rows.records)
        for index, sample in enumerate(record.samples)
    }
    return [found.get(keys[id(sample)]) for sample in rows.samples]


class VERLHeldOut(HeldOut):
    """Evaluates when VERL validates, and gives VERL the same rollouts."""

    def __init__(self, parts: RunParts, tasks: list[object], session: VERLSession) -> None:
        super().__init__(parts, tasks)
        self._session = session

    @override
    async def measure(self, step: int, *, greedy: bool, earlier: Sequence[Evaluation] = ()) -> list[Evaluation]:
        evaluations = await super().measure(step, greedy=greedy, earlier=earlier)
        if evaluations:
            store, sampled = self._parts.store, evaluations[0]
            rollouts = {one.rollout_id: one for one in await store.query_rollouts(rollout_id_in=sampled.rollout_ids)}
            read = [await evidence(store, rollouts[rollout_id]) for rollout_id in sampled.rollout_ids]
            filler = min(self._parts.learners.all[0].policy.eos_ids)
            rows = rows_of_evaluation(read, sampled.rewards, filler=filler)
            await asyncio.to_thread(self._session.call, "give", "val", step, rows)
        return evaluations


class VERLKeeper(CheckpointKeeper):
    """Keeps where the run stood after those steps whose weights VERL has saved."""

    session: VERLSession

    @override
    def _write(self, after: AfterStep) -> None:
        place = self.session.checkpoint(after.step)
        if place is None or after.step <= self.saved:
            return
        facts = {**self.run_facts, "digest": after.digest, "weight_version": after.weight_version}
        with self._writing:
            self._unrecorded = self.folder.write(
                after.step, lambda folder: _write_place(folder, place), {**facts, "state": after.state()}
            )
            self.saved = after.step


def _write_place(folder: Path, place: Path) -> None:
    (folder / PLACE).write_text(json.dumps({"path": str(place.resolve())}))
