"""HistoryOperations: the part of the contract that takes in what another store saw; `LightningStore` has it all."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.types import Attempt, HistoryImport, ResourcesUpdate, Rollout, Span


class HistoryOperations:
    """Rollouts that have ended elsewhere, as they were."""

    async def import_history(
        self,
        *,
        resources: Sequence[ResourcesUpdate] = (),
        rollouts: Sequence[Rollout] = (),
        attempts: Sequence[Attempt] = (),
        spans: Sequence[Span] = (),
    ) -> HistoryImport:
        """Take in pieces of a finished history: with the ids, times, statuses and numbers that they have.

        Rollouts and attempts must have ended. The attempts of a rollout come in the order of their numbers, from 1 on,
        with their rollout or later; spans with their attempt or later, each with its number. What is there already is
        left as it is, so a call may be repeated, and several may run at once. A piece that cannot be taken is named in
        the answer, and the others are taken: a rollout with its attempts and spans at once, after the resources; many
        rollouts in several steps, between which others are served. Nothing of it is claimed, retried, or counted as
        work of this store.

        An attempt that says no outcome is given one: `scored` if it succeeded and a span of it carries a finite reward,
        `unscored` if it succeeded without, and for other statuses that of an attempt here which says none.

        Raises:
            BadRequestError: a value has not the shape of its field, or a span has no number.
            BusyError: the store is full. The resources were taken, and of a long history some of the rollouts.
            TooLargeError: a rollout with its attempts is more than the store holds in one piece. The same was taken.
            NotImplementedError: this store takes in no history; those of this package do.
        """
        raise NotImplementedError(
            "This store does not implement import_history; import into one of this package, such as sqlite:///FILE"
        )
