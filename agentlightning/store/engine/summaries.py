"""The operations that tell of many rollouts in short, on every backend: arguments checked, one script each."""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/summary_operations.py.

from __future__ import annotations

from typing_extensions import override

from agentlightning.store.engine.runtime import StoreRuntime
from agentlightning.store.summaries.aggregate import AggregatePlan
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.store.summary_operations import SummaryOperations
from agentlightning.store.wrappers.text_check import refuse_broken_texts
from agentlightning.types import RolloutAggregate, SummaryPage


@refuse_broken_texts
class SummaryEngine(SummaryOperations):
    """The part of a store over a backend that tells of many rollouts in short."""

    _runtime: StoreRuntime

    @override
    async def query_rollout_summaries(
        self, *, filter=None, sort_by="start_time", sort_order="desc", limit=100, offset=0, cursor=None
    ) -> SummaryPage:
        plan = SummaryPlan.of(filter, sort_by, sort_order, limit, offset, cursor)
        if self._runtime.settled() is None:
            await self._runtime.scan()
        return await self._runtime.read(lambda tx: tx.find_summaries(plan))

    @override
    async def aggregate_rollouts(self, *, by="step", filter=None, buckets=0, dimension=None) -> RolloutAggregate:
        plan = AggregatePlan.of(by, filter, buckets, dimension)
        if self._runtime.settled() is None:
            await self._runtime.scan()
        return await self._runtime.read(lambda tx: tx.aggregate(plan))
