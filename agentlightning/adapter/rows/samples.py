"""Creates token rows, the input of training, from model calls. Does not require torch.

A call joins an open row if and only if its prompt begins with exactly the tokens of that row so far; if there are
several such rows, it joins the longest. The additional tokens of the prompt come from outside the policy (a tool, a
user): mask 0, log-probability 0.0. Any other call begins a new row; the reason is recorded (`seams.py`). Every row of
the attempt stays open, so that parallel conversations and branches continue their rows. Calls of different policies are
never in one row. Nothing is tokenized, guessed or repaired here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from agentlightning.adapter.calls.calls import CallRef, ModelCall, calls_from_triplets
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.prefix_tree import PrefixTree
from agentlightning.adapter.rows.seams import DRIFTS, ROW_CAUSES, SEAM_CAUSES, RowCause, RowStart, Seams
from agentlightning.adapter.spans.content import image_urls, read_content
from agentlightning.base.field_help import explain_fields
from agentlightning.types import Triplet

Unusable = Literal["no_generation", "no_tokens", "no_logprobs", "bad_logprobs", "image_input"]
"""Reason why a call has no row: no prompt or completion ids; no log-probabilities; not one finite number per token; or
its prompt has images, which token ids do not represent."""

UNKNOWN_WEIGHTS: Final = -1


@explain_fields
@dataclass(frozen=True, slots=True)
class Sample:
    """One token row: one or more model calls whose tokens continue each other exactly."""

    rollout_id: str
    """Rollout of the row."""
    attempt_id: str
    """Attempt of the row."""
    token_ids: list[int]
    """(T,) the first prompt and all tokens after it."""
    mask: list[int]
    """(T,) 1 exactly on the tokens that the policy produced."""
    logprobs: list[float]
    """(T,) natural log-probabilities, from the engine; 0.0 where `mask` is 0."""
    call_ids: list[str]
    """Ids of the model calls merged in this row, in order."""
    weight_versions: list[int]
    """Version of the weights that served each call; `UNKNOWN_WEIGHTS` if it was not recorded."""
    policy: str | None = None
    """The gateway's policy of its calls; None if the gateway has no policies."""
    turns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]], compare=False, repr=False)
    """For each call, its number among the calls of the attempt, by arrival, and its number of completion tokens."""

    def call_refs(self) -> list[CallRef]:
        """Return the full ids of the calls in this row."""
        return [CallRef(self.rollout_id, self.attempt_id, call_id) for call_id in self.call_ids]


@explain_fields
@dataclass(frozen=True, slots=True)
class SampleReading:
    """The rows of one attempt, the reason why each began, and the calls without a row."""

    samples: list[Sample]
    """The rows."""
    starts: list[RowStart]
    """Reason why each row began, in the order of the rows."""
    unusable: list[tuple[str, Unusable]] = field(default_factory=list[tuple[str, Unusable]])
    """(call id, reason) for each call without a row."""

    @property
    def seams(self) -> list[RowStart]:
        """Rows that began because a prompt did not continue the tokens of its conversation."""
        return [start for start in self.starts if start.cause in SEAM_CAUSES]

    @property
    def drifts(self) -> list[RowStart]:
        """Seams caused by the template or the tokenizer."""
        return [start for start in self.starts if start.cause in DRIFTS]

    @property
    def turns(self) -> int:
        """Number of calls in rows."""
        return sum(len(sample.call_ids) for sample in self.samples)

    def seam_counts(self) -> dict[RowCause, int]:
        """Return the number of rows for each cause, including causes without rows."""
        counts = Counter(start.cause for start in self.starts)
        return {cause: counts[cause] for cause in ROW_CAUSES}


def samples_from_calls(calls: Sequence[ModelCall], *, decode: Decode | None = None) -> SampleReading:
    """Return the rows of the calls of one attempt, given in the order in which they arrived.

    `decode` converts token ids to their text, including special tokens; with it, tokenization and template are
    distinguished with certainty. It is called only at seams.

    Raises:
        ValueError: the calls belong to several attempts, or a call is given twice.
    """
    attempts = sorted({f"{call.ref.rollout_id}/{call.ref.attempt_id}" for call in calls})
    if len(attempts) > 1:
        raise ValueError(f"Rows require the calls of one attempt; got calls of {', '.join(attempts)}")
    duplicates = [ref.call_id for ref, count in Counter(call.ref for call in calls).items() if count > 1]
    if duplicates:
        raise ValueError(f"calls of {attempts[0]} were given more than once: {', '.join(duplicates)}")
    reading, usable = SampleReading([], []), list[ModelCall]()
    for call in calls:
        if reason := unusable(call):
            reading.unusable.append((call.call_id, reason))
        else:
            usable.append(call)
    trees: dict[str | None, PrefixTree[Sample]] = {}
    seams = Seams(usable, decode)
    for number, call in enumerate(usable):
        tree = trees.setdefault(call.policy, PrefixTree())
        walk = tree.follow_prompt(call.prompt_token_ids, number)
        if walk.longest is not None:
            row = walk.longest.rows.pop(0)
        else:
            row = Sample(call.ref.rollout_id, call.ref.attempt_id, [], [], [], [], [], call.policy)
            if not reading.samples:
                reading.starts.append(RowStart(call.call_id, "first_call"))
            elif not walk.fresh and walk.end.prompt_end:
                reading.starts.append(RowStart(call.call_id, "repeated_prompt"))
            else:
                reading.starts.append(seams.start(number, walk))
            reading.samples.append(row)
        assert call.logprobs is not None
        new_tokens = call.prompt_token_ids[len(row.token_ids) :]  # mask 0; then the policy's answer, mask 1
        row.token_ids.extend(new_tokens)
        row.token_ids.extend(call.completion_token_ids)
        row.mask.extend([0] * len(new_tokens) + [1] * len(call.completion_token_ids))
        row.logprobs.extend([0.0] * len(new_tokens) + call.logprobs)
        row.call_ids.append(call.call_id)
        row.turns.append((number, len(call.completion_token_ids)))
        row.weight_versions.append(UNKNOWN_WEIGHTS if call.weight_version is None else call.weight_version)
        tree.add_completion(walk.end, call.completion_token_ids, number).rows.append(row)
    return reading


def samples_from_triplets(triplets: Iterable[Triplet], *, rollout_id: str, attempt_id: str) -> SampleReading:
    """Return the rows of the triplets of one attempt, given in the order of the calls.

    A triplet must have `prompt["token_ids"]`, `response["token_ids"]` and `response["token_logprobs"]`.
    """
    return samples_from_calls(calls_from_triplets(triplets, rollout_id=rollout_id, attempt_id=attempt_id))


def unusable(call: ModelCall) -> Unusable | None:
    """Return the reason why a call cannot be part of a row; None if it can."""
    if call.state == "no_generation":
        return "no_generation"
    if not call.prompt_token_ids or not call.completion_token_ids:
        return "no_tokens"
    if call.logprobs is None:
        return "no_logprobs"
    if len(call.logprobs) != len(call.completion_token_ids) or not all(map(math.isfinite, call.logprobs)):
        return "bad_logprobs"
    return "image_input" if _shows_images(call) else None


def _shows_images(call: ModelCall) -> bool:
    """True if its messages hold an image. They are read only if some text mentions one."""
    spans = () if call.spans is None else (call.spans.request, call.spans.record, call.spans.seen)
    return any(
        image_urls(read_content(span.attributes).prompt)
        for span in spans
        if span is not None and any(type(v) is str and "image_url" in v for v in span.attributes.values())
    )
