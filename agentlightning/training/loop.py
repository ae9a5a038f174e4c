"""The loop of a GRPO run: sample, read, learn, measure, and record each step.

One step: tasks become rollouts of the run; runners run them against the gateway, behind which the policy's own engine
answers; the spans become token rows with the engine's log-probabilities; the weights take their steps while the gateway
holds calls back; the ledger says for every model call what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentlightning.training.checkpoint.keeper import AfterStep, CheckpointKeeper
from agentlightning.training.checkpoint.resume import Resumption, figures_by_step
from agentlightning.training.chosen.collection import ChosenCollection
from agentlightning.training.collection import RolloutCollection
from agentlightning.training.flight.collection import FlightCollection
from agentlightning.training.held_out import HeldOut
from agentlightning.training.ledger import Ledger, LedgerSummary
from agentlightning.training.parts import RunParts
from agentlightning.training.progress import StepFigures, step_line
from agentlightning.training.result import Evaluation, GRPOResult, StepClock
from agentlightning.training.rows import StepRows
from agentlightning.training.run_folder import RunFolder, figures_of, write_lines
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import batch_iter_over_dataset
from agentlightning.training.weight_updates import WeightUpdates
from agentlightning.types import Rollout

logger = logging.getLogger(__name__)


def result_so_far(resume: Resumption, folder: RunFolder, weight_version: int) -> GRPOResult:
    """Return the result of the steps that are in the checkpoint of an earlier start; an empty one without it."""
    result, state = GRPOResult(folder.path, weight_version), resume.state
    if state:
        result.train_seconds = state["train_seconds"]
        result.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        result.metrics = [figures_of(line) for line in figures_by_step(resume.lines, resume.steps)]
    return result


@dataclass(kw_only=True)
class GRPORun:
    """One training run and the parts that it drives."""

    parts: RunParts
    folder: RunFolder
    keeper: CheckpointKeeper
    tasks: list[object]
    held_out: list[object]
    _told_constrained: bool = False
    _after: AfterStep | None = None
    """The last step that is complete."""
    _repeats: bool = False
    """The present step was recorded by an earlier start of the run, with the same weights."""
    _is_cancelled: bool = False

    def __post_init__(self) -> None:
        self._collection = _collection_kind(self.parts.settings)(self.parts, self.tasks)
        self._updates = WeightUpdates(self.parts)
        self._held_out = HeldOut(self.parts, self.held_out)

    async def train(self) -> GRPOResult:
        """Evaluate, take every step, evaluate, save; what was learned is saved on every way out.

        Raises:
            NonFiniteLossError: the loss was not finite in three steps in a row.
            NoTrainableCallError: no rollout with a reward in the first step has a model call that can be trained.
            TooMuchDriftError: more turns drifted than `max_drift` allows.
            NoScoredRolloutError: no rollout of the whole run could be learned from.
        """
        settings = self.parts.settings
        result = self._result_so_far()
        resources = await self.parts.publish("train", settings.temperature)
        batches = batch_iter_over_dataset(self.tasks, settings.batch_size, random.Random(settings.seed))
        for _ in range(self.parts.resume.steps):
            next(batches)
        try:
            await self._evaluate_at_start(result)
            for step in range(self.parts.resume.steps + 1, settings.max_steps + 1):
                began = time.monotonic()
                figures = await self._step(step, next(batches), resources)
                result.train_seconds += time.monotonic() - began
                result.steps = self.parts.learners.weight_version
                self._after = self._stand(figures, result, evaluated=False)
                try:
                    self._check_cancelled()
                    await self._quiet_if_due(figures.step, result)
                    await self._evaluate_if_due(figures, result)
                    self._after = self._stand(figures, result, evaluated=True)
                except BaseException:
                    with contextlib.suppress(OSError):  # what ended the step is what counts
                        await self._report(figures, result)
                    raise
                await self._report(figures, result)
                await self.keeper.step_done(self._after, lambda text: self.parts.alarm(text, "checkpoint"))
                self._updates.check_skipped(self.folder.model)
        except BaseException as error:
            await self._end(error)
            raise
        await self._end(None)
        self._collection.endings.require_scored()
        return result

    async def _end(self, cause: BaseException | None) -> None:
        """Save what was learned and close the collection, each though another fails; raise the first error, if that is
        not `cause`. A cancellation is raised in any case."""
        first = cause
        for work in (self._finish_metrics, self._save_checkpoint, self._save_model, self._collection.close):
            try:
                await work()
            except Exception as error:
                if first is None:
                    first = error
                else:
                    logger.error("The run had failed already when its end failed, too: %r", error)
            except BaseException as error:  # a cancellation or Ctrl+C goes on when all is done
                first = error
        if first is not None and first is not cause:
            raise first

    async def _save_checkpoint(self) -> None:
        await self.keeper.end(self._after)

    async def _save_model(self) -> None:
        self.parts.learners.save(self.folder.model)

    async def _finish_metrics(self) -> None:
        self.folder.finish()

    # --- what goes on from an earlier start --------------------------------------------------------------------------

    def _result_so_far(self) -> GRPOResult:
        """Return the result of the steps that are in the checkpoint, and give the parts of the loop their state."""
        resume = self.parts.resume
        result, state = result_so_far(resume, self.folder, self.parts.learners.weight_version), resume.state
        if state:
            self._updates.skipped, self._told_constrained = state["skipped"], state["told_constrained"]
            self._collection.endings.restore(state["endings"])
            self._collection.restore(state.get("flight"))
            self.parts.guard.restore(state["guard"])
            for figures in result.metrics:
                self.parts.alarms.see(figures)
        return result

    def _stand(self, figures: StepFigures, result: GRPOResult, *, evaluated: bool) -> AfterStep:
        """Return where the run stands after a step."""
        fixed: dict[str, object] = {
            "skipped": self._updates.skipped,
            "told_constrained": self._told_constrained,
            "endings": self._collection.endings.state(),
            "guard": self.parts.guard.state(),
            "late": self._collection.late.state(),
            "train_seconds": result.train_seconds,
            "take": self.parts.resume.take,
            "evaluated": evaluated,
            "threads": torch.get_num_threads(),
        }
        if (flight := self._collection.state()) is not None:
            fixed["flight"] = flight
        evaluations = list(result.evaluations)

        def state() -> dict[str, object]:
            return {**fixed, "evaluations": [dataclasses.asdict(evaluation) for evaluation in evaluations]}

        return AfterStep(figures.step, self.parts.learners.weight_version, figures.weights, state)

    async def _evaluate_at_start(self, result: GRPOResult) -> None:
        """Measure before the first step, or what an earlier start was kept from measuring after its last one."""
        if not self.parts.resume.steps:
            result.evaluations += await self._held_out.measure(0, greedy=True)
        elif not self.parts.resume.state["evaluated"] and result.metrics:
            figures = result.metrics[-1]
            await self._evaluate_if_due(figures, result)
            self.parts.resume.lines[figures.step] = dataclasses.asdict(figures)
            write_lines(self.folder.path / "metrics.jsonl", self.parts.resume.lines.values())

    def _check_cancelled(self) -> None:
        """Raise what was held back while the weights changed."""
        if self._is_cancelled:
            raise asyncio.CancelledError

    async def _quiet_if_due(self, step: int, result: GRPOResult) -> None:
        """Wait for the rollouts in flight before an evaluation, so that its calls have the engine for themselves."""
        if self._held_out.is_due(step):
            began = time.monotonic()
            await self._collection.quiet()
            result.train_seconds += time.monotonic() - began

    async def _evaluate_if_due(self, figures: StepFigures, result: GRPOResult) -> None:
        if self._held_out.is_due(figures.step):
            last = figures.step == self.parts.settings.max_steps
            evaluations = await self._held_out.measure(figures.step, greedy=last, earlier=result.evaluations)
            figures.held_out, figures.held_out_solved = evaluations[0].mean_reward, evaluations[0].accuracy
            figures.held_out_change = evaluations[0].change_from_best(result.evaluations)
            result.evaluations += evaluations

    async def _report(self, figures: StepFigures, result: GRPOResult) -> None:
        result.metrics.append(figures)
        if not self._repeats or figures.step not in self.parts.resume.lines:
            self.folder.append_metrics(dataclasses.asdict(figures))
        self.parts.progress.step(figures)
        logger.info(step_line(figures))
        if not self._repeats:
            await self.parts.recorder.step(figures)
        for alarm in self.parts.alarms.see(figures):
            self.parts.tell(alarm)

    # --- one step --------------------------------------------------------------------------------------------------

    async def _step(self, step: int, tasks: Sequence[object], resources_id: str) -> StepFigures:
        self.parts.step = step
        clock = StepClock(self.parts.learners)
        ledger = Ledger(step=step)
        rollouts, rows = await self._collection.collect(step, tasks, resources_id, ledger)
        clock.sampled()
        learning = asyncio.ensure_future(self._learn_and_account(step, rollouts, rows, ledger, clock))
        try:
            return await asyncio.shield(learning)
        except asyncio.CancelledError:  # an update that has begun is finished and accounted for, then the run ends
            self._is_cancelled = True
            return await learning

    async def _learn_and_account(
        self, step: int, rollouts: Sequence[Rollout], rows: StepRows, ledger: Ledger, clock: StepClock
    ) -> StepFigures:
        """Update the weights, close the ledger and return the figures of the step."""
        settings = self.parts.settings
        replies = rows.reply_figures(self.parts.learners.weight_version)
        update, seen = await self._updates.learn(step, rows, ledger)
        digest = await asyncio.to_thread(self.parts.learners.digest)
        self._repeats = await self.parts.resume.repeats(step, digest)
        if not self._repeats:
            await self._enter_late_calls(ledger, rollouts)
        summary = ledger.close()
        if not self._repeats:
            await self.parts.recorder.ledger(ledger, rows, seen)
        self._note_constrained(step, summary)
        seconds, cpu, tokens = clock.stop()
        return StepFigures(
            step=step,
            steps=settings.max_steps,
            mean_reward=rows.mean_reward,
            reward_error=rows.reward_error,
            reward_spread=rows.reward_spread,
            rollouts_done=sum(r.status == "succeeded" for r in rollouts),
            rollouts_failed=sum(r.status != "succeeded" for r in rollouts),
            calls_captured=summary.captured,
            calls_trained=summary.trained,
            calls_excluded={str(reason): count for reason, count in summary.excluded.items()},
            tokens_per_second=tokens / max(1e-9, sum(seconds.values())),
            seconds=seconds,
            cpu_seconds=cpu,
            update=update,
            seams=rows.seams,
            rollouts_excluded=rows.excluded_rollouts,
            calls_constrained=summary.constrained,
            drift_rate=self.parts.guard.drift_rate,
            groups=rows.group_counts,
            **replies,
            held_out_change={},
            weights=digest,
            take=self.parts.resume.take_of(step),
            flight=self._collection.figures(),
        )

    async def _enter_late_calls(self, ledger: Ledger, rollouts: Sequence[Rollout], *, is_last: bool = False) -> None:
        """Enter the calls that ended after the step of their rollout, and those that earlier starts have left open."""
        present, collection = {rollout.rollout_id for rollout in rollouts}, self._collection
        is_to_come = None if is_last else collection.is_to_come
        for calls, reason in await self.parts.resume.unaccounted(self.parts.store, present, is_to_come):
            ledger.capture(calls)
            ledger.exclude([call.ref for call in calls], reason)
        in_hand = self.parts.proxy.calls_in_hand(outside=collection.in_flight)
        await collection.late.enter(self.parts.store, ledger, in_hand=in_hand)

    def _note_constrained(self, step: int, summary: LedgerSummary) -> None:
        """Say once that calls were constrained, and by what."""
        if summary.constrained and not self._told_constrained:
            self._told_constrained = True
            names = ", ".join(f"{name} ({count})" for name, count in summary.constrained.items())
            self.parts.note(
                f"step {step}: some of {summary.trained} trained calls were constrained by {names}: their tokens were "
                "drawn from another distribution than the one that learns from them"
            )

    async def late_calls(self) -> dict[str, int]:
        """Account for the calls that ended after the last step; return them by the reason of their exclusion. To be
        called when no further call can arrive."""
        ledger = Ledger(step=self.parts.settings.max_steps + 1)
        await self._enter_late_calls(ledger, [], is_last=True)
        summary = ledger.close()
        await self.parts.recorder.ledger(ledger)
        excluded = {str(reason): count for reason, count in summary.excluded.items()}
        if excluded:
            logger.info("%d model calls ended after the last step: %s", summary.captured, excluded)
        return excluded


def _collection_kind(settings: GRPOSettings) -> type[RolloutCollection]:
    if settings.is_cross_entropy:
        return ChosenCollection
    return FlightCollection if settings.max_staleness else RolloutCollection
