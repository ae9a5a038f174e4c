"""The records of a training run in its store: each step, the ledger of its calls, evaluations, alarms."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentlightning.evaluation.tasks import tasks_of
from agentlightning.training.ledger import Ledger
from agentlightning.training.ledger_records import LedgerRow, entries_of, row_of, vocabulary_id, vocabulary_of
from agentlightning.training.progress import StepFigures
from agentlightning.training.records import RunLog
from agentlightning.training.result import Evaluation
from agentlightning.training.rows import StepRows
from agentlightning.training.settings import RecordTokens

if TYPE_CHECKING:
    from agentlightning.training.learner.figures import RowFigures
    from agentlightning.training.updater import Updater

logger = logging.getLogger(__name__)

SAMPLED_TOKENS = 65_536
"""Tokens of a step whose figures are recorded where not all of them are: whole rollouts, spread over the step."""
ROW_TOKENS = 200_000
"""Tokens of a rollout whose figures fit into one record."""


class RunRecorder:
    """Writes the records of one run. Belongs to the loop."""

    def __init__(
        self, log: RunLog, updater: Updater, record_tokens: RecordTokens = "auto", *, has_held_out: bool = False
    ) -> None:
        self._log = log
        self._learners = updater.learners
        small = all(each.policy.is_small for each in self._learners)
        self._tokens = record_tokens if record_tokens != "auto" else "all" if small else "sample"
        self._vocabularies: dict[str | None, str] = {}
        self._has_held_out = has_held_out

    async def step(self, figures: StepFigures) -> None:
        """Record the figures of a step; the mean reward is the best figure of a run without held-out tasks."""
        await self._log.step(figures.step, dataclasses.asdict(figures))
        if figures.mean_reward is not None and not self._has_held_out:
            await self._log.best("mean_reward", figures.mean_reward, figures.step)

    async def ledger(self, ledger: Ledger, rows: StepRows | None = None, seen: Sequence[RowFigures] = ()) -> None:
        """Record what became of the calls of a step that has closed; `seen`: (B,) what the loss used of each row."""
        if not self._log.keeps_records:
            return
        kept = {} if rows is None or not seen else await self._rows(rows, seen)
        records = [] if rows is None else rows.records
        groups = None if rows is None else rows.groups
        entries = entries_of(ledger, records, groups, kept)
        if entries:
            await self._log.ledger(ledger.step, entries)

    async def evaluation(self, step: int, evaluation: Evaluation, tasks: Sequence[object]) -> None:
        """Record an evaluation after a step, task by task; tasks as digests, so that runs can be compared in pairs."""
        data = {
            "sampling": evaluation.sampling,
            "weight_version": evaluation.step,
            "failed": evaluation.failed,
            "rewards": evaluation.rewards,
            "rollout_ids": evaluation.rollout_ids,
            "tasks": tasks_of(tasks),
            "seconds": evaluation.seconds,
        }
        if evaluation.solved is not None:
            data["solved"] = sum(evaluation.solved)
        counts = evaluation.sampling == "sampled"
        name = f"held_out_{evaluation.sampling}"
        await self._log.evaluation(step, name, data, value=evaluation.mean_reward, counts_for_best=counts)

    def alarm(self, step: int, name: str, text: str, **data: object) -> None:
        """Record something that somebody should look at, see `RunLog.alarm`; stored before the run ends."""
        self._log.alarm(step, name, text, **data)

    async def _rows(self, rows: StepRows, seen: Sequence[RowFigures]) -> dict[str, list[LedgerRow]]:
        """Return the rows whose tokens are recorded, by rollout."""
        chosen = self._chosen(rows)
        if not chosen:
            return {}
        if not self._vocabularies:
            for learner in self._learners:
                tokens = vocabulary_of(learner.policy.tokenizer)
                self._vocabularies[learner.name] = vocabulary_id(tokens)
                await self._log.vocabulary(self._vocabularies[learner.name], tokens)
        kept: dict[str, list[LedgerRow]] = {}
        for number, (sample, one) in enumerate(zip(rows.samples, seen, strict=True)):
            if sample.rollout_id in chosen:
                columns = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
                figures = {name: column for name, column in columns.items() if column is not None}
                vocabulary = next(self._vocabularies[each.name] for each in self._learners if each.takes(sample))
                row = row_of(sample, row=number, vocabulary=vocabulary, **figures)
                kept.setdefault(sample.rollout_id, []).append(row)
        return kept

    def _chosen(self, rows: StepRows) -> frozenset[str]:
        """Return the rollouts whose tokens are recorded."""
        lengths: dict[str, int] = {}
        for sample in rows.samples:
            lengths[sample.rollout_id] = lengths.get(sample.rollout_id, 0) + len(sample.token_ids)
        fitting = [rollout_id for rollout_id, length in lengths.items() if length <= ROW_TOKENS]
        if len(fitting) < len(lengths) and self._tokens == "all":
            logger.info("the tokens of %d rollouts are too many for one record", len(lengths) - len(fitting))
        if self._tokens != "sample":
            return frozenset(fitting if self._tokens == "all" else ())
        left, chosen = SAMPLED_TOKENS, set[str]()
        stride = max(1, sum(lengths.values()) // SAMPLED_TOKENS)
        for rollout_id in fitting[::stride]:
            if lengths[rollout_id] <= left:
                chosen.add(rollout_id)
                left -= lengths[rollout_id]
        return frozenset(chosen)
