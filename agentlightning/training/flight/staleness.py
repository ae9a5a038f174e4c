"""How old the replies of a group are, and what is left of a group that is too old."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from agentlightning.adapter.calls.calls import CallRef
from agentlightning.adapter.rows.samples import UNKNOWN_WEIGHTS, Sample, SampleReading
from agentlightning.training.ledger import ExclusionReason, RolloutRecord


def age_of_group(records: Sequence[RolloutRecord], weight_version: int) -> int | None:
    """Return by how many versions the oldest reply of the counted attempts is behind; None without any reply whose
    tokens are known. One whose weights nobody recorded is older than any."""
    ages = [
        weight_version - (UNKNOWN_WEIGHTS if call.weight_version is None else call.weight_version)
        for record in records
        for call in record.calls
        if call.completion_token_ids and call.ref.attempt_id == record.attempt_id and _may_be_trained(record, call.ref)
    ]
    return max(ages, default=None)


def _may_be_trained(record: RolloutRecord, call: CallRef) -> bool:
    """True for calls in rows, and for those that wait for the reward of their group."""
    return record.exclusions.get(call, "no_reward") == "no_reward"


def dropped(record: RolloutRecord, *, unjudged: bool) -> RolloutRecord:
    """Return a rollout of a group that is too old: what of it could be trained is excluded as `too_stale`.

    `unjudged` tells that it has no reward because its group was not asked for one.
    """
    replaced: tuple[ExclusionReason | None, ...] = (None, "no_reward") if unjudged else (None,)
    if record.verdict not in replaced:
        return record
    exclusions = dict(record.exclusions)
    for call in record.calls:
        if call.ref not in exclusions or (unjudged and exclusions[call.ref] == "no_reward"):
            exclusions[call.ref] = "too_stale"
    return dataclasses.replace(record, verdict="too_stale", exclusions=exclusions, reading=SampleReading([], []))


def staleness_figures(samples: Iterable[Sample], weight_version: int) -> dict[str, float]:
    """Return the mean and the largest age of the calls in rows, in weight versions; nothing without any."""
    ages = [weight_version - version for sample in samples for version in sample.weight_versions]
    return {"mean_staleness": sum(ages) / len(ages), "max_staleness": max(ages)} if ages else {}
