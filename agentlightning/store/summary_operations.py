"""SummaryOperations: the part of the contract that tells of many rollouts in short; `LightningStore` has it all.

A store that lacks it has what is here: it reads the rollouts, and the spans of those without a reward. Stores of this
package keep what is asked for beside the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from agentlightning.store.run_operations import SortOrder
from agentlightning.types import AggregateBy, RolloutAggregate, RolloutFilter, SummaryPage
from agentlightning.types.summaries import AnySummarySort

if TYPE_CHECKING:
    from agentlightning.store.read_operations import ReadOperations


class SummaryOperations:
    """Pages of summaries, and figures over rollouts."""

    async def query_rollout_summaries(
        self,
        *,
        filter: RolloutFilter | None = None,
        sort_by: AnySummarySort = "start_time",
        sort_order: SortOrder = "desc",
        limit: int = 100,
        offset: int = 0,
        cursor: str | None = None,
    ) -> SummaryPage:
        """Return rollouts that pass the filter, in short, and exactly how many there are.

        Those without what is sorted by are last in both orders. `cursor` is that of an earlier page, in the same order;
        the page after it stays the right one while rollouts are added. `limit` is from 1 to 1000.

        Raises:
            BadRequestError: an argument is wrong, the cursor is of another order, or it is given beside an `offset`.
        """
        from agentlightning.store.summaries.defaults import query_summaries

        return await query_summaries(
            cast("ReadOperations", self), filter, sort_by, sort_order, limit=limit, offset=offset, cursor=cursor
        )

    async def aggregate_rollouts(
        self,
        *,
        by: AggregateBy = "step",
        filter: RolloutFilter | None = None,
        buckets: int = 0,
        dimension: str | None = None,
    ) -> RolloutAggregate:
        """Return figures of the rollouts that pass the filter, in groups: counts, mean and quantiles of the rewards.

        `buckets` (at most 100) asks for a histogram of the rewards. `dimension` takes one dimension of the rewards in
        the place of the reward.

        Raises:
            BadRequestError: an argument is wrong.
        """
        from agentlightning.store.summaries.defaults import aggregate

        return await aggregate(cast("ReadOperations", self), by, filter, buckets, dimension)
