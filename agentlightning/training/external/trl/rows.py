"""What a step hands to TRL: a row for each prompt and generation, in their order; masked where nothing is learned.

TRL wants exactly one row for each rollout. One that is excluded (a crash, no reward, cut off, late) is a row of two
tokens with mask 0 and without a reward, which TRL leaves out of the statistics of its group: it never counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentlightning.errors import BadRequestError

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample
    from agentlightning.training.ledger import RolloutRecord
    from agentlightning.training.rows import StepRows


@dataclass
class TRLRows:
    """The rows of a step as `rollout_func` returns them: (B,) each, B = tasks times generations."""

    prompt_ids: list[list[int]] = field(default_factory=list[list[int]])
    completion_ids: list[list[int]] = field(default_factory=list[list[int]])
    """What follows the first prompt: replies, and what came between them."""
    logprobs: list[list[float]] = field(default_factory=list[list[float]])
    """The engine's, natural logarithm; 0 where `env_mask` is 0."""
    env_mask: list[list[int]] = field(default_factory=list[list[int]])
    """1 on the tokens of the policy."""
    agl_reward: list[float | None] = field(default_factory=list[float | None])
    trained: list[bool] = field(default_factory=list[bool])
    """False where the row must not move the weights, whatever its reward."""
    places: dict[str, int] = field(default_factory=dict[str, int])
    """The row of each rollout."""

    def output(self) -> dict[str, Any]:
        """Return what `rollout_func` returns."""
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "agl_reward")
        return {name: getattr(self, name) for name in names}


def trl_rows(rows: StepRows, wanted: int, *, filler: int, masks_idle: bool) -> TRLRows:
    """Return the rows of a step for TRL.

    Args:
        wanted: tasks times generations; rollouts beyond them took the place of late ones.
        filler: token id of masked rows.
        masks_idle: whether rows of groups that teach nothing are masked too. They have no advantage, so that it takes a
            penalty or a bonus beside the reward to move the weights by them; TRL counts them in its means otherwise.

    Raises:
        BadRequestError: a rollout has more than one row; says why, and what trains such agents.
    """
    chosen = {sample.rollout_id for sample in rows.samples}
    idle = {sample.rollout_id for sample in rows.idle}
    trl = TRLRows()
    for place, record in enumerate(rows.records[:wanted]):
        trl.places[record.rollout_id] = place
        is_trained = record.rollout_id in chosen
        if is_trained or (record.rollout_id in idle and not masks_idle):
            _add(trl, _only_row(record), record.reward, trained=is_trained)
        else:
            _add_masked(trl, filler)
    return trl


def _only_row(record: RolloutRecord) -> Sample:
    if len(record.samples) == 1:
        return record.samples[0]
    causes = ", ".join(f"{cause} ({count})" for cause, count in record.seams.items() if count)
    raise BadRequestError(
        f"Rollout {record.rollout_id} has {len(record.samples)} token rows ({causes}), and TRL takes one for each "
        "prompt and generation. agl.GRPO trains agents with several rows in a rollout (parallel calls, several "
        "conversations, turns that do not go on with what was said); agl rollouts explain <rollout id> shows the rows"
    )


def _add(rows: TRLRows, sample: Sample, reward: float | None, *, trained: bool) -> None:
    first = sample.mask.index(1)
    rows.prompt_ids.append(sample.token_ids[:first])
    rows.completion_ids.append(sample.token_ids[first:])
    rows.logprobs.append(sample.logprobs[first:])
    rows.env_mask.append(sample.mask[first:])
    rows.agl_reward.append(reward)
    rows.trained.append(trained)


def _add_masked(rows: TRLRows, filler: int) -> None:
    rows.prompt_ids.append([filler])
    rows.completion_ids.append([filler])
    rows.logprobs.append([0.0])
    rows.env_mask.append([0])
    rows.agl_reward.append(None)
    rows.trained.append(False)


def rewards_of(completions: Sequence[object], agl_reward: Sequence[float | None], **_: object) -> list[float | None]:
    """Return the rewards that the rows brought along: TRL's reward function."""
    return list(agl_reward)
