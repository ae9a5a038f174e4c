"""Entries of a flight recorder as actions: one system call writes one entry or two, and is one action.

| system call                  | entries                                        | the action's verdict |
| ---------------------------- | ---------------------------------------------- | -------------------- |
| a tool that was allowed      | `syscall_SYS_EXEC` (pending), then the tool's  | `allowed` or `error` |
| refused by the policy        | `syscall_<NAME>` (pending), then the blocked   | `blocked`            |
| another one that was allowed | `syscall_<NAME>` (pending)                     | `pending`            |
| by an agent that was ended   | `syscall_<NAME>` (pending)                     | `pending`            |

The kernel never completes the first entry. The second one belongs to the last open one of the same agent with the same
call and arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

from agentlightning.contrib.agentos.recorder import Entry

_PREFIX = "syscall_"
_NEEDED = ("trace_id", "timestamp", "agent_id", "tool_name", "policy_verdict")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of an agent in a flight recorder."""

    entry: Entry
    """The entry about its end."""
    syscall: str | None
    """`SYS_EXEC`; None if no kernel wrote the entry."""
    start: float
    """Seconds since 1970."""
    seconds: float
    """Duration of the tool; 0 if it did not run."""


def actions_of(entries: Iterable[Entry]) -> list[Action]:
    """Return the actions of entries, in the order of time; the entries may be in any order.

    Raises:
        ValueError: one is not an entry of a flight recorder; says which one, and its fault.
    """
    checked = sorted((_checked(index, entry) for index, entry in enumerate(entries)), key=_place)
    firsts: dict[str, list[int]] = {}
    """Open first entries, by the key of the second one, which belongs to the last of them."""
    actions: list[Action] = []
    for start, entry in checked:
        name = str(entry["tool_name"])
        if name.startswith(_PREFIX):
            syscall = name.removeprefix(_PREFIX)
            firsts.setdefault(_key_of_first(entry, syscall), []).append(len(actions))
            actions.append(Action(entry, syscall, start, 0.0))
            continue
        seconds = _seconds(entry)
        key, syscall = _key_of_second(entry)
        places = firsts.get(key)
        if places:
            first = actions[place := places.pop()]
            actions[place] = Action(entry, first.syscall, first.start, start - first.start + seconds)
        else:
            actions.append(Action(entry, syscall, start, seconds))
    return actions


def _key_of_first(entry: Entry, syscall: str) -> str:
    return _key(entry, syscall, _arguments(entry))


def _key_of_second(entry: Entry) -> tuple[str, str | None]:
    """Return the key that the first entry has, and the system call if the entry names it."""
    arguments = _arguments(entry)
    fields = cast("Entry", arguments if isinstance(arguments, Mapping) else {})
    if "_syscall" in fields:  # refused: it has the arguments of the system call
        syscall = str(fields["_syscall"])
        return _key(entry, syscall, {k: v for k, v in fields.items() if k not in ("_syscall", "_ring")}), syscall
    call: dict[str, object] = {"tool": entry["tool_name"], "args": arguments}
    return _key(entry, "SYS_EXEC", call), None


def _key(entry: Entry, syscall: str, arguments: object) -> str:
    if syscall == "SYS_EXEC" and isinstance(arguments, Mapping):  # the tool's entry has no more of it
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


def _place(timed: tuple[float, Entry]) -> tuple[float, int]:
    number = timed[1].get("id")
    return timed[0], number if isinstance(number, int) else 0


def _checked(index: int, entry: object) -> tuple[float, Entry]:
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"entry {index} must be a dictionary, as get_log() of a flight recorder returns; got {entry!r}"
        )
    known = cast("Entry", entry)
    missing = [name for name in _NEEDED if known.get(name) is None]
    if missing:
        raise ValueError(f"entry {index} is no entry of a flight recorder: it has no {', '.join(missing)}")
    stamp = known["timestamp"]
    try:
        time = datetime.fromisoformat(stamp)
    except (TypeError, ValueError):
        raise ValueError(
            f"entry {index} ({known['trace_id']}): timestamp must be ISO 8601, such as "
            f"2026-11-24T03:54:55.846627+00:00; got {stamp!r}"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp(), known


def _seconds(entry: Entry) -> float:
    duration = entry.get("execution_time_ms")
    return duration / 1000 if isinstance(duration, (int, float)) and duration > 0 else 0.0
