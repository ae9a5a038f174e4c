"""The token rows that are handed to VERL, by task and session, and the figures that it reports of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.rows.samples import Sample, samples_from_calls
from agentlightning.training.external.verl.bridge import Row
from agentlightning.training.rollouts import Evidence
from agentlightning.training.rows import StepRows


def rows_of_step(rows: StepRows, tasks: int, sessions: int, *, filler: int) -> list[list[list[Row]]]:
    """Return the rows of a training step that teach something.

    VERL takes the reward of a lone rollout of a task for its advantage, and for equal rewards what rounding leaves. The
    ledger says that neither is trained, so neither is handed over.

    Args:
        filler: a token id. A step in which nothing is trained needs one row; its update is skipped.
    """
    trained = {sample.rollout_id for sample in rows.samples}
    by_place: list[list[list[Row]]] = [[[] for _ in range(sessions)] for _ in range(tasks)]
    for number, record in enumerate(rows.records[: tasks * sessions]):
        if record.rollout_id in trained:
            place, session = divmod(number, sessions)
            reward, calls = record.reward or 0.0, len(record.calls)
            by_place[place][session] = [_row(sample, reward, calls) for sample in record.samples]
    if not trained:
        by_place[0][0] = [_filler(filler, 0.0)]
    return by_place


def rows_of_evaluation(
    evidence: Sequence[Evidence], rewards: Sequence[float | None], *, filler: int
) -> list[list[list[Row]]]:
    """Return the rows of an evaluation: one session for each held-out task; a missing reward is 0."""
    by_place: list[list[list[Row]]] = []
    for rollout, reward in zip(evidence, rewards, strict=True):
        calls = model_calls(rollout.counted)
        rows = [_row(sample, reward or 0.0, len(calls)) for sample in samples_from_calls(calls).samples]
        by_place.append([rows or [_filler(filler, reward or 0.0)]])
    return by_place


def reported_rows(report: Mapping[str, Any], rows: StepRows, sessions: int) -> list[Mapping[str, Any] | None]:
    """Return the figures that VERL reports of each row: (B,), None where it excluded the row."""
    by_place: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for key, columns in report["rows"].items():
        uid, session, index = key.rsplit("_", 2)
        by_place[report["places"][uid], int(session), int(index)] = columns
    keys = {
        id(sample): (*divmod(number, sessions), index)
        for number, record in enumerate(rows.records)
        for index, sample in enumerate(record.samples)
    }
    return [by_place.get(keys[id(sample)]) for sample in rows.samples]


def _row(sample: Sample, reward: float, calls: int) -> Row:
    first = sample.mask.index(1)
    return {
        "prompt_ids": sample.token_ids[:first],
        "response_ids": sample.token_ids[first:],
        "response_mask": sample.mask[first:],
        "logprobs": sample.logprobs[first:],
        "reward": reward,
        "versions": [version for version in sample.weight_versions if version >= 0],
        "calls": calls,
    }


def _filler(token: int, reward: float) -> Row:
    one = {"prompt_ids": [token], "response_ids": [token], "response_mask": [1], "logprobs": [0.0]}
    return {**one, "reward": reward, "versions": [], "calls": 0}
