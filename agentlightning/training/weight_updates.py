"""The weights of a training step: changed while no call is served; then the rows are entered into the ledger."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from agentlightning.errors import NonFiniteLossError
from agentlightning.training.learner.row_figures import RowFigures
from agentlightning.training.ledger import Ledger
from agentlightning.training.parts import RunParts
from agentlightning.training.policies.updating import StepUpdate, update_learners
from agentlightning.training.rows import StepRows

MAX_SKIPPED = 3
"""Steps in a row whose loss was not finite, before the run ends."""


MAX_DRAINS = 3
"""Times that asynchronous collection waits for the calls in progress before a weight change; between two, calls that
were held back go on."""


class NothingTaken(Exception):
    """Leaves a weight change without a new version: the weights are the old ones."""


class WeightUpdates:
    """Takes the update of each step. Belongs to the loop.

    Attributes:
        skipped: steps in a row, up to the present one, whose loss was not finite.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.skipped = 0

    async def learn(self, step: int, rows: StepRows, ledger: Ledger) -> tuple[dict[str, float], Sequence[RowFigures]]:
        """Take the optimizer's steps while no call is served, and enter into the ledger what became of the rows.

        Returns figures of the update, and what the loss used of each row.
        """
        learners = self._parts.learners
        if not rows.samples:
            broken = not rows.rewards and not await asyncio.to_thread(learners.gives_probabilities)
            update = StepUpdate({"steps": 0, "skipped_steps": int(broken)}, [], frozenset())
        else:
            update = await self._change_weights(step, rows)
        changed = [learner for learner in learners.all if learner.name in update.changed]
        rows.enter(ledger, trained=lambda sample: any(learner.takes(sample) for learner in changed))
        self._count_skipped(update.figures)
        return update.figures, update.rows

    async def _change_weights(self, step: int, rows: StepRows) -> StepUpdate:
        """Update while the gateway holds calls back; they are stamped with a new version only if there is one.

        Raises:
            TimeoutError: model calls still ran after `step_timeout_seconds`; no weight was changed.
        """
        if not self._parts.settings.max_staleness:
            return await self._change_weights_once(step, rows, self._parts.settings.step_timeout_seconds)
        seconds = self._parts.settings.step_timeout_seconds / MAX_DRAINS
        for _ in range(MAX_DRAINS - 1):
            try:
                return await self._change_weights_once(step, rows, seconds)
            except TimeoutError as error:
                self._parts.alarm(f"step {step}: {error}; the weights are as before, and it is tried again", "drain")
        return await self._change_weights_once(step, rows, seconds)

    async def _change_weights_once(self, step: int, rows: StepRows, drain_seconds: float) -> StepUpdate:
        update: StepUpdate | None = None
        with contextlib.suppress(NothingTaken):
            async with self._parts.proxy.weight_change(
                self._parts.learners.weight_version + 1, drain_timeout=drain_seconds
            ):
                update = await asyncio.to_thread(self._update, step, rows)
                for note in update.notes:
                    self._parts.alarm(f"step {step}: {note}", "update")
                if not update.changed:
                    raise NothingTaken
        assert update is not None
        return update

    def _update(self, step: int, rows: StepRows) -> StepUpdate:
        learners, settings = self._parts.learners, self._parts.settings
        with learners.swap(settings.step_timeout_seconds):
            shares = {each.name: rows.share(settings.aggregates_by, each.takes) for each in learners.all}
            return update_learners(learners, rows.samples, rows.advantages, step=step, shares=shares)

    def _count_skipped(self, update: dict[str, float]) -> None:
        self.skipped = self.skipped + 1 if update["steps"] == 0 and update["skipped_steps"] > 0 else 0
        if update["skipped_steps"]:
            text = f"{update['skipped_steps']:.0f} optimizer steps skipped: loss or probabilities are not finite"
            self._parts.alarm(text, "skipped_steps")

    def check_skipped(self, model: Path) -> None:
        """Return while the run may go on; `model` is where its weights are kept.

        Raises:
            NonFiniteLossError: the loss was not finite in three steps in a row.
        """
        if self.skipped >= MAX_SKIPPED:
            raise NonFiniteLossError(
                f"The loss was not finite in {MAX_SKIPPED} steps in a row; the run ends. "
                f"Try a smaller learning_rate (now {self._parts.settings.learning_rate}), or look at the rewards. "
                f"The last weights are in {model}"
            )
