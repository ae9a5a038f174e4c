"""What a step hands to VERL: for each task and session its rows, none where the rollout is excluded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.rows.samples import samples_from_calls
from agentlightning.training.external.verl.bridge import Row
from agentlightning.training.rollouts import Evidence

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample
    from agentlightning.training.rows import StepRows

Rows = list[list[list[Row]]]
"""rows[place][session]"""


def rows_of_step(rows: StepRows, tasks: int, sessions: int, *, filler: int) -> Rows:
    """Return the rows of a training step: those that teach something.

    A lone rollout of a task has its reward as the advantage in VERL, and one of equal rewards what is left of rounding;
    the ledger says that neither is trained, so neither is handed over.

    Args:
        filler: a token id. A step in which nothing is trained needs one row; its update is left out.
    """
    trained = {sample.rollout_id for sample in rows.samples}
    found: Rows = [[[] for _ in range(sessions)] for _ in range(tasks)]
    for number, record in enumerate(rows.records[: tasks * sessions]):
        if record.rollout_id in trained:
            place, session = divmod(number, sessions)
            found[place][session] = [_row(sample, record.reward or 0.0, len(record.calls)) for sample in record.samples]
    if not trained:
        found[0][0] = [_filler(filler, 0.0)]
    return found


def rows_of_evaluation(found: Sequence[Evidence], rewards: Sequence[float | None], *, filler: int) -> Rows:
    """Return the rows of an evaluation: one session for each held-out task, 0 for one without a reward."""
    return [[_rows_of(one, reward or 0.0, filler)] for one, reward in zip(found, rewards, strict=True)]


def _rows_of(found: Evidence, reward: float, filler: int) -> list[Row]:
    calls = model_calls(found.counted)
    samples = samples_from_calls(calls).samples
    return [_row(sample, reward, len(calls)) for sample in samples] or [_filler(filler, reward)]


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
