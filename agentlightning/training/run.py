"""The loop of a training run: open or resume it, run its steps, end it.

In one step, tasks are enqueued as rollouts of the run. Runners execute them; their model calls pass through the gateway
to the policy's engine. The spans are converted to token rows with the engine's log-probabilities. The weights are
updated while the gateway delays new calls. The ledger records the outcome of every model call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Final

import torch

from agentlightning.errors import NonFiniteLossError
from agentlightning.training.alarms import Alarms
from agentlightning.training.checkpoint import CHECKPOINTS, CheckpointFolder, CheckpointWriter, CompletedStep
from agentlightning.training.collector import StepCollector
from agentlightning.training.context import TrainingContext
from agentlightning.training.group_rewards import GroupReward
from agentlightning.training.held_out import HeldOut
from agentlightning.training.ledger import Ledger, LedgerSummary
from agentlightning.training.progress import StepFigures, make_progress, step_line
from agentlightning.training.recording import RunRecorder
from agentlightning.training.records import RunLog
from agentlightning.training.result import Evaluation, GRPOResult, StepClock
from agentlightning.training.resume import OpenRun, Resumption, open_run
from agentlightning.training.rows import StepRows
from agentlightning.training.run_checks import RunGuard
from agentlightning.training.run_folder import RunFolder, figures_of, write_lines
from agentlightning.training.run_inputs import RunSource, triplet_adapter
from agentlightning.training.selection import SelectingCollector
from agentlightning.training.serving import serve_policies
from agentlightning.training.settings import Pick, TrainingSettings
from agentlightning.training.sft_settings import SFTSettings
from agentlightning.training.updater import DrainTimeoutError, StepUpdate, Updater
from agentlightning.types import Rollout

logger = logging.getLogger(__name__)

MAX_SKIPPED: Final = 3
"""Number of consecutive steps with a non-finite loss that end the run."""
MAX_DRAINS: Final = 3
"""Number of waits for the calls in progress, with `max_staleness`, before a weight change fails. Between two waits, the
delayed calls continue."""

MakeUpdater = Callable[[OpenRun, AsyncExitStack], Awaitable[Updater | None]]
"""Function that returns the updater of an opened run, which the stack closes; None if no steps remain."""


async def train(
    source: RunSource,
    settings: TrainingSettings,
    tasks: Sequence[object],
    held_out: Sequence[object],
    make_updater: MakeUpdater,
    *,
    config: Mapping[str, Mapping[str, object]],
    facts: Mapping[str, object] | None = None,
    group_reward: GroupReward | None = None,
    pick: Pick | None = None,
) -> GRPOResult:
    """Open or resume the run of an algorithm, run its steps and return the result.

    Args:
        config: sections of the run's `config.json`.
        facts: additional JSON data by name to compare with a later start, besides settings, tasks and model files.

    Raises the errors of `agl.GRPO.run`.
    """
    adapter = triplet_adapter(source)
    store, log = source.get_store(), source.get_run_log()
    async with AsyncExitStack() as stack:
        held = stack.enter_context(ExitStack())
        opened = await open_run(source, settings, tasks, held_out, held, **(facts or {}))
        resume, folder = opened.resume, opened.folder
        folder.write_config(**config, run={"run_id": log.run_id, "store": log.place})
        updater = await make_updater(opened, stack)
        if updater is None:
            assert resume.checkpoint is not None
            return result_so_far(resume, folder, resume.checkpoint.facts["weight_version"], log)
        proxy = await serve_policies(source.get_llm_proxy(), store, updater, settings, stack)
        progress = make_progress(settings.progress)
        stack.callback(progress.close)
        context = TrainingContext(
            settings=settings,
            store=store,
            updater=updater,
            proxy=proxy,
            adapter=adapter,
            progress=progress,
            resume=resume,
            recorder=RunRecorder(log, updater, settings.record_tokens, has_held_out=bool(held_out)),
            guard=RunGuard(settings.max_drift, updater.decoder()),
            alarms=Alarms(settings.alarms, settings.other_names),
            rollout_config=source.get_rollout_config(),
            resources=source.get_initial_resources() or {},
            group_reward=group_reward,
            pick=pick,
        )
        checkpoints = CheckpointWriter(
            folder=CheckpointFolder(folder.path / CHECKPOINTS, limit=settings.save_total_limit),
            updater=updater,
            log=log,
            run_facts=opened.facts,
            saved=resume.steps,
        )
        run = TrainingRun(context, folder, checkpoints, list(tasks), list(held_out))
        result = await run.train()
        await updater.end()
    result.late_calls = await run.late_calls()  # after the gateway has ended: no further call can arrive
    return result


def result_so_far(resume: Resumption, folder: RunFolder, weight_version: int, log: RunLog) -> GRPOResult:
    """Return the result of the steps in the checkpoint of an earlier start; an empty result without a checkpoint."""
    result, state = GRPOResult(folder.path, weight_version, run_id=log.run_id, store=log.place), resume.state
    if state:
        result.train_seconds = state["train_seconds"]
        result.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        result.metrics = [figures_of(resume.lines[step]) for step in sorted(resume.lines) if step <= resume.steps]
    return result


class TrainingRun:
    """The loop of one run and its state between two steps."""

    def __init__(
        self,
        context: TrainingContext,
        folder: RunFolder,
        checkpoints: CheckpointWriter,
        tasks: list[object],
        held_out: list[object],
    ) -> None:
        self._context = context
        self._folder = folder
        self._checkpoints = checkpoints
        kind = SelectingCollector if isinstance(context.settings, SFTSettings) else StepCollector
        self._collector = kind(context, tasks)
        self._held_out = HeldOut(context, held_out)
        self._skipped = 0  # consecutive steps, up to the current one, with a non-finite loss
        self._reported_constraints = False
        self._completed: CompletedStep | None = None
        self._is_recorded = False  # an earlier start recorded the current step, with the same weights
        self._is_cancelled = False

    async def train(self) -> GRPOResult:
        """Evaluate, run every step, evaluate, save. The trained weights are always saved, even after an error."""
        context, settings = self._context, self._context.settings
        result = self._restored()
        resources_id = await context.publish("train", settings.temperature)
        try:
            await self._evaluate_at_start(result)
            for step in range(context.resume.steps + 1, settings.max_steps + 1):
                began = time.monotonic()
                figures = await self._step(step, resources_id)
                result.train_seconds += time.monotonic() - began
                result.steps = context.updater.weight_version
                self._completed = self._completed_step(figures, result, evaluated=False)
                try:
                    if self._is_cancelled:  # it was held back while the weights changed
                        raise asyncio.CancelledError
                    await self._evaluate_if_due(figures, result)
                    self._completed = self._completed_step(figures, result, evaluated=True)
                except BaseException:
                    with contextlib.suppress(OSError):  # the error that ended the step counts
                        await self._report(figures, result)
                    raise
                await self._report(figures, result)
                await self._checkpoints.step_done(self._completed, lambda text: context.alarm(text, "checkpoint"))
                self._check_skipped()
        except BaseException as error:
            await self._end(error)
            raise
        await self._end(None)
        self._collector.endings.require_scored()
        return result

    async def _end(self, cause: BaseException | None) -> None:
        """Save the trained weights and cancel all that is in progress, even if one of these fails; raise the first
        error other than `cause`. A cancellation is always raised."""

        works: tuple[Callable[[], Awaitable[None] | None], ...] = (
            self._folder.finish,
            lambda: self._checkpoints.end(self._completed),
            lambda: self._context.updater.save_model(self._folder.model),
            self._collector.close,
        )
        first = cause
        for work in works:
            try:
                if (pending := work()) is not None:
                    await pending
            except Exception as error:
                if first is None:
                    first = error
                else:
                    logger.error("The run failed, and then ending it failed too: %r", error)
            except BaseException as error:  # a cancellation or Ctrl+C is raised again when all is done
                first = error
        if first is not None and first is not cause:
            raise first

    def _restored(self) -> GRPOResult:
        """Return the result of the steps in the checkpoint, and restore the state of the parts of the loop."""
        context, state = self._context, self._context.resume.state
        version, log = context.updater.weight_version, context.recorder.log
        result = result_so_far(context.resume, self._folder, version, log)
        if state:
            self._skipped, self._reported_constraints = state["skipped"], state["told_constrained"]
            self._collector.endings.restore(state["endings"])
            self._collector.restore(state.get("flight"))
            if self._collector.curriculum is not None:
                self._collector.curriculum.restore(state["curriculum"])
            context.guard.restore(state["guard"])
            for figures in result.metrics:
                context.alarms.see(figures)
        return result

    def _completed_step(self, figures: StepFigures, result: GRPOResult, *, evaluated: bool) -> CompletedStep:
        """Return a step with the state for `_restored`."""
        fixed: dict[str, object] = {
            "skipped": self._skipped,
            "told_constrained": self._reported_constraints,
            "endings": self._collector.endings.state(),
            "guard": self._context.guard.state(),
            "late": self._collector.late.state(),
            "train_seconds": result.train_seconds,
            "take": self._context.resume.take,
            "evaluated": evaluated,
            "threads": torch.get_num_threads(),
        }
        if (in_progress := self._collector.state()) is not None:
            fixed["flight"] = in_progress
        if self._collector.curriculum is not None:
            fixed["curriculum"] = self._collector.curriculum.state()
        version, evaluations = self._context.updater.weight_version, list(result.evaluations)
        return CompletedStep(
            figures.step,
            version,
            figures.weights,
            state=lambda: {**fixed, "evaluations": list(map(dataclasses.asdict, evaluations))},
        )

    # --- held-out tasks ----------------------------------------------------------------------------------------------

    async def _evaluate_at_start(self, result: GRPOResult) -> None:
        """Evaluate before the first step, or after the last one if an earlier start did not reach that evaluation."""
        resume = self._context.resume
        if not resume.steps:
            if self._context.updater.evaluates_first:
                result.evaluations += await self._held_out.measure(0, greedy=True)
        elif not resume.state["evaluated"] and result.metrics:
            figures = result.metrics[-1]
            await self._evaluate_if_due(figures, result)
            resume.lines[figures.step] = dataclasses.asdict(figures)
            write_lines(self._folder.path / "metrics.jsonl", resume.lines.values())

    async def _evaluate_if_due(self, figures: StepFigures, result: GRPOResult) -> None:
        if not self._held_out.is_due(figures.step):
            return
        began = time.monotonic()
        await self._collector.wait_for_all()  # so that only the evaluation's calls use the engine
        result.train_seconds += time.monotonic() - began
        last = figures.step == self._context.settings.max_steps
        evaluations = await self._held_out.measure(figures.step, greedy=last, earlier=result.evaluations)
        figures.held_out, figures.held_out_solved = evaluations[0].mean_reward, evaluations[0].accuracy
        figures.held_out_tasks = len(evaluations[0].rewards)
        figures.held_out_change = evaluations[0].change_from_best(result.evaluations)
        result.evaluations += evaluations

    # --- one step ----------------------------------------------------------------------------------------------------

    async def _step(self, step: int, resources_id: str) -> StepFigures:
        self._context.step = step
        await self._context.updater.before_step(self._context.proxy)
        clock = StepClock(self._context.updater.stats)
        ledger = Ledger(step=step)
        rollouts, rows = await self._collector.collect(step, resources_id, ledger)
        clock.sampled()
        learning = asyncio.ensure_future(self._learn(step, rollouts, rows, ledger, clock))
        try:
            return await asyncio.shield(learning)
        except asyncio.CancelledError:  # an update that has begun is finished and accounted for, then the run ends
            self._is_cancelled = True
            return await learning

    async def _learn(
        self, step: int, rollouts: Sequence[Rollout], rows: StepRows, ledger: Ledger, clock: StepClock
    ) -> StepFigures:
        """Update the weights, close the ledger and return the figures of the step."""
        context, resume = self._context, self._context.resume
        figures_of_rows = rows.figures(context.updater.weight_version)
        update = await self._update_weights(step, rows)
        changed = [learner for learner in context.updater.learners if learner.name in update.changed]
        rows.enter(
            ledger,
            trained=lambda sample: (
                sample.rollout_id not in update.untrained and any(learner.takes(sample) for learner in changed)
            ),
        )
        digest = await asyncio.to_thread(context.updater.digest)
        self._is_recorded = await resume.repeats(step, digest)
        if not self._is_recorded:
            await self._enter_late_calls(ledger, rollouts)
        summary = ledger.close()
        if not self._is_recorded:
            await context.recorder.ledger(ledger, rows, update.rows)
        self._report_constraints(step, summary)
        seconds, cpu, tokens = clock.stop()
        succeeded = sum(rollout.status == "succeeded" for rollout in rollouts)
        return StepFigures(
            step=step,
            steps=context.settings.max_steps,
            rollouts_done=succeeded,
            rollouts_failed=len(rollouts) - succeeded,
            calls_captured=summary.captured,
            calls_trained=summary.trained,
            calls_excluded={str(reason): count for reason, count in summary.excluded.items()},
            calls_constrained=summary.constrained,
            tokens_per_second=tokens / max(1e-9, sum(seconds.values())),
            seconds=seconds,
            cpu_seconds=cpu,
            update=update.figures,
            drift_rate=context.guard.drift_rate,
            weights=digest,
            take=resume.take_of(step),
            flight=self._collector.figures,
            curriculum=self._collector.curriculum_figures,
            **figures_of_rows,
        )

    async def _update_weights(self, step: int, rows: StepRows) -> StepUpdate:
        context, updater = self._context, self._context.updater
        if rows.samples or updater.updates_without_rows:
            update = await self._update_when_drained(step, rows)
        else:
            # weights without finite probabilities fail every call: without rows, that is also a skipped step
            broken = not rows.rewards and not await asyncio.to_thread(updater.gives_probabilities)
            update = StepUpdate({"steps": 0, "skipped_steps": int(broken)})
        for name, text in update.alarms:
            context.alarm(text, name)
        skipped = update.figures["skipped_steps"]
        self._skipped = self._skipped + 1 if update.figures["steps"] == 0 and skipped > 0 else 0
        if skipped:
            text = f"skipped optimizer steps: {skipped:.0f}; the loss or a probability is not finite"
            context.alarm(text, "skipped_steps")
        return update

    async def _update_when_drained(self, step: int, rows: StepRows) -> StepUpdate:
        """Update the weights; wait for calls in progress up to `MAX_DRAINS` times if groups continue meanwhile."""
        context, settings = self._context, self._context.settings
        drains, most = 0, MAX_DRAINS if settings.most_stale else 1
        while True:
            drains += 1
            try:
                return await context.updater.update(step, rows, context.proxy, settings.step_timeout_seconds / most)
            except DrainTimeoutError as error:
                if drains == most:
                    raise
                context.alarm(f"step {step}: {error}; the weights are unchanged; retrying", "drain")

    def _check_skipped(self) -> None:
        if self._skipped >= MAX_SKIPPED:
            raise NonFiniteLossError(
                f"The loss was not finite in {MAX_SKIPPED} steps in a row; the run ends. Reduce learning_rate "
                f"(currently {self._context.settings.learning_rate}) or check the rewards. The last weights are in "
                f"{self._folder.model}"
            )

    # --- reports and the ledger --------------------------------------------------------------------------------------

    async def _report(self, figures: StepFigures, result: GRPOResult) -> None:
        context = self._context
        result.metrics.append(figures)
        if not self._is_recorded or figures.step not in context.resume.lines:
            self._folder.append_metrics(dataclasses.asdict(figures))
        context.progress.step(figures)
        logger.info(step_line(figures))
        if not self._is_recorded:
            await context.recorder.step(figures)
        for alarm in context.alarms.see(figures):
            context.report(alarm)

    async def _enter_late_calls(self, ledger: Ledger, rollouts: Sequence[Rollout], *, is_last: bool = False) -> None:
        """Enter the calls that ended after the step of their rollout, and those that earlier starts left open."""
        context, collector = self._context, self._collector
        present, is_to_come = {rollout.rollout_id for rollout in rollouts}, None if is_last else collector.is_to_come
        for calls, reason in await context.resume.unaccounted(context.store, present, is_to_come):
            ledger.capture(calls)
            ledger.exclude([call.ref for call in calls], reason)
        in_hand = context.proxy.calls_in_hand(outside=collector.in_progress)
        await collector.late.enter(context.store, ledger, in_hand=in_hand)

    def _report_constraints(self, step: int, summary: LedgerSummary) -> None:
        """Report once that trained calls were constrained, and the cause."""
        if summary.constrained and not self._reported_constraints:
            self._reported_constraints = True
            names = ", ".join(f"{name} ({count})" for name, count in summary.constrained.items())
            self._context.note(
                f"step {step}: some of {summary.trained} trained calls were constrained by {names}: their tokens were "
                "sampled from another distribution than the learner's"
            )

    async def late_calls(self) -> dict[str, int]:
        """Record the calls that ended after the last step as excluded; return their number by reason. Call it when no
        further call can arrive."""
        ledger = Ledger(step=self._context.settings.max_steps + 1)
        await self._enter_late_calls(ledger, [], is_last=True)
        summary = ledger.close()
        await self._context.recorder.ledger(ledger)
        excluded = {str(reason): count for reason, count in summary.excluded.items()}
        if excluded:
            logger.info("model calls that ended after the last step, excluded: %d, %s", summary.captured, excluded)
        return excluded
