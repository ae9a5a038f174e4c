"""A flight recorder whose entries know the attempt that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from agentlightning.contrib.agentos.attempt import AttemptWatch, attempt_watch

Entry = Mapping[str, Any]


class RecorderWatch:
    """A `FlightRecorder` that reports each entry to its attempt; everything else is the recorder's.

    An entry has no field for the attempt, and its `agent_id` is the role that all attempts share.

    Raises:
        TypeError: the recorder has no `start_trace` or no `get_log`.
    """

    def __init__(self, recorder: object) -> None:
        if isinstance(recorder, type) or not all(
            callable(getattr(recorder, name, None)) for name in ("start_trace", "get_log")
        ):
            raise TypeError(
                "recorder must have the methods start_trace and get_log, as FlightRecorder of agent-os-kernel has; "
                f"got {recorder!r}"
            )
        self.recorder: Any = recorder

    def start_trace(self, *args: Any, **kwargs: Any) -> str:
        """Begin an entry and return its id."""
        entry_id = cast("str", self.recorder.start_trace(*args, **kwargs))
        watch = attempt_watch()
        if watch is not None:
            watch.add_entry(self, entry_id)
        return entry_id

    def entries_of(self, watch: AttemptWatch, since: float) -> list[Entry]:
        """Return the entries that an attempt has written, the oldest first.

        Args:
            since: start of the attempt in seconds since 1970; only later entries of a long log are read.
        """
        ids = watch.entries.get(self)
        if not ids:
            return []
        between = getattr(self.recorder, "get_events_in_time_range", None)
        if between is None:
            entries: list[Entry] = self.recorder.get_log()
        else:
            entries = between(datetime.fromtimestamp(since, UTC), datetime.now(UTC))
        return [entry for entry in entries if entry.get("trace_id") in ids]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "recorder":  # the object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.recorder, name)
