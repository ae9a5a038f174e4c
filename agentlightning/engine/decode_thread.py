"""The decoding thread: a limited queue in front of the `Decoder`, and a pause in which weights may change."""

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

from agentlightning.base.terminal import counted
from agentlightning.engine.completion import Completion, DecodeText
from agentlightning.engine.decoder import Decoder
from agentlightning.engine.policy_engine import EngineStats
from agentlightning.engine.request import RequestError
from agentlightning.engine.torch_setup import free_cached_memory, is_out_of_memory, short_cause

if TYPE_CHECKING:
    from agentlightning.engine.served import ServedModel

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """Completions that are answered together."""

    completions: Sequence[Completion]
    finished: Future[int] = field(default_factory=Future[int])


class DecodeLoop:
    """Decodes completions from any thread together, on its own thread.

    `submit` and `paused` may be called from any thread. One completion uses weights of one version: if the weights
    change during a completion, outside of `paused`, it fails with 503. If the memory does not suffice for all
    completions in progress, half as many are decoded concurrently from then on; all continue after their existing
    tokens.
    """

    def __init__(
        self,
        policy: ServedModel,
        *,
        max_batch: int,
        max_waiting: int,
        decode: DecodeText | None = None,
        separate: bool = False,
    ) -> None:
        """Prepare the loop; `InferenceEngine` and `Decoder` explain the arguments. `decode` is called from the loop's
        own thread."""
        self._policy = policy
        self._max_batch, self._max_waiting = max_batch, max_waiting
        # a small model is as slow per token with two threads as with one, and two use cores that the agents need
        self._threads = 1 if policy.is_small else torch.get_num_threads()
        self._new_decoder = partial(Decoder, policy.model, policy.eos_ids, decode, separate=separate)
        self._room = max_batch  # number of completions that fit into the memory, as far as known
        self._lacked = False  # the memory did not suffice the last time
        self._decoder = self._new_decoder(max_batch=max_batch)
        self._waiting: deque[_Job] = deque()
        self._in_flight: dict[Completion, _Job] = {}
        self._version = policy.weight_version  # weight version of everything in flight
        self._changed = threading.Condition()  # guards the fields above and below
        self._paused = False
        self._stopping = False
        self._stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="agl-decode", daemon=True)

    def start(self) -> None:
        """Start decoding. May be called once."""
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
        """Queue completions that start together. When all are finished, the future returns the version of the weights
        that generated them; it fails with `RequestError` if one of them cannot continue.

        Raises:
            RequestError: 503, the queue is full or the engine is stopping; 400, there are too many to run together.
        """
        if len(completions) > self._max_batch:
            text = f"'n' must be at most {self._max_batch}, the maximum number of concurrent completions"
            raise RequestError(f"{text}; got {len(completions)}", param="n")
        job = _Job(completions)
        with self._changed:
            if self._stopping:
                raise _stopping()
            if len(self._waiting) >= self._max_waiting:
                text = f"{len(self._waiting)} requests are already waiting"
                raise RequestError(text, status=503, code="overloaded", retry_after=1)
            self._waiting.append(job)
            self._changed.notify_all()
        return job.finished

    @contextmanager
    def paused(self, timeout: float) -> Generator[None]:
        """Wait until no completion is in progress; inside the block none starts and new requests are queued.

        Raises:
            TimeoutError: a completion was still in progress after `timeout` seconds; decoding continues.
            RuntimeError: the engine is already paused.
        """
        with self._changed:
            if self._paused:
                raise RuntimeError("the engine is already paused; only one change of weights at a time is allowed")
            self._paused = True
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._in_flight, timeout):
                    open_now = counted(len(self._in_flight), "completion")
                    raise TimeoutError(f"{open_now} still in progress after {timeout} s")
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        """Return a copy of the totals."""
        with self._changed:
            return replace(self._stats)

    def load(self) -> dict[str, int]:
        """Return the numbers of waiting requests and of completions in progress."""
        with self._changed:
            return {"waiting": len(self._waiting), "in_flight": len(self._in_flight)}

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # of this thread only
        while (new := self._admit()) is not None:
            started, cause = time.perf_counter(), ""
            finished: list[Completion] = []
            try:
                finished = self._advance(new)
                self._lacked = False
            except Exception as error:  # the boundary: any error of the model is the answer to those in flight
                if not is_out_of_memory(error):
                    logger.exception("decoding failed; failed completions: %d", len(self._in_flight))
                    self._fail(RequestError(f"decoding failed: {error}", status=500, code="internal_error"))
                    continue
                cause = short_cause(error)
            if cause:  # here the frames of the error are gone, and their tensors with them
                finished = self._halve(cause)
            self._deliver(finished, time.perf_counter() - started)

    def _admit(self) -> list[Completion] | None:
        """Wait for work and return the completions that join those in flight; None if the loop should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._in_flight or (self._waiting and not self._paused))
            if self._stopping:
                return None
            free = 0 if self._paused else self._max_batch - len(self._in_flight)
            new: list[Completion] = []
            while self._waiting and len(self._waiting[0].completions) <= free - len(new):
                job = self._waiting.popleft()
                if job.finished.set_running_or_notify_cancel():
                    new += job.completions
                    self._in_flight |= dict.fromkeys(job.completions, job)
            if new:
                self._changed.notify_all()
            return new

    def _advance(self, new: list[Completion]) -> list[Completion]:
        """Sample one token of each completion in flight; return the finished ones."""
        with self._policy.lock:
            self._decoder.add(new)
            if self._version != self._policy.weight_version:
                self._fail_begun()
                self._version = self._policy.weight_version
            return self._decoder.step()

    def _restart(self, completions: Iterable[Completion]) -> None:
        self._decoder = self._new_decoder(max_batch=self._room)
        self._decoder.add([*completions])

    def _fail_begun(self) -> None:
        """Fail the completions that have tokens of replaced weights."""
        begun = [completion for completion in self._in_flight if completion.token_ids]
        with self._changed:
            jobs = [self._in_flight.pop(completion) for completion in begun]
            self._changed.notify_all()
        self._restart(self._in_flight)
        text = "the weights changed while this was generated"
        _fail_jobs(jobs, RequestError(text, status=503, code="weights_changed", retry_after=1))

    def _halve(self, cause: str) -> list[Completion]:
        """Halve the number of running completions after an out-of-memory error; return the finished ones. Fail all of
        them if the memory does not suffice for a single one."""
        tried, device = min(self._room, len(self._in_flight)), self._policy.model.device
        self._restart(())
        free_cached_memory(device)
        if tried == 1 and self._lacked:
            tokens = max(len(completion.read_ids) for completion in self._in_flight)
            text = (
                f"one call of at most {tokens} tokens does not fit into the memory of {device} ({cause}). Try "
                f"bf16=True, lora={{'r': 16}}, or a smaller max_model_length"
            )
            logger.error("decoding failed: %s", text)
            self._fail(RequestError(text, status=500, code="out_of_memory"))
            return []
        self._lacked = True
        if tried > 1:
            self._room = tried // 2
            text = "out of memory with %d concurrent calls (%s); continuing with at most %d at a time; set "
            logger.warning(text + "engine_batch=%d to start with this limit", tried, cause, self._room, self._room)
        self._restart(completion for completion in self._in_flight if not completion.is_over)
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
            self._restart(())
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
