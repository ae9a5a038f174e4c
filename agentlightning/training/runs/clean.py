"""Runs and records without secrets, on their way into a store and out of it."""

from __future__ import annotations

from agentlightning.types.runs import Run, RunRecord
from agentlightning.utils.masking import masked


def clean_run(run: Run) -> Run:
    """Return a run without secrets, whoever has written it."""
    return Run.model_validate(masked(run.model_dump(mode="json")))


def clean_record(record: RunRecord) -> RunRecord:
    """Return a record without secrets; token rows are numbers and stay exactly as they are."""
    data = dict(record.data)
    rows = data.pop("rows", None) if record.kind == "ledger" else None
    data = masked(data)
    if rows is not None:
        data["rows"] = rows
    return record.model_copy(update={"data": data})
