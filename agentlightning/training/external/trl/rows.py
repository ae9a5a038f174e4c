"""The rows of a step for TRL: exactly one for each prompt and generation, in order.

An excluded rollout (crashed, without a reward, cut off, late) is a row of two tokens with mask 0 and no reward. TRL
excludes it from the statistics of its group, so it never counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentlightning.errors import BadRequestError

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample
    from agentlightning.training.ledger import RolloutRecord
    from agentlightning.training.rows import StepRows


@dataclass(frozen=True)
class TRLRow:
    """The row of one rollout, split before the first token of the policy."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """The engine's, natural logarithm; 0 where `env_mask` is 0."""
    env_mask: list[int]
    """1 on the tokens of the policy."""
    agl_reward: float | None
    is_trained: bool
    """False if the row must not change the weights, regardless of its reward."""


def trl_rows(rows: StepRows, count: int, *, filler: int, masks_equal: bool) -> list[TRLRow]:
    """Return the rows of a step for TRL: (B,), B = `count`.

    Args:
        count: tasks times generations; additional rollouts replaced late ones.
        filler: token id of masked rows.
        masks_equal: whether rows of groups with equal rewards are also masked. Their advantage is zero, so they change
            the weights only if the loss has a penalty or a bonus in addition to the reward; otherwise TRL counts them
            in its means.

    Raises:
        BadRequestError: a rollout has more than one row. The message names the cause and a suitable algorithm.
    """
    trained = {sample.rollout_id for sample in rows.samples}
    shown = trained if masks_equal else trained | {sample.rollout_id for sample in rows.without_signal}
    result: list[TRLRow] = []
    for record in rows.records[:count]:
        if record.rollout_id not in shown:
            result.append(TRLRow([filler], [filler], [0.0], [0], None, False))
            continue
        row = _only_row(record)
        first = row.mask.index(1)
        parts = row.token_ids[:first], row.token_ids[first:], row.logprobs[first:], row.mask[first:]
        result.append(TRLRow(*parts, record.reward, record.rollout_id in trained))
    return result


def _only_row(record: RolloutRecord) -> Sample:
    if len(record.samples) == 1:
        return record.samples[0]
    causes = ", ".join(f"{cause} ({count})" for cause, count in record.seams.items() if count)
    raise BadRequestError(
        f"Rollout {record.rollout_id} has {len(record.samples)} token rows ({causes}), but TRL requires one for each "
        "prompt and generation. Use agl.GRPO for agents with several rows per rollout (parallel calls, several "
        "conversations, turns that do not continue the previous one). To see the rows, run agl rollouts explain "
        "<rollout id>"
    )


def as_output(rows: Sequence[TRLRow]) -> dict[str, Any]:
    """Return rows in the output format of TRL's `rollout_func`."""
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "agl_reward")
    return {name: [getattr(row, name) for row in rows] for name in names}
