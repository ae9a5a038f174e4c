"""`FlightRecorderAdapter` turns the entries of a flight recorder into spans."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from typing_extensions import override

from agentlightning.adapter.base import Adapter
from agentlightning.contrib.agentos.entries import Action, actions_of
from agentlightning.contrib.agentos.recorder import Entry
from agentlightning.contrib.agentos.violation import readable_reason, without_secrets
from agentlightning.tracer.scope import UNNUMBERED
from agentlightning.types import Attributes, Span, TraceStatus

_FAILED = ("blocked", "error")


class FlightRecorderAdapter(Adapter[Iterable[Entry], list[Span]]):
    """Returns a span for each action of a log: `adapt(recorder.get_log())`.

    The name of a span is the tool or the system call. Its status is `ERROR` with the reason if the action was refused
    or failed, `OK` if it was allowed, else `UNSET`; `agent_os.verdict` is the recorder's verdict. Secrets in arguments,
    results and reasons are hidden. The same entries give the same span ids, and the store numbers the spans, so that
    importing a log twice adds nothing.

    Args:
        rollout_id: the rollout whose spans they become.
        attempt_id: its attempt.

    Raises (`adapt`):
        ValueError: an entry is not one of a flight recorder; says which one.
    """

    def __init__(self, *, rollout_id: str, attempt_id: str) -> None:
        self._rollout_id = rollout_id
        self._attempt_id = attempt_id

    @override
    def adapt(self, source: Iterable[Entry], /) -> list[Span]:
        """Return the spans, in the order of time."""
        return [self._span(action) for action in actions_of(source)]

    def _span(self, action: Action) -> Span:
        entry = action.entry
        verdict = str(entry["policy_verdict"])
        reason = entry.get("violation_reason")
        texts = {
            "arguments": entry.get("tool_args"),
            "result": entry.get("result"),
            "prompt": entry.get("input_prompt"),
        }
        values = {
            "agent_os.entry_id": str(entry["trace_id"]),
            "agent_os.agent_id": str(entry["agent_id"]),
            "agent_os.tool": str(entry["tool_name"]),
            "agent_os.syscall": action.syscall,
            "agent_os.verdict": verdict,
            "agent_os.reason": None if reason is None else readable_reason(reason),
            **{f"agent_os.{key}": None if text is None else without_secrets(str(text)) for key, text in texts.items()},
        }
        attributes: Attributes = {key: value for key, value in values.items() if value is not None}
        return Span.from_attributes(
            attributes=attributes,
            rollout_id=self._rollout_id,
            attempt_id=self._attempt_id,
            sequence_id=UNNUMBERED,
            name=str(entry["tool_name"]),
            trace_id=_hash(self._attempt_id, 32),
            span_id=_hash(f"{self._attempt_id}/{entry['trace_id']}", 16),
            start_time=action.start,
            end_time=action.start + action.seconds,
            status=_status(verdict, values["agent_os.reason"]),
        )


def _status(verdict: str, reason: str | None) -> TraceStatus:
    if verdict in _FAILED:
        return TraceStatus(status_code="ERROR", description=reason)
    return TraceStatus(status_code="OK" if verdict == "allowed" else "UNSET")


def _hash(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
