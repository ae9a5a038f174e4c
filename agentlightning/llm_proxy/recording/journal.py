"""The journal of calls in progress: from this file the next process records the calls that `kill -9` interrupted.

Each call adds a line when it begins and one when its spans are stored. The lines are not synced to the disk: the file
protects against the death of the process, not of the machine, and costs two short writes per call.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentlightning.base.private_files import private_folder, tighten
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects import DIALECTS
from agentlightning.llm_proxy.dialects.json_values import fields_of

logger = logging.getLogger(__name__)

_LARGE_BYTES: Final = 1024 * 1024
_TEXTS: Final = ("call_id", "rollout_id", "attempt_id", "dialect")


class Journal:
    """Owned by the gateway that opened it: a second one cannot open the same file. Used from one loop at a time.

    Raises:
        ValueError: the file cannot be written, or a running gateway uses it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._in_hand: set[str] = set()
        self._file: int | None = None

    def open(self) -> list[GatewayCall]:
        """Open the file and return the calls that were in progress when an earlier process ended; they stay on file."""
        self.close()
        try:
            private_folder(self.path.parent)
            tighten(self.path)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ValueError(f"journal={str(self.path)!r} cannot be written: {error.strerror}") from error
        if not _locked(file):
            os.close(file)
            raise ValueError(
                f"journal={str(self.path)!r} is used by a running gateway; use a separate file for each gateway"
            )
        data = self.path.read_bytes()
        calls: dict[str, GatewayCall] = {}
        for line in data.splitlines():
            try:
                fields = fields_of(json.loads(line))
            except ValueError:  # a line that was cut short
                continue
            if "ended" in fields:
                calls.pop(fields["ended"], None)
            elif all(isinstance(fields.get(name), str) for name in _TEXTS) and fields["dialect"] in DIALECTS:
                calls[fields["call_id"]] = GatewayCall(**fields)
        self._file, self._in_hand = file, set(calls)
        if data and not data.endswith(b"\n"):
            self._append(b"\n")  # a line was cut short: the next one begins its own
        return list(calls.values())

    def begun(self, call: GatewayCall) -> None:
        """Write that a call is in progress; does nothing if the journal is not open."""
        if self._file is None:
            return
        self._in_hand.add(call.call_id)
        line = {name: getattr(call, name) for name in (*_TEXTS, "sequence_id", "arrived_at", "streamed")}
        self._append(json.dumps(line).encode() + b"\n")

    def ended(self, call: GatewayCall) -> None:
        """Write that a call is recorded, or that its record is abandoned."""
        if self._file is None:
            return
        self._in_hand.discard(call.call_id)
        self._append(json.dumps({"ended": call.call_id}).encode() + b"\n")
        if self._file is not None and not self._in_hand and os.fstat(self._file).st_size > _LARGE_BYTES:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Close the file, and delete it if no call is in progress. May be called twice."""
        if self._file is None:
            return
        if not self._in_hand:
            with suppress(OSError):
                self.path.unlink()
        os.close(self._file)
        self._file = None

    def _append(self, line: bytes) -> None:
        """Write a line. If that fails, close the journal, because its contents would be wrong; the calls continue."""
        assert self._file is not None
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            logger.error("journal %s cannot be written (%s): it records no more calls", self.path, error)
            os.close(self._file)
            self._file = None


def _locked(file: int) -> bool:
    """Lock the file for this process; the system releases the lock whenever the process ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two gateways with one file are not noticed
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
