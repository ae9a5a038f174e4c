"""The outcome of every model call of an attempt, as text.

One line per call: its recorders, its outcome, whether its tokens are present, its row and why that row began, or why it
is in no row. The reasons are those of the training ledger (`training/ledger.py`), as far as spans show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentlightning.adapter.calls.calls import CallRef, ModelCall
from agentlightning.adapter.calls.matching import MatchedBy, SeenBy
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.samples import SampleReading
from agentlightning.adapter.rows.seams import RowCause, describe
from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted
from agentlightning.errors import NoTrainableCallError
from agentlightning.semconv import LightningCallAttributes

HEADER: Final = ("call", "agent", "model", "state", "in", "out", "ids", "seen by", "row", "why")
_MOST_SEAMS: Final = 3
"""Maximum number of seams that are shown with their tokens; the table lists all seams."""

BASE_URL: Final = (
    "pass base_url=llm.endpoint to the agent's client (in a class, llm.get_base_url(rollout.rollout_id, "
    "rollout.attempt.attempt_id))"
)
CACHE: Final = (
    "if the agent's client has a cache that replies without a call, as DSPy has, disable it for training: "
    "dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)"
)
EVALUATION: Final = ("val", "test")
"""Modes of rollouts that are never trained."""
WITHOUT_TRAINING: Final = frozenset({"APO", "Baseline", "Evaluator", "GEPA"})
"""Names of the algorithms that train no weights."""
_TO_TRY: Final[Mapping[str, str]] = {
    "no_tokens": "the model server returned no token ids: use a server that returns them (vLLM 0.10.2 or later, the "
    "engine of GRPO); the gateway's warning describes how to enable them",
    "no_generation": "calls that generate nothing (embeddings) are recorded but never trained: no action is needed",
    "no_logprobs": "the model server returned no log-probabilities: enable support for logprobs=true",
    "bad_logprobs": "the model server did not return one finite log-probability per token: check its version",
    "image_input": "their prompts have images, but only text can be used for training: describe the images in words",
    "upstream_error": "the model server failed: check that it runs and serves the model that the agent requests",
    "refused": "the gateway refused the call: check the model's name, the key and the limits of the gateway",
    "client_left": "the agent closed its connection before the reply arrived: increase the timeout of its client",
    "not_selected": "the adapter excluded them: check its agent_match, llm_call_match and exclude_llm_call_in_reward, "
    "and the gateway's policies (frozen and external policies are not trained; with several trained policies, set "
    "policy= of the adapter)",
    "unknown_agent": "agents ran concurrently, and neither ids nor texts identify the agent of the calls: give each "
    "agent a resource with its own role (LLMProxy.as_resource(role=...)), or let the tracer record ids or texts",
    "stale": "they arrived after the attempt had ended or lapsed: allow more time per attempt, or look for a worker "
    "that hangs or a process that the agent did not stop",
    "superseded_attempt": "a later attempt replaced theirs: see that attempt",
    "infrastructure_fault": "the attempt failed: see its error with agl rollouts explain",
    "cancelled": "the attempt was cancelled: allow more time per rollout or per step",
    "budget": "the attempt exceeded its budget: allow more tokens or a higher cost per rollout",
    "no_reward": "the attempt has no reward: return a number from the agent, or call emit_reward in the agent",
    "helper": "they are not turns of the agent's task (titles, summaries): calls of a known program, or selected by "
    "ignore= of the adapter",
    "refused_call": "a call of the attempt finally failed, so its reward does not measure the policy: see the line of "
    "that call and fix its request, or train such rollouts with refused_calls='train' of GRPO",
    "unfinished": "the attempt has not ended: wait for it",
    "not_a_train_rollout": "the rollout was sampled for evaluation (mode val or test), which is never trained",
}


@explain_fields
@dataclass(frozen=True, slots=True)
class ExplainedCall:
    """One model call: its recorders, its outcome, and its position in the training rows."""

    number: int
    """Position in the order of arrival within the rollout, 1 for the first call."""
    call: ModelCall
    """The call as it was read from the spans."""
    row: int | None = None
    """Number of its row in its attempt, 1 for the first."""
    begins: RowCause | None = None
    """Reason why it began that row; None if it continued one."""
    reason: str | None = None
    """Reason why it is in no row."""

    @property
    def seen_by(self) -> SeenBy:
        """Recorders of the call; the gateway for a call that was created from a triplet."""
        return "gateway" if self.call.spans is None else self.call.spans.seen_by

    @property
    def matched_by(self) -> MatchedBy | None:
        """Method that matched the spans of gateway and tracer; None if only one of them recorded the call."""
        return None if self.call.spans is None else self.call.spans.matched_by

    @property
    def has_tokens(self) -> bool:
        """True if both lists of token ids are present."""
        return self.call.has_tokens

    @property
    def model(self) -> str | None:
        value = self._first("gen_ai.request.model", "gen_ai.response.model", "llm.model_name")
        return value if isinstance(value, str) else None

    @property
    def prompt_tokens(self) -> int | None:
        """Number of prompt tokens, even if the ids were not recorded."""
        keys = (LightningCallAttributes.PROMPT_TOKENS.value, *_usage("prompt", "input"))
        return len(self.call.prompt_token_ids) or _count(self._first(*keys))

    @property
    def completion_tokens(self) -> int | None:
        keys = (LightningCallAttributes.COMPLETION_TOKENS.value, *_usage("completion", "output"))
        return len(self.call.completion_token_ids) or _count(self._first(*keys))

    @property
    def error(self) -> str | None:
        """Error that the agent received for a failed call; None for other calls."""
        spans = self.call.spans
        span = None if spans is None else spans.record or spans.seen
        return None if span is None or span.status.status_code != "ERROR" else span.status.description

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table, in the order of `HEADER`."""
        recorders = (
            self.seen_by if self.matched_by in (None, "response_id") else f"{self.seen_by} (by {self.matched_by})"
        )
        return (
            str(self.number),
            self.call.agent or "-",
            self.model or "-",
            self.call.state,
            _or_dash(self.prompt_tokens),
            _or_dash(self.completion_tokens),
            "yes" if self.has_tokens else "no",
            recorders,
            _or_dash(self.row),
            self.reason or self.begins or "continues its row",
        )

    def _first(self, *keys: str) -> object:
        own = self.call.spans
        spans = () if own is None else (own.request, own.record, own.seen)
        values = (span.attributes.get(key) for key in keys for span in spans if span is not None)
        return next((value for value in values if value is not None), None)


CallWitness = ExplainedCall
"""Another name of `ExplainedCall`."""


@explain_fields
@dataclass(frozen=True)
class Explanation:
    """The outcome of the model calls of a rollout. `str` returns it as text."""

    rollout_id: str
    """Rollout that made these calls."""
    calls: list[ExplainedCall]
    """All calls, in the order of arrival."""
    seams: list[str] = field(default_factory=list[str])
    """The first seams with their tokens and text."""

    @property
    def trainable(self) -> list[ExplainedCall]:
        """The calls that are in rows."""
        return [each for each in self.calls if each.row is not None]

    def counts(self) -> dict[str, int]:
        """Return the number of calls in no row, by reason, the most frequent first."""
        return dict(Counter(each.reason for each in self.calls if each.reason is not None).most_common())

    def to_try(self) -> list[str]:
        """Return advice for calls in no row, for the most frequent reason first."""
        if not self.calls:
            return [f"no model call was recorded: {BASE_URL}", CACHE]
        advice: list[str] = []
        unseen = [each for each in self.calls if each.seen_by == "tracer" and each.row is None]
        if unseen:
            advice.append(
                f"{counted(len(unseen), 'model call')} seen by the tracer only: "
                f"the agent's client did not use the gateway's base URL; {BASE_URL}"
            )
        hidden = {each.number for each in unseen}
        remaining = [each for each in self.calls if each.reason is not None and each.number not in hidden]
        for reason, number in Counter(each.reason for each in remaining).most_common():
            error = next((each.error for each in remaining if each.reason == reason and each.error), None)
            detail = "" if error is None else f" (error: {error})"
            to_try = _TO_TRY.get(reason or "", "see the ledger")
            advice.append(f"{counted(number, 'model call')} {reason}: {to_try}{detail}")
        return advice

    def require_trainable(self) -> None:
        """Return if at least one call is in a row.

        Raises:
            NoTrainableCallError: no call is in a row; the message has the table and advice.
        """
        if not self.trainable:
            unused = f"none of its {counted(len(self.calls), 'model call')} can be used for training"
            why = unused if self.calls else "it has no model call"
            raise NoTrainableCallError(f"Rollout {self.rollout_id}: {why}.\n{self}")

    def words(self, mode: str | None = None, algorithm: str | None = None) -> str:
        """Return the text below the table: counts, the first seams, and advice if nothing is trained.

        `mode` of the rollout and `algorithm` of its run: see `why_untrained`.
        """
        calls, untrained = counted(len(self.calls), "model call"), why_untrained(mode, algorithm)
        parts = [f"nothing of the rollout is trained: {untrained}"] if untrained else []
        if mode in EVALUATION:
            return f"{calls}; {parts[0]}"
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.counts().items())
        counts = f"{len(self.trainable)} of {calls} in rows{' if it were' * bool(untrained)}"
        parts += [f"{counts}; excluded: {reasons}" if reasons else counts, *self.seams]
        if not self.trainable:
            parts += ["To train it:" if untrained else "To try:", *(f"- {text}" for text in self.to_try())]
        return "\n".join(parts)

    def __str__(self) -> str:
        table = [_table([HEADER, *(each.cells() for each in self.calls)])] if self.calls else []
        return "\n".join([*table, self.words()])


def why_untrained(mode: str | None, algorithm: str | None) -> str | None:
    """Return the reason why nothing of a rollout is ever trained; None if it may be.

    Args:
        mode: mode of the rollout.
        algorithm: name of the algorithm of its run; None if it is unknown.
    """
    if mode in EVALUATION:
        return f"it is for evaluation (mode {mode})"
    return f"{algorithm} trains no weights" if algorithm in WITHOUT_TRAINING else None


def advice_for(reason: str) -> str | None:
    """Return advice for a call that is in no row for this reason; None if there is nothing to do."""
    return _TO_TRY.get(reason)


def explain_calls(
    rollout_id: str,
    calls: Sequence[ModelCall],
    readings: Sequence[SampleReading],
    reasons: Mapping[CallRef, str],
    decode: Decode | None = None,
) -> Explanation:
    """Return the explanation of calls, in the order of arrival; calls in no row of `readings` have a reason."""
    rows: dict[CallRef, int] = {}
    begins: dict[CallRef, RowCause] = {}
    seams: list[str] = []
    names = {call.call_id: str(number) for number, call in enumerate(calls, start=1)}
    for reading in readings:
        for number, (sample, start) in enumerate(zip(reading.samples, reading.starts, strict=True), start=1):
            refs = sample.call_refs()
            rows.update(dict.fromkeys(refs, number))
            begins[refs[0]] = start.cause
        for start in reading.seams[: _MOST_SEAMS - len(seams)]:
            seams.append(describe(start, calls, decode, names))
    result = [
        ExplainedCall(number, call, rows.get(call.ref), begins.get(call.ref), reasons.get(call.ref))
        for number, call in enumerate(calls, start=1)
    ]
    return Explanation(rollout_id, result, seams)


def _usage(*names: str) -> list[str]:
    return [key for name in names for key in (f"gen_ai.usage.{name}_tokens", f"llm.token_count.{name}")]


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in rows)
