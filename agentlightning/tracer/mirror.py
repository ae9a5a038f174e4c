"""Mirror: sends a copy of the spans for the store to a collector, in the background.

Spans are put on a queue of limited size without waiting; a thread sends them in batches. If a collector is slow,
unreachable or full, the queue grows to its limit, and then copies are dropped; no rollout is affected. Losses are
counted, and logged once. The OTLP libraries are imported only if there is a collector.

One mirror serves a process. Tracers open it (`open_mirror`) and close it; the last one to close waits, up to a limit,
until the queue is empty. A forked child has its own empty mirror.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError
from agentlightning.tracer.collector import collector_of
from agentlightning.types import Span
from agentlightning.utils.backoff import backoff_delays

if TYPE_CHECKING:
    from agentlightning.tracer.senders import Answer, Sender

logger = logging.getLogger(__name__)

MOST_SPANS = 20_000
"""Number of spans of a process that wait for a collector."""
MOST_BYTES = 64 * 1024 * 1024
"""Approximate bytes of these spans in memory."""
BATCH_SPANS = 512
BATCH_BYTES = 3 * 1024 * 1024
"""Bytes of a batch; below the 4 MiB that a gRPC server accepts by default."""
CLOSE_SECONDS = 3.0
"""Seconds to wait for the queue at the end of a worker."""
_LINGER_SECONDS = 0.5
"""Seconds to wait for more spans before a batch is sent."""
_TRY_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class MirrorCounts(NamedTuple):
    """Numbers of spans so far, by outcome."""

    offered: int
    sent: int
    lost: int
    """Number of spans that were dropped here or not kept by the collector."""


class Mirror:
    """A queue and the thread that sends it. Any thread may offer spans; the sending thread starts with the first."""

    def __init__(self, sender: Sender, name: str, most_spans: int = MOST_SPANS, most_bytes: int = MOST_BYTES) -> None:
        from agentlightning.utils.otlp.encode import encode_spans

        self._encode: Callable[[Iterable[Span]], bytes] = encode_spans
        self._sender = sender
        self._name = name
        self._most_spans = most_spans
        self._most_bytes = most_bytes
        self._queue: deque[tuple[Span, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed_at: float | None = None
        """Monotonic deadline of the last tries; None while open."""
        self._in_flight = 0
        self._offered = self._sent = self._lost = 0
        self._warned = False

    @property
    def counts(self) -> MirrorCounts:
        with self._changed:
            return MirrorCounts(self._offered, self._sent, self._lost)

    def offer(self, spans: Sequence[Span]) -> None:
        """Queue copies of spans; those beyond the limits are lost. Returns immediately."""
        sized = [(span, weight_of(span)) for span in spans]
        with self._changed:
            self._offered += len(sized)
            before = len(self._queue)
            for span, size in sized:
                if len(self._queue) < self._most_spans and self._bytes + size <= self._most_bytes and self._is_open():
                    self._queue.append((span, size))
                    self._bytes += size
            excess = len(sized) - (len(self._queue) - before)
            if self._thread is None and self._queue:
                thread = threading.Thread(target=self._run, name="agentlightning-mirror", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the interpreter is ending; `close` counts what is on the queue
                    logger.debug("Mirroring has stopped: %s", error)
                else:
                    self._thread = thread
            self._changed.notify_all()
        if excess:
            self._lose(excess, f"{self._most_spans} spans or {self._most_bytes} bytes are already waiting")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send the waiting spans for at most `seconds`, and end the thread; the rest is lost. May be called twice."""
        with self._changed:
            if self._is_open():
                self._closed_at = time.monotonic() + seconds
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        with self._changed:
            remaining = len(self._queue) + self._in_flight
            self._queue.clear()
            self._in_flight = 0
        if remaining:
            self._lose(remaining, f"the collector did not accept them within {seconds:g} s at the end")
        counts = self.counts
        logger.info("Mirrored %d of %d spans to %s", counts.sent, counts.offered, self._name)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._hand_over(batch)
        finally:
            self._sender.close()

    def _next_batch(self) -> list[Span]:
        """Wait for spans and return the next ones in order; none if the mirror is closed and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._is_open())
            self._changed.wait_for(self._is_ready, _LINGER_SECONDS)
            batch: list[Span] = []
            size = 0
            while self._queue and len(batch) < BATCH_SPANS and (not batch or size + self._queue[0][1] <= BATCH_BYTES):
                span, bytes_ = self._queue.popleft()
                batch.append(span)
                size += bytes_
            self._bytes -= size
            self._in_flight = len(batch)
            return batch

    def _is_ready(self) -> bool:
        return len(self._queue) >= BATCH_SPANS or self._bytes >= BATCH_BYTES or not self._is_open()

    def _hand_over(self, batch: list[Span]) -> None:
        """Send a batch until it is accepted, refused, or the mirror is closed and the time is up."""
        try:
            body = self._encode(batch)
        except BadRequestError:  # those that OTLP cannot hold are lost
            good: list[Span] = []
            for span in batch:
                try:
                    self._encode([span])
                except BadRequestError as error:
                    self._lose(1, str(error))
                else:
                    good.append(span)
            with self._changed:
                self._in_flight = len(good)
            batch, body = good, self._encode(good)
        count = len(batch)
        if not count:
            return
        delays = backoff_delays(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            last = not self._is_open()
            deadline = self._closed_at
            answer = self._sender.send(
                body, _TRY_SECONDS if deadline is None else max(0.05, deadline - time.monotonic())
            )
            if answer.verdict != "again":
                break
            logger.debug("Mirroring %d spans to %s failed, retrying: %s", count, self._name, answer.why)
            if not self._may_try_again(answer, next(delays), last):
                break
        kept_count = count - min(answer.rejected, count) if answer.verdict == "taken" else 0
        with self._changed:
            if not self._in_flight:  # `close` has dropped them
                return
            self._in_flight = 0
            self._sent += kept_count
        if kept_count < count:
            self._lose(count - kept_count, answer.why or "the collector kept only a part of them")

    def _may_try_again(self, answer: Answer, delay: float, last: bool) -> bool:
        """Wait as the collector requests, else with growing pauses; False if the mirror is closed and out of time."""
        pause = answer.retry_after
        until = time.monotonic() + (delay if pause is None else pause)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_open(), until - time.monotonic())
            if self._closed_at is None:
                return True
            if pause is None:
                return not last  # one more try, at once; an unreachable collector is not waited for
            if until >= self._closed_at:
                return False
            self._changed.wait_for(lambda: False, until - time.monotonic())
            return True

    def _is_open(self) -> bool:
        return self._closed_at is None

    def _lose(self, count: int, why: str) -> None:
        with self._changed:
            self._lost += count
            first, self._warned = not self._warned, True
        if first:
            logger.warning(
                "%s not mirrored to %s (%s). No rollout is affected. Further losses are counted, but not logged",
                counted(count, "span"),
                self._name,
                why,
            )


def weight_of(span: Span) -> int:
    """Return the approximate size of a span in bytes: its texts and lists, and a constant for the rest."""
    size = 500 + len(span.name)
    for key, value in span.attributes.items():
        size += len(key) + _weight(value)
    for event in span.events:
        size += 100 + sum(len(key) + _weight(value) for key, value in event.attributes.items())
    return size + 200 * len(span.links)


def _weight(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (list, tuple)):
        items = cast(Sequence[object], value)
        return sum(map(_weight, items)) if items and isinstance(items[0], str) else 8 * len(items)
    return 8


# --- the mirror of this process ------------------------------------------------------------------------------------


class _Process:
    """The mirror of this process, and the number of tracers that have it open."""

    def __init__(self, wanted: bool = False) -> None:
        self.lock = threading.Lock()
        self.mirror: Mirror | None = None
        self.users = 0
        self.wanted = wanted
        """True if a tracer opened it, here or in the process that this one was forked from."""


_process = _Process()


def open_mirror() -> bool:
    """Start to mirror delivered spans if a collector is configured in the environment; return whether one is.

    For each call that returns true, call `close_mirror` once.

    Raises:
        ValueError, MissingExtraError: the variables are invalid; see `collector_of`.
    """
    process = _process
    with process.lock:
        if process.mirror is None and not _make_mirror(process):
            return False
        process.users += 1
        process.wanted = True
        return True


def close_mirror(seconds: float = CLOSE_SECONDS) -> None:
    """Release one use; the last one sends the waiting spans, for at most `seconds`."""
    process = _process
    with process.lock:
        process.users = max(0, process.users - 1)
        if process.users:
            return
        mirror, process.mirror = process.mirror, None
    if mirror is not None:
        mirror.close(seconds)


def is_mirroring() -> bool:
    """True if spans passed to `mirror_spans` are sent."""
    return _process.wanted


def mirror_spans(spans: Sequence[Span]) -> None:
    """Offer spans to the mirror of this process, if a tracer has opened it. Never waits, never raises."""
    process = _process
    if not spans or not process.wanted:
        return
    mirror = process.mirror
    if mirror is None:  # in a forked child, or of a tracer that is used after its end
        with process.lock:
            try:
                if process.mirror is None:
                    _make_mirror(process)
            except (ValueError, ImportError) as error:  # the variables were changed meanwhile
                process.wanted = False
                logger.error("Spans are not mirrored: %s", error)
            mirror = process.mirror
    if mirror is not None:
        mirror.offer(spans)


def mirror_counts() -> MirrorCounts:
    """Return the numbers of spans by outcome, in this process since the mirror was opened."""
    mirror = _process.mirror
    return mirror.counts if mirror is not None else MirrorCounts(0, 0, 0)


def _make_mirror(process: _Process) -> bool:
    collector = collector_of()
    if collector is None:
        return False
    from agentlightning.tracer.senders import sender_to

    process.mirror = Mirror(sender_to(collector), collector.shown)
    logger.info("Spans are mirrored to %s (%s)", collector.shown, collector.protocol)
    return True


def _close_at_exit() -> None:
    mirror, _process.mirror = _process.mirror, None
    if mirror is not None:
        mirror.close()


def _begin_in_child() -> None:
    """Reset locks, queue and thread, which belong to the parent; the parent sends the waiting spans."""
    global _process
    _process = _Process(_process.wanted)


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
