"""The rollouts of a step of supervised fine-tuning: run and chosen, or read from the store where they were chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typing_extensions import override

from agentlightning.errors import NoScoredRolloutError
from agentlightning.training.chosen.choosing import Candidate, Pick, counts_text, left_out
from agentlightning.training.chosen.sft_settings import SFTSettings
from agentlightning.training.chosen.stored import check_tokens
from agentlightning.training.collection import ReadRollouts, RolloutCollection
from agentlightning.training.ledger import Ledger
from agentlightning.training.parts import RunParts
from agentlightning.training.rollouts import evidence
from agentlightning.training.rows import StepRows, seams_of, was_cut
from agentlightning.training.run_checks import Endings
from agentlightning.types import Rollout


class ChosenEndings(Endings):
    """Counts also what was chosen: a run that chose nothing does not end as if it were well."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = 0
        self.best: float | None = None
        """The greatest reward of all rollouts."""

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "chosen": self.chosen, "best": self.best}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.chosen, self.best = state["chosen"], state["best"]

    @override
    def require_scored(self) -> None:
        super().require_scored()
        if not self.chosen:
            raise NoScoredRolloutError(
                f"The run chose no rollout to learn from: the best reward was {self.best}. Its model is the one that "
                "it began with. Choose by a lower min_reward, or by best_per_task or top_share, which always find some"
            )


class ChosenCollection(RolloutCollection):
    """Collects the chosen rollouts of each step. Belongs to the loop.

    The tasks of a run whose rollouts are stored are the ids of the chosen ones.
    """

    def __init__(self, parts: RunParts, tasks: list[object]) -> None:
        super().__init__(parts, tasks)
        self.endings: ChosenEndings = ChosenEndings()
        self._pick: Pick | None = parts.pick
        self._has_checked = False

    @property
    def _settings(self) -> SFTSettings:
        assert isinstance(self._parts.settings, SFTSettings)
        return self._parts.settings

    @override
    async def collect(
        self, step: int, tasks: Sequence[object], resources_id: str, ledger: Ledger
    ) -> tuple[list[Rollout], StepRows]:
        if self._settings.collects:
            return await super().collect(step, tasks, resources_id, ledger)
        store = self._parts.store
        read = ReadRollouts()
        for number, rollout_id in enumerate(tasks):
            rollout = await store.get_rollout_by_id(str(rollout_id))
            assert rollout is not None, rollout_id  # it was there when the run began
            found = [await evidence(store, rollout)]
            records = self._records(found)
            if not self._has_checked and records[0].samples:
                policy = self._parts.learners.all[0].policy
                self._has_checked = await asyncio.to_thread(check_tokens, found[0], records[0], policy)
            read.add([rollout], found, records, [number])
        return read.rollouts, self._chosen(read, ledger, 0)

    @override
    def _chosen(
        self,
        read: ReadRollouts,
        ledger: Ledger,
        in_hand: int,
        *,
        replaced: Collection[int] = (),
        kl: Mapping[str, float] | None = None,
    ) -> StepRows:
        rows, reasons = self._choose(read, ledger)
        self.endings.chosen += len({sample.rollout_id for sample in rows.samples})
        self.endings.best = max(
            [*rows.rewards, *([] if self.endings.best is None else [self.endings.best])], default=None
        )
        if rows.rewards and not rows.samples:
            told = f"their best reward is {max(rows.rewards):g}; left out: {counts_text(reasons)}"
            self._parts.alarm(
                f"step {ledger.step}: none of {len(rows.rewards)} scored rollouts was chosen: {told}", "none_chosen"
            )
        self._watch(ledger.step, read.collected, rows, in_hand)
        return rows

    def _choose(self, read: ReadRollouts, ledger: Ledger) -> tuple[StepRows, dict[str, str]]:
        """Return the rows of the chosen rollouts, and why the others are left out."""
        scored = [
            (rollout, record, Candidate(rollout.rollout_id, group, record.reward))
            for rollout, record, group in zip(read.rollouts, read.records, read.groups, strict=True)
            if record.verdict is None and record.reward is not None
        ]
        rewards = [candidate.reward for *_, candidate in scored]
        seams = seams_of(read.records)
        rows = StepRows(
            rewards=rewards, kept_rewards=rewards, seams=seams, records=list(read.records), groups=list(read.groups)
        )
        for record in read.records:
            ledger.add(record)
        reasons: dict[str, str] = {}
        if self._settings.collects:
            reasons |= {
                r.rollout_id: "not_picked" for r, _, one in scored if self._pick and not self._pick(r, one.reward)
            }
            usable = [one for _, record, one in scored if record.samples and one.rollout_id not in reasons]
            reasons |= left_out(usable, self._settings.rule)
        for _, record, candidate in scored:
            cut = self._settings.mask_truncated_completions and was_cut(record)
            for sample in record.samples:
                if candidate.rollout_id in reasons:
                    ledger.exclude(sample, "not_chosen")
                elif cut:
                    ledger.exclude(sample, "over_length")
                else:
                    rows.samples.append(sample)
                    rows.advantages.append(1.0)
        return rows, reasons
