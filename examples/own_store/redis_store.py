"""A store in Redis: JSON under keys, a list as the queue, one transaction for each change.

A change watches the keys that it reads, applies the framework's rules, and writes in one `MULTI`. If another process
was faster, Redis refuses the transaction and the change is retried. So no two runners get the same rollout, and none is
lost between the queue and its attempt.

    rollouts            list of ids                rollout:ID    its JSON
    queue               list of ids to be claimed  attempts:ID   list of JSON, in their order
    latest-resources    an id                      spans:ID      hash: "attempt span" -> JSON
    resources:ID        their JSON                 numbers:ID    counter of spans

Operations accept only the arguments that a training run needs. The framework supplies the others, see README.md.
"""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from redis import Redis
from redis.exceptions import ConnectionError, TimeoutError
from transaction import Change, change, to_json

import agentlightning as agl
from agentlightning.store.base import UNSET, Unset, is_finished, is_queuing
from agentlightning.store.rules.lifecycle import check_attempt_change, rollout_after
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Span,
)
from agentlightning.utils.id import generate_id

T = TypeVar("T")
POLL_SECONDS = 0.05


class RedisLightningStore(agl.LightningStore):
    """Rollouts, attempts, spans and resources in one Redis database, under one prefix.

    Args:
        url: URL of the server and database, `redis://host:port/number`.
        prefix: prefix of all keys; stores with different prefixes do not see each other.
        thread_safe: report to the framework that calls from several threads at once are safe (they are).
    """

    def __init__(self, url: str = "redis://localhost:6379", *, prefix: str = "agl:", thread_safe: bool = True) -> None:
        self._url, self._prefix, self._thread_safe = url, prefix, thread_safe
        self._redis: Any = cast("Any", Redis).from_url(url, decode_responses=True)  # any thread may use it

    @property
    def capabilities(self) -> agl.LightningStoreCapabilities:
        return {"async_safe": True, "thread_safe": self._thread_safe, "distributed": True}

    def __getstate__(self) -> tuple[str, str, bool]:
        return self._url, self._prefix, self._thread_safe  # connections are not sent to another process

    def __setstate__(self, state: tuple[str, str, bool]) -> None:
        url, prefix, thread_safe = state
        self.__init__(url, prefix=prefix, thread_safe=thread_safe)

    async def close(self) -> None:
        self._redis.close()

    async def _do(self, command: str, key: str, *arguments: Any) -> Any:
        """Send one command, from a thread, so that the loop is not blocked."""
        with reported_as_outage(self._url):
            return await asyncio.to_thread(self._redis.execute_command, command, self._prefix + key, *arguments)

    async def _change(self, decide: Callable[[Change], T]) -> T:
        with reported_as_outage(self._url):
            return await asyncio.to_thread(change, self._redis, self._prefix, decide)

    # --- rollouts

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        rollout = Rollout(
            rollout_id=f"ro-{generate_id(12)}",
            input=input,
            start_time=time.time(),
            mode=mode,
            resources_id=resources_id or await self._do("GET", "latest-resources"),
            config=config or RolloutConfig(),
            metadata=metadata or {},
        )

        def decide(tx: Change) -> Rollout:
            tx.write("SET", f"rollout:{rollout.rollout_id}", to_json(rollout))
            tx.write("RPUSH", "rollouts", rollout.rollout_id)
            tx.write("RPUSH", "queue", rollout.rollout_id)
            return rollout

        return await self._change(decide)

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        def decide(tx: Change) -> AttemptedRollout | None:
            rollout_id = tx.read("LINDEX", "queue", 0)
            if rollout_id is None:
                return None
            tx.write("LPOP", "queue")
            rollout = tx.rollout(rollout_id)
            return self._begin(tx, rollout, worker_id) if is_queuing(rollout) else None  # cancelled in the meantime

        return await self._change(decide)

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        def decide(tx: Change) -> AttemptedRollout:
            return self._begin(tx, tx.rollout(rollout_id), worker_id)

        return await self._change(decide)

    def _begin(self, tx: Change, rollout: Rollout, worker_id: str | None) -> AttemptedRollout:
        """Write the next attempt of a rollout."""
        attempt = Attempt(
            rollout_id=rollout.rollout_id,
            attempt_id=f"at-{generate_id(8)}",
            sequence_id=tx.read("LLEN", f"attempts:{rollout.rollout_id}") + 1,
            start_time=time.time(),
            worker_id=worker_id,
        )
        rollout = rollout.model_copy(update={"status": "preparing", "end_time": None})
        tx.write("SET", f"rollout:{rollout.rollout_id}", to_json(rollout))
        tx.write("RPUSH", f"attempts:{rollout.rollout_id}", to_json(attempt))
        return AttemptedRollout(**dict(rollout), attempt=attempt)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        text = await self._do("GET", f"rollout:{rollout_id}")
        return None if text is None else Rollout.model_validate_json(text)

    async def query_rollouts(
        self, *, status_in: Sequence[RolloutStatus] | None = None, limit: int = -1, offset: int = 0
    ) -> PaginatedResult[Rollout]:
        ids = await self._do("LRANGE", "rollouts", 0, -1)
        rollouts = [await self.get_rollout_by_id(rollout_id) for rollout_id in ids]
        chosen = [r for r in rollouts if r is not None and (status_in is None or r.status in status_in)]
        return page(chosen, limit, offset)

    async def update_rollout(
        self, rollout_id: str, status: RolloutStatus | Unset = UNSET, metadata: dict[str, Any] | Unset = UNSET
    ) -> Rollout:
        def decide(tx: Change) -> Rollout:
            rollout = tx.rollout(rollout_id)
            if not isinstance(metadata, Unset):
                rollout = rollout.model_copy(update={"metadata": metadata})
            return tx.write_rollout(rollout, rollout.status if isinstance(status, Unset) else status, time.time())

        return await self._change(decide)

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            rollouts = [await self.get_rollout_by_id(rollout_id) for rollout_id in rollout_ids]
            present = [rollout for rollout in rollouts if rollout is not None]
            if all(map(is_finished, present)) or (end is not None and time.monotonic() >= end):
                return [rollout for rollout in present if is_finished(rollout)]
            await asyncio.sleep(POLL_SECONDS)

    # --- attempts

    async def query_attempts(self, rollout_id: str) -> PaginatedResult[Attempt]:
        texts = await self._do("LRANGE", f"attempts:{rollout_id}", 0, -1)
        return page([Attempt.model_validate_json(each) for each in texts])

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        values: dict[str, Any] = {"status": status, "worker_id": worker_id, "metadata": metadata}
        values["last_heartbeat_time"] = last_heartbeat_time

        def decide(tx: Change) -> Attempt:
            rollout = tx.rollout(rollout_id)
            attempts = [Attempt.model_validate_json(each) for each in tx.read("LRANGE", key, 0, -1)]
            if attempt_id == "latest":
                matches = attempts[-1:]
            else:
                matches = [each for each in attempts if each.attempt_id == attempt_id]
            if not matches:
                raise agl.NotFoundError(f"Rollout {rollout_id} has no attempt {attempt_id}")
            moved = not isinstance(status, Unset) and check_attempt_change(matches[0], status)
            changes = {name: value for name, value in values.items() if not isinstance(value, Unset)}
            attempt = matches[0].model_copy(update=changes)
            tx.write("LSET", key, attempt.sequence_id - 1, to_json(attempt))
            if moved and attempt.sequence_id == len(attempts) and not is_finished(rollout):
                tx.write_rollout(rollout, rollout_after(attempt, rollout.config, infrastructure_retries=0), time.time())
            return attempt

        key = f"attempts:{rollout_id}"
        return await self._change(decide)

    # --- spans

    async def add_span(self, span: Span) -> Span | None:
        field = f"{span.attempt_id} {span.span_id}"
        return span if await self._do("HSETNX", f"spans:{span.rollout_id}", field, to_json(span)) else None

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._do("INCR", f"numbers:{rollout_id}")

    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> PaginatedResult[Span]:
        if attempt_id == "latest":
            attempts = await self.query_attempts(rollout_id)
            attempt_id = attempts[-1].attempt_id if attempts else None
        texts = await self._do("HVALS", f"spans:{rollout_id}")
        spans = sorted((Span.model_validate_json(each) for each in texts), key=lambda span: span.sequence_id)
        return page([span for span in spans if attempt_id in (None, span.attempt_id)])

    # --- resources

    async def update_resources(self, resources_id: str, resources: agl.NamedResources) -> ResourcesUpdate:
        def decide(tx: Change) -> ResourcesUpdate:
            before, now = tx.read("GET", key), time.time()
            previous = None if before is None else ResourcesUpdate.model_validate_json(before)
            update = ResourcesUpdate(
                resources_id=resources_id,
                create_time=now if previous is None else previous.create_time,
                update_time=now,
                version=1 if previous is None else previous.version + 1,
                resources=resources,
            )
            tx.write("SET", key, to_json(update))
            tx.write("SET", "latest-resources", resources_id)
            return update

        key = f"resources:{resources_id}"
        return await self._change(decide)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        text = await self._do("GET", f"resources:{resources_id}")
        return None if text is None else ResourcesUpdate.model_validate_json(text)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        latest = await self._do("GET", "latest-resources")
        return None if latest is None else await self.get_resources_by_id(latest)


@contextmanager
def reported_as_outage(url: str) -> Generator[None]:
    """Report an unreachable Redis to the framework, which then retries."""
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise agl.StoreUnreachableError(f"Redis at {url} does not respond: {error}") from error


def page(items: list[T], limit: int = -1, offset: int = 0) -> PaginatedResult[T]:
    end = None if limit == -1 else offset + limit
    return PaginatedResult(items=items[offset:end], limit=limit, offset=offset, total=len(items))
