"""Records of calls with a token, so that a copy of a call changes nothing, even if it is late.

A copy gets the first result or is refused; it is never executed again. The record of a rollout and the row of a run
name the calls that created and changed them (`made_by` and `calls` of `Record`), up to a limit. Other calls, and calls
with results that were deleted since, are in rows (`ClaimRow`, `TokenRow`). A token belongs to one operation: another
operation with the same token is a separate call. Records are kept for `TOKEN_SECONDS`. Copies that arrive while the
first call is running wait for it (`engine/calls.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar, cast

from pydantic_core import to_jsonable_python

from agentlightning.errors import WIRE_ERRORS, AgentLightningError, ConflictError, NotFoundError, TokenReusedError
from agentlightning.store.rules.tx import Age, Done, Record, RunRow, TokenRow, Tx, WorkerRow, by_wall_clock

R = TypeVar("R")
TOKEN_SECONDS = 600.0
"""Seconds for which a copy of a call is recognised: longer than any client retries a call."""
REMEMBERED = (ConflictError, NotFoundError)
"""Refusals that depend on the state of the store. A copy is refused like the first call, even if the state has changed
since. Other refusals are the same at any time, or the client should retry."""
_JSON = json.JSONEncoder(sort_keys=True, default=to_jsonable_python)
_SHORT = 64
_REFUSED = "!"
_IN_RECORD = 32
"""Number of calls in a record. Above it, the older half of the calls is moved into rows."""
_FORGOTTEN_AT_ONCE = 1000
_BEAT = 16
_BEATS = 60
"""Number of heartbeats in a worker's row. With one every ten seconds, they are kept as long as other calls."""


class Call(NamedTuple):
    """A call with a token."""

    key: str
    """Key, derived from operation and token."""
    asked: str
    """A digest of each argument."""
    token: str

    @classmethod
    def of(cls, operation: str, token: str, arguments: Mapping[str, object]) -> Call:
        """Return the call of an operation with these arguments. None is the same as an omitted argument."""
        digests = (f"{name}={digest(value)}" for name, value in sorted(arguments.items()) if value is not None)
        return cls(_hash(f"{operation}\n{token}".encode(), 24), " ".join(digests), token)

    def check(self, before: str, operation: str) -> None:
        """Check that the token was not used with other arguments before.

        Raises:
            TokenReusedError: it was; the message has the arguments that differ.
        """
        if before != self.asked:
            ours, theirs = (dict(part.split("=") for part in digests.split()) for digests in (self.asked, before))
            raise reused(operation, sorted(name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name)))

    def done(self, now: float, answer: str) -> Done:
        """Return the record of the call with its result."""
        return Done(self.key, self.asked, now, answer)


def reused(operation: str, differing: list[str]) -> TokenReusedError:
    """Return the error of a token that was used for a call with other arguments."""
    names = f" ({', '.join(differing)})" if differing else ""
    return TokenReusedError(
        f"The token (Idempotency-Key) of this {operation} was used before with other arguments{names}. Nothing was "
        "done. A token belongs to one call: repeat that call unchanged, or use a new token for this call."
    )


def refusal_text(error: AgentLightningError) -> str:
    """Return the text that records a refusal."""
    return f"{_REFUSED}{type(error).__name__}: {error}"


def raise_if_refused(answer: str) -> None:
    """Raise the refusal in a recorded result, if it is one."""
    if answer.startswith(_REFUSED):
        name, _, text = answer.removeprefix(_REFUSED).partition(": ")
        raise WIRE_ERRORS[name](text)


def digest(value: object) -> str:
    """Return 8 hexadecimal characters that distinguish a value from others."""
    if value.__class__ is str and len(cast(str, value)) <= _SHORT:
        return _digest_of_text(cast(str, value))
    return _hash(_JSON.encode(value).encode(), 8)


@lru_cache(maxsize=1024)
def _digest_of_text(text: str) -> str:
    """Return the digest of a short text, cached, because statuses and names of workers repeat."""
    return _hash(_JSON.encode(text).encode(), 8)


def _hash(content: bytes, length: int) -> str:
    return hashlib.sha256(content).hexdigest()[:length]


def claim_call(token: str, run_id: str | None, worker_id: str | None, limit: int) -> Call:
    """Return the call of a claim. It does not depend on the timeout."""
    return Call.of("dequeue_many_rollouts", token, {"run_id": run_id, "worker_id": worker_id, "limit": limit})


# --- calls that change one rollout or run --------------------------------------------------------------------------


def recall(tx: Tx, record: Record | RunRow, call: Call | None, operation: str, now: float) -> Done | None:
    """Return the record of a call if this is a copy of it.

    Raises:
        TokenReusedError: the first call had other arguments.
        AgentLightningError: the first call was refused with this error.
    """
    done = None if call is None else _find(tx, record, call, now)
    if call is None or done is None:
        return None
    call.check(done.asked, operation)
    raise_if_refused(done.answer)
    return done


def _find(tx: Tx, record: Record | RunRow, call: Call, now: float) -> Done | None:
    if call.token in record.tokens:
        return call.done(now, "")
    for done in reversed(record.calls):
        if done.key == call.key:
            return done
    if record.calls_moved and now - record.calls_moved <= TOKEN_SECONDS:
        row = cast("TokenRow | None", tx.get("token", call.key))
        return None if row is None else Done(call.key, row.asked, row.time, row.answer)
    return None


def remember(tx: Tx, record: Record | RunRow, call: Call | None, now: float, answer: str = "") -> None:
    """Add a call with its result to a record. The caller saves the record."""
    if call is None:
        return
    calls = [done for done in record.calls if now - done.time <= TOKEN_SECONDS]
    if len(calls) >= _IN_RECORD:
        for done in calls[: _IN_RECORD // 2]:
            tx.put("token", done.key, TokenRow(done.time, done.asked, done.answer))
        calls, record.calls_moved = calls[_IN_RECORD // 2 :], now
    record.calls = (*calls, call.done(now, answer))


def refusable(tx: Tx, now: float, rollout_id: str, call: Call | None, change: Callable[[Tx], R]) -> R | Exception:
    """Run a change of a rollout. A refusal that depends on the rollout's state is recorded and returned, not raised,
    because a script that raises stores nothing."""
    try:
        return change(tx)
    except REMEMBERED as error:
        record = tx.load(rollout_id)
        if call is None or record is None or _find(tx, record, call, now) is not None:
            raise
        remember(tx, record, call, now, refusal_text(error))
        tx.save(record)
        return error


# --- other calls ---------------------------------------------------------------------------------------------------


def recall_row(tx: Tx, call: Call | None, operation: str) -> TokenRow | None:
    """Same as `recall`, for a call that does not change one single rollout."""
    row = None if call is None else cast("TokenRow | None", tx.get("token", call.key))
    if call is not None and row is not None:
        call.check(row.asked, operation)
        raise_if_refused(row.answer)
    return row


def remember_row(tx: Tx, call: Call | None, now: float, answer: str | AgentLightningError) -> None:
    """Record the result or the refusal of a call."""
    if call is not None:
        text = answer if isinstance(answer, str) else refusal_text(answer)
        tx.put("token", call.key, TokenRow(now, call.asked, text))


def is_known_beat(row: WorkerRow, call: Call | None) -> bool:
    """Return True if a heartbeat is a copy of one of the last heartbeats; otherwise record it.

    Raises:
        TokenReusedError: the earlier heartbeat had other arguments.
    """
    if call is None:
        return False
    key, arguments = call.key[: _BEAT // 2], digest(call.asked)
    for start in range(0, len(row.beats), _BEAT):
        beat = row.beats[start : start + _BEAT]
        if beat.startswith(key):
            if not beat.endswith(arguments):
                raise reused("update_worker", [])
            return True
    row.beats = (row.beats + key + arguments)[-_BEATS * _BEAT :]
    return False


def forget_call_tokens(tx: Tx, now: float, age: Age | None = None) -> bool:
    """Delete a page of expired tokens of other calls; return True if there may be more."""
    age = age or by_wall_clock(now)
    rows = tx.scan("token", _FORGOTTEN_AT_ONCE)
    for key, row in rows:
        if age(cast("TokenRow", row).time) <= TOKEN_SECONDS:
            return False
        tx.drop("token", key)
    return len(rows) == _FORGOTTEN_AT_ONCE
