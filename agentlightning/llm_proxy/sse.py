"""Server-sent events as bytes: split a stream into unchanged frames, and read the data of a frame.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html section 9.2.6 (a frame ends at an empty line).
"""

from __future__ import annotations

import re

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n")


class FrameTooLarge(ValueError):
    """A frame is larger than its limit."""


class Frames:
    """Collects bytes as they arrive and returns complete frames, each with the empty line that ends it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete.

        Raises:
            FrameTooLarge: one frame is larger than the limit.
        """
        start = max(0, len(self._buffer) - 3)
        self._buffer += data
        frames: list[bytes] = []
        begin = 0
        for end in _END.finditer(self._buffer, start):
            frames.append(bytes(self._buffer[begin : end.end()]))
            begin = end.end()
        del self._buffer[:begin]
        if len(self._buffer) > self._limit:
            raise FrameTooLarge(f"a frame of more than {self._limit} bytes")
        return frames

    def rest(self) -> bytes:
        """Return the bytes after the last frame."""
        return bytes(self._buffer)


def data_of(frame: bytes) -> bytes | None:
    """Return the data of a frame, its lines joined; None for a frame without data (a comment, only an event name)."""
    lines = [
        line[5:].removeprefix(b" ") for line in frame.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None


def with_data(frame: bytes, data: bytes) -> bytes:
    """Return a frame of the same event with other data."""
    lines = frame.replace(b"\r\n", b"\n").split(b"\n")
    event = next((line[6:].strip().decode("utf-8", "replace") for line in lines if line.startswith(b"event:")), None)
    return frame_of(data, event)


def frame_of(data: bytes, event: str | None = None) -> bytes:
    """Return a frame with one line of data."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"
