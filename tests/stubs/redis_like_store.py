"""A store that a user wrote for an earlier form of the contract, over a key-value server: keys, lists and counters.

`KeyValueServer` is that server, on a real socket. `RedisLikeStore` knows one run, no waiting claims, no batches, no
workers, no outcomes, no events and no deletion. It is what `agentlightning/store/wrappers.py` is for.
"""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
import time
from typing import Any, Self

from agentlightning.store.base import UNSET, LightningStore, LightningStoreCapabilities, is_finished
from agentlightning.store.utils import rollout_status_from_attempt
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
)
from agentlightning.utils.id import generate_id


class _Session(socketserver.StreamRequestHandler):
    """One command per line, as a JSON list; one answer per line."""

    def handle(self) -> None:
        for line in self.rfile:
            command, *arguments = json.loads(line)
            with self.server.lock:  # type: ignore[attr-defined]
                answer = getattr(self.server, command)(*arguments)
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class KeyValueServer(socketserver.ThreadingTCPServer):
    """Keys with values, lists and counters, in memory, behind a socket; used as a context manager."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.lock = threading.Lock()
        self.values: dict[str, Any] = {}
        self.url = f"kv://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def push(self, key: str, value: Any) -> int:
        self.values.setdefault(key, []).append(value)
        return len(self.values[key])

    def pop(self, key: str) -> Any:
        return self.values[key].pop(0) if self.values.get(key) else None

    def count(self, key: str) -> int:
        self.values[key] = self.values.get(key, 0) + 1
        return self.values[key]


class RedisLikeStore(LightningStore):
    """Rollouts, attempts and spans as JSON under keys, the queue as a list of ids."""

    def __init__(self, url: str, thread_safe: bool = False) -> None:
        host, _, port = url.removeprefix("kv://").partition(":")
        self._address = host, int(port)
        self._thread_safe = thread_safe
        self.running = self.most_running = 0
        """Calls in hand, now and at most."""

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {"async_safe": True, "thread_safe": self._thread_safe}

    async def _do(self, *command: Any) -> Any:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            reader, writer = await asyncio.open_connection(*self._address, limit=1 << 20)
            try:
                writer.write(json.dumps(command).encode() + b"\n")
                return json.loads(await reader.readline())
            finally:
                writer.close()
                await writer.wait_closed()
        finally:
            self.running -= 1

    # --- rollouts --------------------------------------------------------------------------------------------------

    async def enqueue_rollout(
        self, input: Any, mode: Any = None, resources_id: str | None = None, config: Any = None, metadata: Any = None
    ) -> Rollout:
        latest = await self.get_latest_resources()
        rollout = Rollout(
            rollout_id=f"ro-{generate_id(12)}",
            input=input,
            start_time=time.time(),
            mode=mode,
            resources_id=resources_id or (latest.resources_id if latest else None),
            config=config or RolloutConfig(),
            metadata=metadata or {},
        )
        await self._save(rollout)
        await self._do("push", "rollouts", rollout.rollout_id)
        await self._do("push", "queue", rollout.rollout_id)
        return rollout

    async def start_rollout(
        self,
        input: Any,
        mode: Any = None,
        resources_id: str | None = None,
        config: Any = None,
        metadata: Any = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        rollout = await self.enqueue_rollout(input, mode, resources_id, config, metadata)
        return await self.start_attempt(rollout.rollout_id, worker_id)

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        rollout = await self.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise ValueError(f"Rollout {rollout_id} not found")
        return await self._attempt(rollout, worker_id)

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        while (rollout_id := await self._do("pop", "queue")) is not None:
            rollout = await self.get_rollout_by_id(rollout_id)
            if rollout is not None and rollout.status in ("queuing", "requeuing"):
                return await self._attempt(rollout, worker_id)
        return None

    async def _attempt(self, rollout: Rollout, worker_id: str | None) -> AttemptedRollout:
        attempts = await self._attempts(rollout.rollout_id)
        attempt = Attempt(
            rollout_id=rollout.rollout_id,
            attempt_id=f"at-{generate_id(8)}",
            sequence_id=len(attempts) + 1,
            start_time=time.time(),
            worker_id=worker_id,
        )
        await self._save_attempts([*attempts, attempt])
        rollout = Rollout(**{**dict(rollout), "status": "preparing"})
        await self._save(rollout)
        return AttemptedRollout(**dict(rollout), attempt=attempt)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        data = await self._do("get", f"rollout {rollout_id}")
        return None if data is None else Rollout.model_validate(data)

    async def query_rollouts(
        self, *, status_in: Any = None, limit: int = -1, offset: int = 0
    ) -> PaginatedResult[Rollout]:
        rollouts = [await self.get_rollout_by_id(i) for i in await self._do("get", "rollouts") or []]
        chosen = [r for r in rollouts if r is not None and (status_in is None or r.status in status_in)]
        return _page(chosen, limit, offset)

    async def update_rollout(self, rollout_id: str, status: Any = UNSET, metadata: Any = UNSET) -> Rollout:
        rollout = await self.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise ValueError(f"Rollout {rollout_id} not found")
        if metadata is not UNSET:
            rollout.metadata = metadata
        if status is not UNSET:
            rollout.status = status
            rollout.end_time = time.time() if is_finished(rollout) else None
        await self._save(rollout)
        if status in ("queuing", "requeuing"):
            await self._do("push", "queue", rollout_id)
        return rollout

    async def wait_for_rollouts(self, *, rollout_ids: Any, timeout: float | None = None) -> list[Rollout]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            rollouts = [rollout for i in rollout_ids if (rollout := await self.get_rollout_by_id(i)) is not None]
            done = [rollout for rollout in rollouts if is_finished(rollout)]
            if len(done) == len(rollouts) or (end is not None and time.monotonic() >= end):
                return done
            await asyncio.sleep(0.02)

    async def _save(self, rollout: Rollout) -> None:
        await self._do("set", f"rollout {rollout.rollout_id}", rollout.model_dump(mode="json", exclude={"attempt"}))

    # --- attempts --------------------------------------------------------------------------------------------------

    async def query_attempts(self, rollout_id: str) -> PaginatedResult[Attempt]:
        return _page(await self._attempts(rollout_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        attempts = await self._attempts(rollout_id)
        return attempts[-1] if attempts else None

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: Any = UNSET,
        worker_id: Any = UNSET,
        last_heartbeat_time: Any = UNSET,
        metadata: Any = UNSET,
    ) -> Attempt:
        attempts = await self._attempts(rollout_id)
        [attempt] = [a for a in attempts if a.attempt_id == attempt_id] or attempts[-1:]
        changes = {"status": status, "worker_id": worker_id, "metadata": metadata}
        changes["last_heartbeat_time"] = last_heartbeat_time
        for name, value in changes.items():
            if value is not UNSET:
                setattr(attempt, name, value)
        await self._save_attempts(attempts)
        rollout = await self.get_rollout_by_id(rollout_id)
        if rollout is not None and attempt is attempts[-1] and status is not UNSET:
            await self.update_rollout(rollout_id, status=await rollout_status_from_attempt(attempt, rollout.config))
        return attempt

    async def _attempts(self, rollout_id: str) -> list[Attempt]:
        return [Attempt.model_validate(data) for data in await self._do("get", f"attempts {rollout_id}") or []]

    async def _save_attempts(self, attempts: list[Attempt]) -> None:
        await self._do("set", f"attempts {attempts[0].rollout_id}", [a.model_dump(mode="json") for a in attempts])

    # --- spans and resources ---------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        stored = await self.query_spans(span.rollout_id, span.attempt_id)
        if span.span_id in [other.span_id for other in stored]:
            return None
        await self._do("push", f"spans {span.rollout_id}", span.model_dump(mode="json"))
        return span

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._do("count", f"numbers {rollout_id}")

    async def query_spans(
        self, rollout_id: str, attempt_id: str | None = None, *, name: str | None = None
    ) -> PaginatedResult[Span]:
        spans = [Span.model_validate(data) for data in await self._do("get", f"spans {rollout_id}") or []]
        return _page([s for s in spans if attempt_id in (None, s.attempt_id) and name in (None, s.name)])

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return await self.update_resources(f"rs-{generate_id(12)}", resources)

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        now = time.time()
        update = ResourcesUpdate(
            resources_id=resources_id, create_time=now, update_time=now, version=1, resources=resources
        )
        await self._do("set", f"resources {resources_id}", update.model_dump(mode="json"))
        await self._do("set", "latest resources", resources_id)
        return update

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        data = await self._do("get", f"resources {resources_id}")
        return None if data is None else ResourcesUpdate.model_validate(data)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        latest = await self._do("get", "latest resources")
        return None if latest is None else await self.get_resources_by_id(latest)


def _page(items: list[Any], limit: int = -1, offset: int = 0) -> PaginatedResult[Any]:
    end = None if limit == -1 else offset + limit
    return PaginatedResult(items=items[offset:end], limit=limit, offset=offset, total=len(items))
