"""Token rows of different lengths as right-padded tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows, padded on the right to the longest, T tokens."""

    tokens: Tensor
    """(B, T) int64 token ids; padding holds the pad id."""
    attention: Tensor
    """(B, T) int64, 1 on real tokens, 0 on padding."""
    mask: Tensor
    """(B, T) bool, true exactly on the tokens that the policy produced."""
    logprobs: Tensor
    """(B, T) float32, the engine's natural log-probability of each such token when it was sampled, else 0."""
    advantages: Tensor
    """(B, 1) float32 of each row's rollout, or (B, T) of each token with a critic."""
    rollouts: Tensor
    """(B,) int64, equal for the rows of one rollout."""
    times: Tensor
    """(B, T) int64, number of each trained token's model call among those of the attempt."""
    old_logprobs: Tensor | None = None
    """(B, T) of the learner before its first optimizer step, if the loss needs them."""
    reference_logprobs: Tensor | None = None
    """(B, T) of the reference, if the loss needs them."""
    values: Tensor | None = None
    """(B, T) of the critic before its first optimizer step, if there is one."""
    returns: Tensor | None = None
    """(B, T) targets of the values."""
    stale: Tensor | None = None
    """(B, T) bool, true on trained tokens that other weights than those before the update sampled; None without any."""
    kept: Tensor | None = None
    """(B, T) bool, the tokens that `top_entropy_quantile` keeps in an optimizer step; None keeps all."""

    def rows(self, index: Tensor) -> Batch:
        """Return the rows at `index` ((b,) int64), cut to the longest of them."""
        longest = int(self.attention[index].sum(dim=1).max())
        columns: dict[str, Tensor | None] = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        cut = {
            name: column[index] if column.dim() == 1 else column[index, :longest]
            for name, column in columns.items()
            if column is not None
        }
        return dataclasses.replace(self, **cut)


def make_batch(
    samples: Sequence[Sample],
    advantages: Sequence[float | Sequence[float]],
    *,
    pad_id: int = 0,
    device: torch.device | str = "cpu",
    weight_version: int | None = None,
) -> Batch:
    """Return the samples as one batch.

    Shapes: samples: (B,) rows; advantages: (B,), one per row, or one per model call of each row.

    Args:
        weight_version: version of the weights that learn; tokens of other versions are stale. None ignores versions.

    Raises:
        ValueError: there are no rows, the number of advantages differs, or a row is malformed (lists of unequal length,
            a mask on the first token, or a non-finite number). The message names the rollout.
    """
    if not samples:
        raise ValueError("A batch needs at least one row, but every rollout of the step was excluded")
    if len(samples) != len(advantages):
        raise ValueError(f"Expected one advantage per row; got {len(samples)} rows and {len(advantages)} advantages")
    for sample, advantage in zip(samples, advantages, strict=True):
        _check_row(sample, advantage)
    length = max(len(sample.token_ids) for sample in samples)

    def padded(
        rows: Sequence[Sequence[int]] | Sequence[Sequence[float]], dtype: torch.dtype, fill: float = 0
    ) -> Tensor:
        return torch.tensor([[*row, *([fill] * (length - len(row)))] for row in rows], dtype=dtype).to(device)

    numbers: dict[str, int] = {}
    rollouts = [numbers.setdefault(sample.rollout_id, len(numbers)) for sample in samples]
    stale = [] if weight_version is None else [_stale(sample, weight_version) for sample in samples]
    return Batch(
        tokens=padded([sample.token_ids for sample in samples], torch.int64, pad_id),
        attention=padded([[1] * len(sample.token_ids) for sample in samples], torch.int64),
        mask=padded([sample.mask for sample in samples], torch.bool),
        logprobs=padded([sample.logprobs for sample in samples], torch.float32),
        advantages=_advantages(samples, advantages, padded).to(device),
        rollouts=torch.tensor(rollouts, dtype=torch.int64, device=device),
        times=padded([_of_calls(sample, [number for number, _ in sample.turns], 0) for sample in samples], torch.int64),
        stale=padded(stale, torch.bool) if any(map(any, stale)) else None,
    )


def _advantages(
    samples: Sequence[Sample], advantages: Sequence[float | Sequence[float]], padded: Callable[..., Tensor]
) -> Tensor:
    """Return the advantage of each row, (B, 1), or of each token if calls have their own, (B, T)."""
    if all(isinstance(advantage, (int, float)) for advantage in advantages):
        return torch.tensor(list(advantages), dtype=torch.float32)[:, None]
    rows = list(zip(samples, advantages, strict=True))
    of_calls = [[one] * len(row.turns) if isinstance(one, (int, float)) else one for row, one in rows]
    return padded([_of_calls(row, own, 0.0) for (row, _), own in zip(rows, of_calls, strict=True)], torch.float32)


def _stale(sample: Sample, weight_version: int) -> list[bool]:
    """Return for each token whether it is trained and other weights sampled it: (T,)."""
    versions = sample.weight_versions
    if all(version == weight_version for version in versions):
        return [False] * len(sample.mask)
    of_tokens = _of_calls(sample, versions, min(versions))
    return [bool(trained) and of != weight_version for trained, of in zip(sample.mask, of_tokens, strict=True)]


def _of_calls(sample: Sample, values: Sequence[T], default: T) -> list[T]:
    """Return for each trained token the value of its model call, or `default` if the tokens of each call are unknown;
    0 for the other tokens: (T,)."""
    trained = sum(sample.mask)
    of_tokens = [value for value, (_, tokens) in zip(values, sample.turns, strict=False) for _ in range(tokens)]
    rest = iter(of_tokens if len(of_tokens) == trained else [default] * trained)
    return [next(rest) if is_trained else cast("T", 0) for is_trained in sample.mask]


def _check_row(sample: Sample, advantage: float | Sequence[float]) -> None:
    where = f"rollout {sample.rollout_id}, attempt {sample.attempt_id}"
    tokens, masked, logprobs = len(sample.token_ids), len(sample.mask), len(sample.logprobs)
    if not tokens == masked == logprobs:
        raise ValueError(
            f"{where}: {tokens} tokens, {masked} mask entries and {logprobs} log-probabilities; the numbers must be "
            "equal"
        )
    if tokens == 0 or sample.mask[0]:
        raise ValueError(f"{where}: the first token of a row belongs to the prompt, so its mask must be 0")
    if not any(sample.mask):
        raise ValueError(f"{where}: the row has no token of the policy; exclude it")
    of_calls = [advantage] if isinstance(advantage, (int, float)) else advantage
    if of_calls is advantage and len(of_calls) != len(sample.turns):
        raise ValueError(f"{where}: {len(of_calls)} advantages for {len(sample.turns)} model calls")
    if not all(map(math.isfinite, [*of_calls, *sample.logprobs])):
        raise ValueError(f"{where}: the advantage or a log-probability is not a finite number")
