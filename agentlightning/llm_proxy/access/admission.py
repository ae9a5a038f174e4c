"""Admission of a call of an attempt: the key, the attempt and its sampling parameters, room and budget."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from agentlightning.llm_proxy.access.address import CallAddress
from agentlightning.llm_proxy.access.limits import count_of
from agentlightning.llm_proxy.access.sampling import ModelSampling, sampling_of
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects.json_values import fields_of
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.replies import CallFailed
from agentlightning.semconv import BUDGET_EXHAUSTED
from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, Rollout
from agentlightning.types.attempt_key import KeyVerdict, judge_key
from agentlightning.utils.http.auth import Scope, same_token

_KEY_HEADERS = (b"x-api-key", b"api-key")
LOOKUP_SECONDS: Final = 1.0
"""Seconds for which the store's response is cached. An ended attempt is refused after this time at the latest."""
_ATTEMPTS: Final = 4096
"""Number of attempts with a cached response."""
_VERSIONS: Final = 256
"""Number of versions of resources with cached sampling parameters."""
_ROLLOUTS: Final = 100_000
"""Number of rollouts with counted usage; the least recently active one is dropped first."""
_ENDED_ATTEMPT = ("failed", "succeeded", "timeout")
_ENDED_ROLLOUT = ("failed", "succeeded", "cancelled")


def check_key(scope: Scope, address: CallAddress, token: str | None) -> None:
    """Accept the attempt's key or the server's token. Without a server token, accept any placeholder or no key.

    A client may send several keys, such as a placeholder next to its real key: one valid key is enough.

    Raises:
        CallFailed: 401 if there is no usable key, 403 if the key is forged or belongs to another attempt.
    """
    verdicts: set[KeyVerdict] = set()
    for key in _presented(scope):
        verdicts.add(judge_key(key, address.rollout_id, address.attempt_id, token))
        if token and same_token(key, token):
            return
    if "ok" in verdicts:
        return
    if "other_attempt" in verdicts:
        raise CallFailed(403, "This key belongs to another attempt", code="wrong_attempt_key")
    if "forged" in verdicts:
        raise CallFailed(403, "The signature of this attempt key is invalid", code="invalid_api_key")
    if token:
        text = (
            "The request has no valid API key. Use the api_key of the agent's LLM resource "
            "(ProxyLLM.with_attempted_rollout sets it), or the key that agl serve or agl gateway prints"
        )
        raise CallFailed(401, text, code="invalid_api_key")


def _presented(scope: Scope) -> Iterator[str]:
    """Return every key of a request: a bearer token, and the key headers of Anthropic's and of Azure's API."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.decode(errors="replace").partition(" ")
            if kind.lower() == "bearer":
                yield key.strip()
        elif name in _KEY_HEADERS:
            yield value.decode("latin-1")


class AttemptBook:
    """Caches for one second whether an attempt is active in the store, and the sampling parameters of its models.

    Versions of resources never change, so each is read once. An attempt keeps those of its first call, like its agent.
    Owned by the serving loop.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[float, str | None, ModelSampling | None]] = {}
        self._sampling: OrderedDict[tuple[str, int], ModelSampling] = OrderedDict()
        self._store: LightningStore | None = None

    def recent(self, store: LightningStore, rollout_id: str, attempt_id: str) -> ModelSampling | None:
        """Return the sampling parameters of an attempt that the store recently reported as active; on None, call
        `check`."""
        entry = self._seen.get((rollout_id, attempt_id)) if store is self._store else None
        return entry[2] if entry is not None and entry[1] is None and entry[0] > time.monotonic() else None

    async def check(self, store: LightningStore, rollout_id: str, attempt_id: str) -> ModelSampling:
        """Check that the attempt is active, and return the sampling parameters of its models.

        Raises:
            CallFailed: 404 for an unknown rollout or attempt, 403 with the reason for one that has ended.
        """
        if store is not self._store:
            self._store, self._seen = store, {}
            self._sampling.clear()
        now = time.monotonic()
        believed_until, reason, sampling = self._seen.get((rollout_id, attempt_id), (0.0, None, None))
        if believed_until <= now:
            rollout = await store.get_rollout_by_id(rollout_id)
            if rollout is None:
                raise CallFailed(404, f"Rollout {rollout_id} does not exist", code="unknown_rollout")
            if isinstance(rollout, AttemptedRollout) and rollout.attempt.attempt_id == attempt_id:
                attempt, reason = rollout.attempt, _why_over(rollout, rollout.attempt)
            else:
                attempts = {attempt.attempt_id: attempt for attempt in await store.query_attempts(rollout_id)}
                if attempt_id not in attempts:
                    text = f"Rollout {rollout_id} has no attempt {attempt_id}"
                    raise CallFailed(404, text, code="unknown_attempt")
                attempt = attempts[attempt_id]
                reason = _why_over(rollout, attempt)
                if max(attempts, key=lambda each: attempts[each].sequence_id) != attempt_id:
                    reason = reason or "a later attempt of the rollout has started"
            if sampling is None and reason is None:
                sampling = await self._sampling_of(store, rollout, attempt)
            if len(self._seen) >= _ATTEMPTS:
                self._seen = {key: entry for key, entry in self._seen.items() if entry[0] > now}
            if len(self._seen) < _ATTEMPTS:
                self._seen[rollout_id, attempt_id] = (now + LOOKUP_SECONDS, reason, sampling)
        if reason is not None:
            text = f"Attempt {attempt_id} of rollout {rollout_id} cannot make more model calls: {reason}"
            raise CallFailed(403, text, code="attempt_over")
        return sampling or ()

    async def _sampling_of(self, store: LightningStore, rollout: Rollout, attempt: Attempt) -> ModelSampling:
        """Return the sampling parameters in the resources that the attempt's runner gives to the agent. Attempts
        without a runner, such as those of batch queries, get no resources."""
        if attempt.worker_id is None:
            return ()
        name, version = rollout.resources_id, rollout.resources_version
        key = None if name is None or version is None else (name, version)
        if key in self._sampling:
            self._sampling.move_to_end(key)
            return self._sampling[key]
        if name is None:
            update = await store.get_latest_resources(run_id=rollout.run_id)
        else:
            update = await store.get_resources_by_id(name, version)
        sampling = () if update is None else sampling_of(update.resources)
        if key is not None and store is self._store:
            self._sampling[key] = sampling
            if len(self._sampling) > _VERSIONS:
                self._sampling.popitem(last=False)
        return sampling


def _why_over(rollout: Rollout, attempt: Attempt) -> str | None:
    """Return why the attempt has ended; None if it is active."""
    if attempt.status in _ENDED_ATTEMPT:
        return f"it has ended ({attempt.status})"
    if rollout.status in _ENDED_ROLLOUT:
        return f"its rollout has ended ({rollout.status})"
    return None


class Slots:
    """Counts pending calls, in total and per attempt; calls beyond the limits wait. Owned by the serving loop.

    Attempts share the slots fairly: a free slot is given to the waiting attempt with the fewest pending calls, in turn
    if several have the same number. If too many calls wait, the newest call of the attempt with the most is refused.
    """

    def __init__(self, calls: int, calls_per_attempt: int, waiting_calls: int, seconds: float) -> None:
        self._calls, self._calls_per_attempt = calls, calls_per_attempt
        self._waiting_calls, self._seconds = waiting_calls, seconds
        self._by_attempt: Counter[tuple[str, str]] = Counter()
        self._waiting: dict[tuple[str, str], deque[asyncio.Future[None]]] = {}
        """Calls of an attempt are oldest first; the attempt that has waited longest for its turn is first."""

    @property
    def taken(self) -> int:
        """Number of pending and waiting calls."""
        return self._by_attempt.total() + sum(map(len, self._waiting.values()))

    def taken_outside(self, rollouts: Collection[str]) -> int:
        """Return the number of these calls of rollouts outside `rollouts`; may be called from any thread."""
        waiting = ((attempt, len(rooms)) for attempt, rooms in list(self._waiting.items()))
        counts = [*list(self._by_attempt.items()), *waiting]
        return sum(count for (rollout_id, _), count in counts if rollout_id not in rollouts)

    @asynccontextmanager
    async def take(self, rollout_id: str, attempt_id: str) -> AsyncGenerator[bool]:
        """Wait for a slot and hold it while the block runs; yield whether the call had to wait.

        Raises:
            CallFailed: 429, too many calls wait already, or no slot was free in time.
        """
        attempt = (rollout_id, attempt_id)
        waits = self._by_attempt.total() >= self._calls or self._by_attempt[attempt] >= self._calls_per_attempt
        if waits:
            await self._wait(attempt)
        else:
            self._by_attempt[attempt] += 1
        try:
            yield waits
        finally:
            self._release(attempt)

    async def _wait(self, attempt: tuple[str, str]) -> None:
        self._make_room_to_wait(attempt)
        room = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(attempt, deque()).append(room)
        try:
            async with asyncio.timeout(self._seconds):
                await room
        except BaseException as error:
            self._forget(attempt, room)
            if room.done() and not room.cancelled() and room.exception() is None:  # granted before the wait ended
                self._release(attempt)
            if not isinstance(error, TimeoutError):
                raise
            text = f"Attempt {attempt[1]} got no free slot for another call within {self._seconds} seconds"
            raise CallFailed(429, text, code="too_many_calls", retry_after=1.0) from None

    def _make_room_to_wait(self, attempt: tuple[str, str]) -> None:
        """Reserve a place in the queue for one more waiting call of an attempt.

        Raises:
            CallFailed: 429, too many calls wait, and no other attempt would have more waiting calls.
        """
        if (waiting := sum(map(len, self._waiting.values()))) < self._waiting_calls:
            return
        most = max(self._waiting, key=lambda other: len(self._waiting[other]))
        newest = self._waiting[most][-1]
        if newest.done() or len(self._waiting[most]) < len(self._waiting.get(attempt, ())) + 2:
            text = (
                f"The gateway is at its limits: {self._by_attempt.total()} calls in progress, "
                f"{self._by_attempt[attempt]} of them for attempt {attempt[1]}, and {waiting} waiting. Retry later"
            )
            raise CallFailed(429, text, code="too_many_calls", retry_after=1.0)
        text = (
            f"The gateway is at its limit of {waiting} waiting calls, {len(self._waiting[most])} of them for attempt "
            f"{most[1]}: a call of another attempt replaced this one in the queue. Retry later"
        )
        self._forget(most, newest)
        newest.set_exception(CallFailed(429, text, code="too_many_calls", retry_after=1.0))

    def _forget(self, attempt: tuple[str, str], room: asyncio.Future[None]) -> None:
        rooms = self._waiting.get(attempt, ())
        if room in rooms:
            self._waiting[attempt].remove(room)
        if not rooms:
            self._waiting.pop(attempt, None)

    def _release(self, attempt: tuple[str, str]) -> None:
        self._by_attempt[attempt] -= 1
        if not self._by_attempt[attempt]:
            del self._by_attempt[attempt]
        while self._by_attempt.total() < self._calls:
            may = [each for each in self._waiting if self._by_attempt[each] < self._calls_per_attempt]
            if not may:
                return
            next_one = min(may, key=self._by_attempt.__getitem__)
            rooms = self._waiting.pop(next_one)
            room = rooms.popleft()
            if rooms:
                self._waiting[next_one] = rooms
            if not room.done():  # else its client has disconnected
                self._by_attempt[next_one] += 1
                room.set_result(None)


@dataclass(slots=True)
class Used:
    """Tokens and cost that a rollout has used, all attempts together."""

    tokens: int = 0
    cost: float = 0.0
    """Cost in the currency of the models' configured prices."""


class Budgets:
    """Counts the usage of rollouts. Owned by the serving loop; lost when the gateway's process ends.

    The budget is checked when a call begins, so concurrent calls may exceed it together.
    """

    def __init__(self, tokens: int | None, cost: float | None) -> None:
        self._tokens, self._cost = tokens, cost
        self._used: OrderedDict[str, Used] = OrderedDict()

    def check(self, rollout_id: str) -> None:
        """Check that the rollout may make another call.

        Raises:
            CallFailed: 429, its budget is used up; reports the used amount and the limit.
        """
        used = self._used.get(rollout_id)
        if used is None:
            return
        for unit, amount, bound in (("tokens", used.tokens, self._tokens), ("cost", used.cost, self._cost)):
            if bound is not None and amount >= bound:
                text = (
                    f"The budget of rollout {rollout_id} is used up: {amount:g} of {bound:g} ({unit}). Its further "
                    f"calls are refused ({BUDGET_EXHAUSTED}). To allow more, raise GatewayLimits.{unit}_per_rollout"
                )
                raise CallFailed(429, text, code=BUDGET_EXHAUSTED)

    def add(self, call: GatewayCall, endpoint: ModelEndpoint | None) -> None:
        """Add the usage of a call: from its token ids if present, else from the model server's report."""
        if self._tokens is None and self._cost is None:
            return
        counts = fields_of((call.reply or {}).get("usage"))
        if call.tokens is not None and call.tokens.prompt_token_ids:
            choices = [tokens for tokens in (call.tokens, *call.further_tokens) if tokens is not None]
            prompt = len(call.tokens.prompt_token_ids)
            if (several := len(call.prompts)) > 1:  # each choice has its own ids, if the server returns them
                of_each = max(1, (1 + len(call.further_tokens)) // several)
                ids = sum(len(tokens.prompt_token_ids) for tokens in choices) // of_each
                prompt = max(prompt, ids, count_of(counts.get("prompt_tokens")))
            completion = sum(len(tokens.completion_token_ids) for tokens in choices)
        else:
            prompt, completion = count_of(counts.get("prompt_tokens")), count_of(counts.get("completion_tokens"))
        used = self._used.setdefault(call.rollout_id, Used())
        used.tokens += prompt + completion
        if endpoint is not None:
            used.cost += prompt * endpoint.input_cost + completion * endpoint.output_cost
        self._used.move_to_end(call.rollout_id)
        if len(self._used) > _ROLLOUTS:
            self._used.popitem(last=False)
