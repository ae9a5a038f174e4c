"""The loop of a GRPO run: sample, read, learn, measure, and record each step.

One step: tasks become rollouts of the run; runners run them against the gateway, behind which the policy's own engine
answers; the spans become token rows with the engine's log-probabilities; the weights take their steps while the gateway
holds calls back; the ledger says for every model call what became of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from agentlightning.adapter import TraceToTripletBase
from agentlightning.algorithm.collect import Evidence, collect, evidence
from agentlightning.algorithm.drift_guard import DriftGuard
from agentlightning.algorithm.grpo.checkpoint.keeper import AfterStep, CheckpointKeeper
from agentlightning.algorithm.grpo.checkpoint.metrics_file import figures_of, write_lines
from agentlightning.algorithm.grpo.checkpoint.resume import Resumption, figures_by_step, metadata_of
from agentlightning.algorithm.grpo.checkpoint.weights import digest_of
from agentlightning.algorithm.grpo.endings import Endings
from agentlightning.algorithm.grpo.engine.engine import InferenceEngine
from agentlightning.algorithm.grpo.held_out import Evaluation, evaluate_tasks
from agentlightning.algorithm.grpo.learner.policy import Policy
from agentlightning.algorithm.grpo.learner.step import update_policy
from agentlightning.algorithm.grpo.learner.update import RowFigures, UpdateResult
from agentlightning.algorithm.grpo.recording import RunRecorder
from agentlightning.algorithm.grpo.resources import resources_to_publish
from agentlightning.algorithm.grpo.rows import (
    LateCalls,
    StepRows,
    choose_rows,
    groups_of_equal_rewards,
    read_records,
    why_failed,
)
from agentlightning.algorithm.grpo.settings import GRPOSettings
from agentlightning.algorithm.ledger.ledger import Ledger, LedgerSummary, RolloutRecord
from agentlightning.algorithm.progress import Progress, StepFigures, step_line
from agentlightning.algorithm.runs.run_folder import RunFolder
from agentlightning.algorithm.utils import batch_iter_over_dataset, with_timeout
from agentlightning.errors import NonFiniteLossError
from agentlightning.field_help import explain_fields
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig
from agentlightning.utils.system_snapshot import thread_cpu_seconds

logger = logging.getLogger(__name__)

MAX_SKIPPED = 3
"""Steps in a row whose loss was not finite, before the run ends."""
_SERVER_THREADS = ("agl-server", "agl-sqlite", "agl-store", "agl-reaper")


@explain_fields
@dataclass
class GRPOResult:
    """What a run leaves behind; the Trainer offers it as `trainer.result`."""

    output_dir: Path
    """Where model and metrics lie."""
    steps: int
    """Updates that were taken."""
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    """Each evaluation, in the order in which they were made."""
    metrics: list[StepFigures] = field(default_factory=list[StepFigures])
    """The figures of each step."""
    train_seconds: float = 0.0
    """From the first step to the last, evaluations between steps left out."""
    late_calls: dict[str, int] = field(default_factory=dict[str, int])
    """Model calls that ended after the last step had closed, by the reason of their exclusion."""

    def evaluation(self, sampling: str, *, last: bool) -> Evaluation | None:
        """Return the first or the last evaluation of a kind (`sampled` or `greedy`)."""
        found = [e for e in self.evaluations if e.sampling == sampling]
        return (found[-1] if last else found[0]) if found else None


class _NothingTaken(Exception):
    """Leaves a weight change without a new version: the weights are the old ones."""


@dataclass(kw_only=True)
class GRPORun:
    """One training run and the parts that it drives."""

    settings: GRPOSettings
    store: LightningStore
    policy: Policy
    engine: InferenceEngine
    proxy: LLMProxy
    adapter: TraceToTripletBase
    folder: RunFolder
    progress: Progress
    resume: Resumption
    keeper: CheckpointKeeper
    recorder: RunRecorder
    tasks: list[object]
    held_out: list[object]
    guard: DriftGuard = field(default_factory=DriftGuard)
    rollout_config: RolloutConfig | None = None
    """What the Trainer says of attempts, time limits and retries."""
    _skipped: int = 0
    _told_constrained: bool = False
    _late: LateCalls = field(default_factory=LateCalls)
    _endings: Endings = field(default_factory=Endings)
    _after: AfterStep | None = None
    """The last step that is complete."""
    _repeats: bool = False
    """The present step was recorded by an earlier start of the run, with the same weights."""
    _is_cancelled: bool = False
    _present: int = 0
    """The step that is being taken."""

    async def train(self) -> GRPOResult:
        """Evaluate, take every step, evaluate, save; what was learned is saved on every way out.

        Raises:
            NonFiniteLossError: the loss was not finite in three steps in a row.
            NoTrainableCallError: no rollout with a reward in the first step has a model call that can be trained.
            TooMuchDriftError: more turns drifted than `max_drift` allows.
            NoScoredRolloutError: no rollout of the whole run could be learned from.
        """
        settings = self.settings
        result = self._result_so_far()
        resources = await self._publish("train", settings.temperature)
        batches = batch_iter_over_dataset(self.tasks, settings.batch_size, random.Random(settings.seed))
        for _ in range(self.resume.steps):
            next(batches)
        try:
            await self._evaluate_at_start(result)
            for step in range(self.resume.steps + 1, settings.max_steps + 1):
                began = time.monotonic()
                figures = await self._step(step, next(batches), resources)
                result.train_seconds += time.monotonic() - began
                result.steps = self.policy.weight_version
                self._after = self._stand(figures, result, evaluated=False)
                try:
                    self._check_cancelled()
                    await self._evaluate_if_due(figures, result)
                    self._after = self._stand(figures, result, evaluated=True)
                finally:
                    await self._report(figures, result)
                await self.keeper.step_done(self._after, self._alarm)
                self._check_skipped()
        finally:
            try:
                await self.keeper.end(self._after)
            finally:
                self.policy.save(self.folder.model)
        self._endings.require_scored()
        return result

    # --- what goes on from an earlier start --------------------------------------------------------------------------

    def _result_so_far(self) -> GRPOResult:
        """Return the result of the steps that are in the checkpoint, and give the parts of the loop their state."""
        result, state = GRPOResult(self.folder.path, self.policy.weight_version), self.resume.state
        if state:
            self._skipped, self._told_constrained = state["skipped"], state["told_constrained"]
            self._endings.restore(state["endings"])
            self.guard.restore(state["guard"])
            result.train_seconds = state["train_seconds"]
            result.evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
            result.metrics = [figures_of(line) for line in figures_by_step(self.resume.lines, self.resume.steps)]
        return result

    def _stand(self, figures: StepFigures, result: GRPOResult, *, evaluated: bool) -> AfterStep:
        """Return where the run stands after a step."""
        fixed = {
            "skipped": self._skipped,
            "told_constrained": self._told_constrained,
            "endings": self._endings.state(),
            "guard": self.guard.state(),
            "late": self._late.state(),
            "train_seconds": result.train_seconds,
            "take": self.resume.take,
            "evaluated": evaluated,
            "threads": torch.get_num_threads(),
        }
        evaluations = list(result.evaluations)

        def state() -> dict[str, object]:
            return {**fixed, "evaluations": [dataclasses.asdict(evaluation) for evaluation in evaluations]}

        return AfterStep(figures.step, self.policy.weight_version, figures.weights, state)

    async def _evaluate_at_start(self, result: GRPOResult) -> None:
        """Measure before the first step, or what an earlier start was kept from measuring after its last one."""
        if not self.resume.steps:
            await self._evaluate(result, 0, greedy=True)
        elif not self.resume.state["evaluated"] and result.metrics:
            figures = result.metrics[-1]
            await self._evaluate_if_due(figures, result)
            self.resume.lines[figures.step] = dataclasses.asdict(figures)
            write_lines(self.folder.path / "metrics.jsonl", self.resume.lines.values())

    def _check_cancelled(self) -> None:
        """Raise what was held back while the weights changed."""
        if self._is_cancelled:
            raise asyncio.CancelledError

    def _alarm(self, text: str, name: str = "checkpoint") -> None:
        self._note(text, logging.WARNING)
        self.recorder.alarm(self._present, name, text)

    async def _publish(self, purpose: str, temperature: float) -> str:
        """Publish the policy for one purpose and return the id of the resources."""
        parameters: dict[str, object] = {"temperature": temperature, "max_tokens": self.settings.max_completion_length}
        resources = resources_to_publish(self.proxy, self.settings.resource_name, self.engine.model_name, parameters)
        update = await self.store.add_resources(resources)
        logger.debug("resources %s serve the policy for %s", update.resources_id, purpose)
        return update.resources_id

    async def _report(self, figures: StepFigures, result: GRPOResult) -> None:
        result.metrics.append(figures)
        if not self._repeats or figures.step not in self.resume.lines:
            self.folder.append_metrics(dataclasses.asdict(figures))
        self.progress.step(figures)
        logger.info(step_line(figures))
        if not self._repeats:
            await self.recorder.step(figures)

    def _note(self, text: str, level: int = logging.INFO) -> None:
        logger.log(level, text)
        self.progress.note(text)

    # --- one step --------------------------------------------------------------------------------------------------

    async def _step(self, step: int, tasks: Sequence[object], resources_id: str) -> StepFigures:
        self._present = step
        clock = _Clock(self.engine)
        ledger = Ledger(step=step)
        rollouts, rows = await self._sample(step, tasks, resources_id, ledger)
        clock.sampled()
        learning = asyncio.ensure_future(self._learn_and_account(step, rollouts, rows, ledger, clock))
        try:
            return await asyncio.shield(learning)
        except asyncio.CancelledError:  # an update that has begun is finished and accounted for, then the run ends
            self._is_cancelled = True
            return await learning

    async def _learn_and_account(
        self, step: int, rollouts: Sequence[Rollout], rows: StepRows, ledger: Ledger, clock: _Clock
    ) -> StepFigures:
        """Update the weights, close the ledger and return the figures of the step."""
        settings = self.settings
        update, seen = await self._learn(step, rows, ledger)
        digest = await asyncio.to_thread(digest_of, self.policy)
        self._repeats = await self.resume.repeats(step, digest)
        if not self._repeats:
            await self._enter_late_calls(ledger, rollouts)
        summary = ledger.close()
        if not self._repeats:
            await self.recorder.ledger(ledger, rows, seen)
        self._note_constrained(step, summary)
        seconds, cpu, tokens = clock.stop()
        return StepFigures(
            step=step,
            steps=settings.max_steps,
            mean_reward=rows.mean_reward,
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
            drift_rate=self.guard.drift_rate,
            weights=digest,
            take=self.resume.take_of(step),
        )

    async def _enter_late_calls(self, ledger: Ledger, rollouts: Sequence[Rollout]) -> None:
        """Enter the calls that ended after the step of their rollout, and those that earlier starts have left open."""
        present = {rollout.rollout_id for rollout in rollouts}
        for calls, reason in await self.resume.unaccounted(self.store, present):
            ledger.capture(calls)
            ledger.exclude([call.ref for call in calls], reason)
        await self._late.enter(self.store, ledger, in_hand=self.proxy.stats()["in_hand"])

    def _note_constrained(self, step: int, summary: LedgerSummary) -> None:
        """Say once that calls were constrained, and by what."""
        if summary.constrained and not self._told_constrained:
            self._told_constrained = True
            found = ", ".join(f"{name} ({count})" for name, count in summary.constrained.items())
            self._note(
                f"step {step}: some of {summary.trained} trained calls were constrained by {found}: their tokens were "
                "drawn from another distribution than the one that learns from them"
            )

    def _limits(self) -> RolloutConfig:
        settings = self.settings
        seconds = settings.rollout_timeout_seconds or settings.step_timeout_seconds
        return with_timeout(self.rollout_config, seconds)

    async def _sample(
        self, step: int, tasks: Sequence[object], resources_id: str, ledger: Ledger
    ) -> tuple[list[Rollout], StepRows]:
        """Run the tasks, and others in place of those whose rewards are all equal; choose the rows to train on."""
        settings = self.settings
        rollouts: list[Rollout] = []
        found: list[Evidence] = []
        records: list[RolloutRecord] = []
        groups: list[int] = []
        replaced: set[int] = set()
        seen = list(tasks)
        in_hand = 0
        for batch in range(1, settings.max_num_gen_batches + 1):
            first = len(seen) - len(tasks)
            ended = await self._run_tasks(step, tasks, resources_id, first=first)
            in_hand = max(in_hand, self.proxy.stats()["in_hand"])
            read = [await evidence(self.store, rollout, note=True) for rollout in ended]
            rollouts += ended
            found += read
            train_refused = settings.refused_calls == "train"
            records += read_records(read, self.adapter, decode=self.guard.decode, train_refused=train_refused)
            wanted = len(tasks) * settings.num_generations  # those that were enqueued once more come after these
            groups += [first + i // settings.num_generations if i < wanted else -1 for i in range(len(ended))]
            if batch == settings.max_num_gen_batches:
                break
            equal = [g for g in groups_of_equal_rewards(records, groups, settings) if g not in replaced]
            tasks = self._other_tasks(seen, len(equal), f"{settings.seed} {step} {batch}")
            if not tasks:
                break
            replaced.update(equal[: len(tasks)])
            seen += tasks
            self._note(f"step {step}: {len(tasks)} groups of equal rewards are replaced by others")
        kl = await self._divergences(records) if settings.use_kl_in_reward else None
        rows = choose_rows(records, groups, ledger, settings, replaced=replaced, kl=kl)
        self._watch(ledger.step, found, rows, in_hand)
        return rollouts, rows

    async def _run_tasks(self, step: int, tasks: Sequence[object], resources_id: str, *, first: int) -> list[Rollout]:
        """Run a group of rollouts for each task; `first` is the number of the first task within the step."""
        settings = self.settings
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=resources_id,
                config=self._limits(),
                metadata=metadata_of(step, number, sample, self.resume.take_of(step)),
            )
            for number, task in enumerate(tasks, start=first)
            for sample in range(settings.num_generations)
        ]
        what = f"step {step}"
        return await collect(
            self.store,
            requests,
            timeout_seconds=settings.step_timeout_seconds,
            on_done=lambda done: self.progress.rollouts(done, len(requests), what),
            on_ended=None if self.guard.has_looked else self._look_at_first,
            late=settings.late_rollouts,
        )

    def _other_tasks(self, seen: Sequence[object], count: int, seed: str) -> list[object]:
        """Return up to `count` tasks that the step has not seen, always the same ones for a seed."""
        known = {id(task) for task in seen}
        others = [task for task in self.tasks if id(task) not in known] if count else []
        return random.Random(seed).sample(others, min(count, len(others)))

    async def _divergences(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """Return the divergence of each rollout from the reference, in nats."""
        samples = [sample for record in records for sample in record.samples]
        if not samples:
            return {}

        def compute() -> list[float]:
            with self.engine.swap(self.settings.step_timeout_seconds):
                return self.policy.divergences(samples, loss=self.settings, temperature=self.settings.temperature)

        found: dict[str, float] = {}
        for sample, value in zip(samples, await asyncio.to_thread(compute), strict=True):
            found[sample.rollout_id] = found.get(sample.rollout_id, 0.0) + value
        return found

    def _watch(self, step: int, found: Sequence[Evidence], rows: StepRows, in_hand: int) -> None:
        """Let the watchers of the run see what became of a step's rollouts."""
        self._endings.add(found, rows)
        self._late.expect(found, in_hand=in_hand)
        self.guard.count_drift(rows.records)
        if (report := self.guard.untrainable(rows.records)) is not None:
            self._alarm(f"step {step}: {report}", "untrainable")
        if (report := self.guard.refusals(rows.records)) is not None:
            self._alarm(f"step {step}: {report}", "refused_calls")
        if rows.mean_reward is None:
            self._report_failure(step, found)

    async def _look_at_first(self, ended: Sequence[Rollout]) -> None:
        """Look at the first rollout with a reward as soon as it is there."""
        for rollout in ended:
            if self.guard.has_looked:
                return
            if (report := self.guard.first_look(await evidence(self.store, rollout))) is not None:
                self._alarm(report, "first_rollout")

    def _report_failure(self, step: int, found: Sequence[Evidence]) -> None:
        text = f"step {step}: none of {len(found)} rollouts has a reward to learn from; most often: {why_failed(found)}"
        self._alarm(text, "no_reward")

    async def _learn(self, step: int, rows: StepRows, ledger: Ledger) -> tuple[dict[str, float], Sequence[RowFigures]]:
        """Take the optimizer's steps while no call is served, and enter into the ledger what became of the rows.

        Returns figures of the update, and what the loss used of each row.
        """
        seen: Sequence[RowFigures] = ()
        if not rows.samples:
            broken = rows.mean_reward is None and not await asyncio.to_thread(self.policy.gives_probabilities)
            update: dict[str, float] = {"steps": 0, "skipped_steps": int(broken)}
        else:
            update, seen = await self._change_weights(step, rows)
        rows.enter(ledger, trained=update["steps"] > 0)
        self._count_skipped(update)
        return update, seen

    async def _change_weights(self, step: int, rows: StepRows) -> tuple[dict[str, float], Sequence[RowFigures]]:
        """Update while the gateway holds calls back; they are stamped with a new version only if there is one."""
        update, seen = dict[str, float](), list[RowFigures]()
        try:
            async with self.proxy.weight_change(
                self.policy.weight_version + 1, drain_timeout=self.settings.step_timeout_seconds
            ):
                result = await asyncio.to_thread(self._update, step, rows)
                share = rows.share(self.settings.aggregates_by)
                update, seen = result.figures | {"share": share}, result.rows
                for note in result.notes:
                    self._alarm(f"step {step}: {note}", "update")
                if not update["steps"]:
                    raise _NothingTaken
        except _NothingTaken:
            pass
        return update, seen

    def _update(self, step: int, rows: StepRows) -> UpdateResult:
        settings = self.settings
        with self.engine.swap(settings.step_timeout_seconds):
            share = rows.share(settings.aggregates_by)
            return update_policy(self.policy, settings, rows.samples, rows.advantages, step=step, share=share)

    def _count_skipped(self, update: dict[str, float]) -> None:
        self._skipped = self._skipped + 1 if update["steps"] == 0 and update["skipped_steps"] > 0 else 0
        if update["skipped_steps"]:
            text = f"{update['skipped_steps']:.0f} optimizer steps skipped: loss or probabilities are not finite"
            self._alarm(text, "skipped_steps")

    def _check_skipped(self) -> None:
        if self._skipped >= MAX_SKIPPED:
            raise NonFiniteLossError(
                f"The loss was not finite in {MAX_SKIPPED} steps in a row; the run ends. "
                f"Try a smaller learning_rate (now {self.settings.learning_rate}), or look at the rewards. "
                f"The last weights are in {self.folder.model}"
            )

    async def late_calls(self) -> dict[str, int]:
        """Account for the calls that ended after the last step; return them by the reason of their exclusion. To be
        called when no further call can come in."""
        ledger = Ledger(step=self.settings.max_steps + 1)
        await self._enter_late_calls(ledger, [])
        summary = ledger.close()
        await self.recorder.ledger(ledger)
        excluded = {str(reason): count for reason, count in summary.excluded.items()}
        if excluded:
            logger.info("%d model calls ended after the last step: %s", summary.captured, excluded)
        return excluded

    # --- evaluation ------------------------------------------------------------------------------------------------

    async def _evaluate_if_due(self, figures: StepFigures, result: GRPOResult) -> None:
        every, last = self.settings.eval_steps, figures.step == self.settings.max_steps
        if self.held_out and (last or (every and figures.step % every == 0)):
            figures.held_out = await self._evaluate(result, figures.step, greedy=last)

    async def _evaluate(self, result: GRPOResult, step: int, *, greedy: bool) -> float | None:
        """Run the held-out tasks at the training temperature and, beside it, greedily; return the former's share of
        solved tasks, None without any task."""
        if not self.held_out:
            return None
        found = [await self._evaluate_one(step, "sampled", self.settings.temperature)]
        if greedy:
            found.append(await self._evaluate_one(step, "greedy", 0.0))
        result.evaluations.extend(found)
        for evaluation in found:
            await self.recorder.evaluation(step, evaluation, self.held_out)
        shares = ", ".join(f"{e.accuracy:.1%} {e.sampling}" for e in found)
        self._note(f"held-out after {self.policy.weight_version} updates: {shares}")
        return found[0].accuracy

    async def _evaluate_one(self, step: int, sampling: str, temperature: float) -> Evaluation:
        resources_id = await self._publish(sampling, temperature)
        what = f"held-out tasks, {sampling}"
        return await evaluate_tasks(
            self.store,
            self.held_out,
            step=self.policy.weight_version,
            sampling=sampling,
            resources_id=resources_id,
            config=self._limits(),
            timeout_seconds=self.settings.step_timeout_seconds,
            place={**metadata_of(step, 0, 0, self.resume.take_of(step)), "sampling": sampling},
            on_done=lambda done: self.progress.rollouts(done, len(self.held_out), what),
        )


class _Clock:
    """Measures one step: wall seconds by phase, CPU seconds of the servers' threads, tokens generated."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._began = self._sampled = time.monotonic()
        self._cpu = thread_cpu_seconds(_SERVER_THREADS)
        self._engine_before = engine.stats()

    def sampled(self) -> None:
        """The rollouts of the step are there."""
        self._sampled = time.monotonic()

    def stop(self) -> tuple[dict[str, float], dict[str, float], int]:
        """Return seconds by phase, CPU seconds, and tokens."""
        before, after = self._engine_before, self._engine.stats()
        generate = after.busy_seconds - before.busy_seconds
        wait = max(0.0, self._sampled - self._began - generate)
        seconds = {"generate": generate, "wait": wait, "train": time.monotonic() - self._sampled}
        cpu = {"store_and_gateway": thread_cpu_seconds(_SERVER_THREADS) - self._cpu}
        return seconds, cpu, after.completion_tokens - before.completion_tokens
