"""The training ledger: what became of every model call of one training step.

Each captured call ends in exactly one way: trained (in which row, with which advantage, by which weights) or excluded
(a reason out of a closed list). `close` checks it and raises an error otherwise. How a finished rollout is read
is in `record.py`, whose names are offered here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.adapter.calls.calls import CallRef, ModelCall
from agentlightning.adapter.rows.samples import Sample
from agentlightning.errors import LedgerError
from agentlightning.field_help import explain_fields
from agentlightning.training.ledger.record import ExclusionReason, RolloutRecord, attempt_verdict, read_rollout

__all__ = [
    "Excluded",
    "ExclusionReason",
    "Ledger",
    "LedgerSummary",
    "RolloutRecord",
    "Trained",
    "attempt_verdict",
    "read_rollout",
]

_NAMED_AT_MOST = 8


@explain_fields
@dataclass(frozen=True, slots=True)
class Trained:
    """The call is part of the update."""

    row: int
    """Index of its row in the step's batch."""
    tokens: int
    """How many of its tokens are trained: all that the policy produced in it."""
    advantage: float
    """The factor by which its tokens count in the loss."""
    weight_version: int
    """The weights that served the call."""
    constrained_by: tuple[str, ...] = ()
    """Settings under which its tokens were drawn from another distribution than the one that learns."""


@explain_fields
@dataclass(frozen=True, slots=True)
class Excluded:
    """The call is not part of the update."""

    reason: ExclusionReason
    """Why, out of the closed list."""


Ending = Trained | Excluded


@explain_fields
@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """The counts of one step; `captured` is `trained` plus all of `excluded`."""

    step: int
    """The number of the training step."""
    captured: int
    """Calls that were captured."""
    trained: int
    """Calls that were part of the update."""
    trained_tokens: int
    """Tokens of these calls that were trained."""
    excluded: dict[ExclusionReason, int]
    """Reasons that occurred, the most frequent first."""
    constrained: dict[str, int] = field(default_factory=dict[str, int])
    """Trained calls that were constrained, by the setting that did it, the most frequent first; one may be counted
    under several. Their log-probabilities are those of the unconstrained model."""


class Ledger:
    """The books of one training step. Belongs to the loop that runs the step; not for several threads."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._calls: dict[CallRef, ModelCall] = {}
        self._endings: dict[CallRef, list[Ending]] = {}

    def add(self, record: RolloutRecord) -> None:
        """Capture the calls of a rollout and enter those that are already excluded."""
        self.capture(record.calls)
        for ref, reason in record.exclusions.items():
            self._enter(ref, Excluded(reason))

    def capture(self, calls: Iterable[ModelCall]) -> None:
        """Open an account for each call.

        Raises:
            LedgerError: a call was captured before.
        """
        for call in calls:
            if call.ref in self._calls:
                raise LedgerError(f"step {self.step}: {_name(call.ref)} was captured twice; add each rollout once")
            self._calls[call.ref] = call

    def train(self, sample: Sample, *, row: int, advantage: float) -> None:
        """Enter that the calls of a row are trained.

        Raises:
            LedgerError: the row trains another number of tokens than its calls have.
        """
        refs = sample.call_refs()
        tokens = {ref: len(self._calls[ref].completion_token_ids) for ref in refs if ref in self._calls}
        if len(tokens) == len(refs) and sum(tokens.values()) != sum(sample.mask):
            raise LedgerError(
                f"step {self.step}: row {row} of rollout {sample.rollout_id} trains {sum(sample.mask)} tokens, "
                f"its {len(refs)} model calls have {sum(tokens.values())}"
            )
        for ref, version in zip(refs, sample.weight_versions, strict=True):
            constrained_by = self._calls[ref].constrained_by if ref in self._calls else ()
            self._enter(ref, Trained(row, tokens.get(ref, 0), advantage, version, constrained_by))

    def exclude(self, calls: Iterable[CallRef] | Sample, reason: ExclusionReason) -> None:
        """Enter that calls, or all calls of a row, are not trained."""
        for ref in calls.call_refs() if isinstance(calls, Sample) else calls:
            self._enter(ref, Excluded(reason))

    def calls(self) -> list[ModelCall]:
        """Return every call that was captured, in the order in which they were."""
        return list(self._calls.values())

    def endings(self) -> dict[CallRef, Ending]:
        """Return how each call ended, for those that ended in one way."""
        return {ref: endings[0] for ref, endings in self._endings.items() if len(endings) == 1}

    def close(self) -> LedgerSummary:
        """Return the counts.

        Raises:
            LedgerError: a call is neither trained nor excluded, is both or is entered twice, or was never captured; the
                calls are named.
        """
        wrong = [self._wrong(ref) for ref in {**self._calls, **self._endings} if not self._adds_up(ref)]
        if wrong:
            more = f"; and {len(wrong) - _NAMED_AT_MOST} more" if len(wrong) > _NAMED_AT_MOST else ""
            raise LedgerError(
                f"step {self.step}: {len(wrong)} of {len(self._calls)} model calls do not add up: "
                + "; ".join(wrong[:_NAMED_AT_MOST])
                + more
            )
        endings = self.endings().values()
        trained = [end for end in endings if isinstance(end, Trained)]
        excluded: Counter[ExclusionReason] = Counter(end.reason for end in endings if isinstance(end, Excluded))
        return LedgerSummary(
            step=self.step,
            captured=len(self._calls),
            trained=len(trained),
            trained_tokens=sum(end.tokens for end in trained),
            excluded=dict(excluded.most_common()),
            constrained=dict(Counter(name for end in trained for name in end.constrained_by).most_common()),
        )

    def _enter(self, ref: CallRef, ending: Ending) -> None:
        self._endings.setdefault(ref, []).append(ending)

    def _adds_up(self, ref: CallRef) -> bool:
        return ref in self._calls and len(self._endings.get(ref, ())) == 1

    def _wrong(self, ref: CallRef) -> str:
        endings = self._endings.get(ref, [])
        if ref not in self._calls:
            return f"{_name(ref)} is {_endings_text(endings)} and was never captured"
        return (
            f"{_name(ref)} is {_endings_text(endings)}" if endings else f"{_name(ref)} is neither trained nor excluded"
        )


def _name(ref: CallRef) -> str:
    return f"call {ref.call_id} (rollout {ref.rollout_id}, attempt {ref.attempt_id})"


def _endings_text(endings: Sequence[Ending]) -> str:
    return " and ".join(
        f"trained in row {end.row}" if isinstance(end, Trained) else f"excluded as {end.reason}" for end in endings
    )
