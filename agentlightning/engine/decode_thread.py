"""The thread that decodes: a bounded queue before the `Decoder`, and a pause in which weights may change."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from agentlightning.engine.completion import Completion, DecodeText
from agentlightning.engine.decoder import Decoder, SeparateDecoder
from agentlightning.engine.out_of_memory import free_cached_memory, is_out_of_memory, short_cause
from agentlightning.engine.policy_engine import EngineStats
from agentlightning.engine.request import RequestError

if TYPE_CHECKING:
    from agentlightning.engine.served import ServedModel

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """Completions that are answered together."""

    completions: Sequence[Completion]
    finished: Future[int] = field(default_factory=Future[int])


class DecodeLoop:
    """Completions from any thread, decoded together by one thread of its own.

    `submit` and `swap` may be called from any thread. All weights that one completion sees have one version: if they
    change under it, outside of `swap`, it fails with 503 instead of going on. Where the memory does not suffice for all
    that is in flight, half as many are decoded at once from then on; all go on after the tokens that they have.
    """

    def __init__(
        self,
        policy: ServedModel,
        *,
        max_batch: int,
        max_waiting: int,
        threads: int | None,
        decode: DecodeText | None = None,
        separate: bool = False,
    ) -> None:
        """Prepare the loop. `decode` gives the text of tokens; it is called from the loop's own thread. `separate`
        decodes each completion alone, so that it does not depend on the others."""
        self._policy = policy
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        # Operations of a small model are too short to share. Measured with 0.25 million parameters on two cores: the
        # same 0.9 ms per token with one thread and with two, but two burn both cores, which the agents need.
        self._threads = threads or (1 if policy.is_small else torch.get_num_threads())
        kind = SeparateDecoder if separate else Decoder
        self._new_decoder = partial(kind, policy.model, policy.eos_ids, decode)
        self._decoder = self._new_decoder()
        self._room = max_batch  # completions that the memory suffices for, as far as is known
        self._lacked = False  # it did not suffice the last time
        self._set_aside: deque[Completion] = deque()  # in flight, and not in the decoder; of the loop's own thread
        self._waiting: deque[_Job] = deque()
        self._in_flight: dict[Completion, _Job] = {}
        self._version = policy.weight_version  # of everything in flight
        self._changed = threading.Condition()  # guards the fields above and below
        self._paused = False
        self._stopping = False
        self._stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="agl-decode", daemon=True)

    def start(self) -> None:
        """Start decoding; once."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread within `timeout` seconds; waiting and running requests fail with 503. May be called twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._fail(_stopping(), waiting_too=True)

    def submit(self, completions: Sequence[Completion]) -> Future[int]:
        """Queue completions that start together; the future gives the version of the weights that made them, when all
        are finished.

        The future fails with `RequestError` where one of them cannot go on.

        Raises:
            RequestError: 503, the queue is full or the engine is stopping; 400, they are more than fit together.
        """
        if len(completions) > self._max_batch:
            text = f"'n' must be at most {self._max_batch}, the completions that are decoded together"
            raise RequestError(f"{text}; got {len(completions)}", param="n")
        job = _Job(completions)
        with self._changed:
            if self._stopping:
                raise _stopping()
            if len(self._waiting) >= self._max_waiting:
                text = f"{len(self._waiting)} requests are waiting already"
                raise RequestError(text, status=503, code="overloaded", retry_after=1)
            self._waiting.append(job)
            self._changed.notify_all()
        return job.finished

    @contextmanager
    def swap(self, timeout: float) -> Generator[None]:
        """Wait until no completion is in flight; inside the block none starts and new requests queue up.

        Raises:
            TimeoutError: A completion was still in flight after `timeout` seconds; decoding goes on as before.
            RuntimeError: Another `swap` is open.
        """
        with self._changed:
            if self._paused:
                raise RuntimeError("a swap of weights is open already; one at a time")
            self._paused = True
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._in_flight, timeout):
                    raise TimeoutError(f"{len(self._in_flight)} completions are still in flight after {timeout} s")
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        """Return a copy of the sums."""
        with self._changed:
            return replace(self._stats)

    def load(self) -> dict[str, int]:
        """Return how many completions wait and how many are in flight."""
        with self._changed:
            return {"waiting": len(self._waiting), "in_flight": len(self._in_flight)}

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # of this thread only
        while (jobs := self._admit()) is not None:
            started, cause = time.perf_counter(), ""
            finished: list[Completion] = []
            try:
                finished = self._advance([completion for job in jobs for completion in job.completions])
                self._lacked = False
            except Exception as error:  # the boundary: any error of the model is the answer to those in flight
                if not is_out_of_memory(error):
                    logger.exception("decoding failed; %d completions are lost", len(self._in_flight))
                    self._fail(RequestError(f"decoding failed: {error}", status=500, code="internal_error"))
                    continue
                cause = short_cause(error)
            if cause:  # here the frames of the error are gone, and their tensors with them
                finished = self._begin_again(cause)
            self._deliver(finished, time.perf_counter() - started)

    def _admit(self) -> list[_Job] | None:
        """Wait for work and return the jobs that join the batch; None when the loop is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._in_flight or (self._waiting and not self._paused))
            if self._stopping:
                return None
            free = 0 if self._paused else self._max_batch - len(self._in_flight)
            jobs: list[_Job] = []
            while self._waiting and len(self._waiting[0].completions) <= free:
                job = self._waiting.popleft()
                if job.finished.set_running_or_notify_cancel():
                    jobs.append(job)
                    free -= len(job.completions)
                    self._in_flight |= dict.fromkeys(job.completions, job)
            if jobs:
                self._changed.notify_all()
            return jobs

    def _advance(self, new: list[Completion]) -> list[Completion]:
        """Sample one token of everything in flight; return the finished completions."""
        with self._policy.lock:
            if self._version != self._policy.weight_version:
                self._fail_begun()
                self._version = self._policy.weight_version
            self._set_aside.extend(new)
            finished = self._decoder.step()
            free = min(max(0, self._room - len(self._decoder)), len(self._set_aside))
            return finished + self._decoder.add([self._set_aside.popleft() for _ in range(free)])

    def _fail_begun(self) -> None:
        """Fail the completions that have tokens of weights that are no longer there."""
        begun = [*self._decoder.clear(), *(one for one in self._set_aside if one.token_ids)]
        self._set_aside = deque(one for one in self._set_aside if not one.token_ids)
        with self._changed:
            jobs = [self._in_flight.pop(completion) for completion in begun]
            self._changed.notify_all()
        text = "the weights changed while this was generated"
        _fail_jobs(jobs, RequestError(text, status=503, code="weights_changed", retry_after=1))

    def _begin_again(self, cause: str) -> list[Completion]:
        """After an out-of-memory error, set aside all in flight and let the decoder have half as many from now on;
        return the finished ones. Fails all of them where the memory does not suffice for a single one."""
        tried, device = min(self._room, len(self._in_flight)), self._policy.model.device
        self._decoder = self._new_decoder()
        free_cached_memory(device)
        if tried == 1 and self._lacked:
            tokens = max(len(completion.read_ids) for completion in self._in_flight)
            text = (
                f"one call of at most {tokens} tokens is too much for the memory of {device} ({cause}). Try bf16=True, "
                "lora={'r': 16}, or a smaller max_model_length"
            )
            logger.error("decoding failed: %s", text)
            self._fail(RequestError(text, status=500, code="out_of_memory"))
            return []
        self._lacked = True
        if tried > 1:
            self._room = tried // 2
            text = "out of memory while %d calls were generated at once (%s): they go on, at most %d at once; set "
            logger.warning(text + "engine_batch=%d to begin with that", tried, cause, self._room, self._room)
        self._set_aside = deque(completion for completion in self._in_flight if not completion.is_over)
        return [completion for completion in self._in_flight if completion.is_over]

    def _deliver(self, finished: list[Completion], seconds: float) -> None:
        with self._changed:
            jobs = [self._in_flight.pop(completion) for completion in finished]
            self._stats.busy_seconds += seconds
            self._stats.completions += len(finished)
            self._stats.prompt_tokens += sum(len(completion.prompt_ids) for completion in finished)
            self._stats.completion_tokens += sum(len(completion.token_ids) for completion in finished)
            if jobs:
                self._changed.notify_all()
        for job, completion in zip(jobs, finished, strict=True):
            if completion.error is not None:
                for other in job.completions:
                    other.left = True
                _fail_jobs([job], RequestError(completion.error, code="no_allowed_token"))
            elif not job.finished.done() and all(other.is_over for other in job.completions):
                job.finished.set_result(self._version)

    def _fail(self, error: RequestError, *, waiting_too: bool = False) -> None:
        with self._changed:
            self._decoder.clear()
            self._set_aside.clear()
            jobs = list(self._in_flight.values())
            self._in_flight.clear()
            if waiting_too:
                jobs += [job for job in self._waiting if job.finished.set_running_or_notify_cancel()]
                self._waiting.clear()
            self._changed.notify_all()
        _fail_jobs(jobs, error)


def _fail_jobs(jobs: Iterable[_Job], error: RequestError) -> None:
    for job in dict.fromkeys(jobs):
        if not job.finished.done():
            job.finished.set_exception(error)


def _stopping() -> RequestError:
    return RequestError("the engine is stopping", status=503, code="stopping")
