"""`FlightRecorderAdapter` converts the entries of a flight recorder to spans.

One system call writes one or two entries and counts as one action:

| system call                  | entries                                        | the action's verdict |
| ---------------------------- | ---------------------------------------------- | -------------------- |
| a tool that was allowed      | `syscall_SYS_EXEC` (pending), then the tool's  | `allowed` or `error` |
| refused by the policy        | `syscall_<NAME>` (pending), then the blocked   | `blocked`            |
| another one that was allowed | `syscall_<NAME>` (pending)                     | `pending`            |
| by an agent that was ended   | `syscall_<NAME>` (pending)                     | `pending`            |

The kernel never completes the first entry. The second entry belongs to the last open entry of the same agent with the
same call and arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

from typing_extensions import override

from agentlightning.adapter.base import Adapter
from agentlightning.contrib.agentos.attempt import readable_reason, without_secrets
from agentlightning.contrib.agentos.watch import Entry
from agentlightning.tracer.scope import UNNUMBERED
from agentlightning.types import Attributes, Span, TraceStatus

_FAILED = ("blocked", "error")
_PREFIX = "syscall_"
_NEEDED = ("trace_id", "timestamp", "agent_id", "tool_name", "policy_verdict")


class FlightRecorderAdapter(Adapter[Iterable[Entry], list[Span]]):
    """Convert a log to one span per action: `adapt(recorder.get_log())`.

    The name of a span is the tool or the system call. Its status is `ERROR` with the reason if the action was refused
    or failed, `OK` if it was allowed, else `UNSET`; `agent_os.verdict` is the recorder's verdict. Secrets in arguments,
    results and reasons are hidden. The same entries result in the same span ids, and the store numbers the spans, so
    that importing a log twice adds no spans.

    Args:
        rollout_id: id of the rollout that the spans belong to.
        attempt_id: id of the attempt.

    Raises (`adapt`):
        ValueError: an entry is not an entry of a flight recorder. The message names it.
    """

    def __init__(self, *, rollout_id: str, attempt_id: str) -> None:
        self._rollout_id = rollout_id
        self._attempt_id = attempt_id

    @override
    def adapt(self, source: Iterable[Entry], /) -> list[Span]:
        """Return the spans, in the order of time."""
        return [self._span(action) for action in _actions_of(source)]

    def _span(self, action: _Action) -> Span:
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


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Action:
    """One action of an agent in a flight recorder."""

    entry: Entry
    """The last entry of the action."""
    syscall: str | None
    """System call, such as `SYS_EXEC`; None if no kernel wrote the entry."""
    start: float
    """Start time in Unix seconds."""
    seconds: float
    """Duration of the tool; 0 if it did not run."""


def _actions_of(entries: Iterable[Entry]) -> list[_Action]:
    """Return the actions of entries, in the order of time; the entries may be in any order.

    Raises:
        ValueError: an entry is not one of a flight recorder; the text names it and the problem.
    """
    timed_entries = sorted((_checked(index, entry) for index, entry in enumerate(entries)), key=_place)
    firsts: dict[str, list[int]] = {}
    """Open first entries, by the key of their second entry, which belongs to the last open entry."""
    actions: list[_Action] = []
    for start, entry in timed_entries:
        name = str(entry["tool_name"])
        if name.startswith(_PREFIX):
            syscall = name.removeprefix(_PREFIX)
            firsts.setdefault(_key(entry, syscall, _arguments(entry)), []).append(len(actions))
            actions.append(_Action(entry, syscall, start, 0.0))
            continue
        seconds = _seconds(entry)
        key, syscall = _key_of_second(entry)
        places = firsts.get(key)
        if places:
            first = actions[place := places.pop()]
            actions[place] = _Action(entry, first.syscall, first.start, start - first.start + seconds)
        else:
            actions.append(_Action(entry, syscall, start, seconds))
    return actions


def _key_of_second(entry: Entry) -> tuple[str, str | None]:
    """Return the key of the first entry, and the system call if the entry names it."""
    arguments = _arguments(entry)
    fields = cast("Entry", arguments if isinstance(arguments, Mapping) else {})
    if "_syscall" in fields:  # refused: the entry has the arguments of the system call
        syscall = str(fields["_syscall"])
        return _key(entry, syscall, {k: v for k, v in fields.items() if k not in ("_syscall", "_ring")}), syscall
    call: dict[str, object] = {"tool": entry["tool_name"], "args": arguments}
    return _key(entry, "SYS_EXEC", call), None


def _key(entry: Entry, syscall: str, arguments: object) -> str:
    if syscall == "SYS_EXEC" and isinstance(arguments, Mapping):  # the tool's entry has only these fields
        call = cast("Mapping[str, object]", arguments)
        arguments = {"tool": call.get("tool"), "args": call.get("args") or {}}
    return json.dumps([entry["agent_id"], syscall, arguments or {}], sort_keys=True, default=str)


def _arguments(entry: Entry) -> object:
    arguments = entry.get("tool_args")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _place(item: tuple[float, Entry]) -> tuple[float, int]:
    number = item[1].get("id")
    return item[0], number if isinstance(number, int) else 0


def _checked(index: int, entry: object) -> tuple[float, Entry]:
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"entry {index} must be a dictionary, as get_log() of a flight recorder returns; got {entry!r}"
        )
    fields = cast("Entry", entry)
    missing = [name for name in _NEEDED if fields.get(name) is None]
    if missing:
        raise ValueError(f"entry {index} is not an entry of a flight recorder: it has no {', '.join(missing)}")
    stamp = fields["timestamp"]
    try:
        time = datetime.fromisoformat(stamp)
    except (TypeError, ValueError):
        raise ValueError(
            f"entry {index} ({fields['trace_id']}): timestamp must be ISO 8601, such as "
            f"2026-11-24T03:54:55.846627+00:00; got {stamp!r}"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), fields


def _seconds(entry: Entry) -> float:
    duration = entry.get("execution_time_ms")
    return duration / 1000 if isinstance(duration, (int, float)) and duration > 0 else 0.0
