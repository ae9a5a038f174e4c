"""Every script of `store/rules/` is stored whole or not at all: each is aborted at each of its primitives in turn.

A new script fails the first test until it has a step in `STORY`, or a line in `READING` if it writes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store.rules import claims, deletion, enqueue, events, history, resources, spans, updates, workers
from agentlightning.store.rules.history import History
from agentlightning.store.rules.idempotency import Call, forget_call_tokens
from agentlightning.store.rules.lifecycle import LEASE_EXPIRED
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.tx import Backend, Ids, Tx
from agentlightning.types import EnqueueRolloutRequest, PromptTemplate, RolloutConfig
from tests.chaos.stores import SPECS, fresh_place
from tests.store.conformance.test_history import attempt, rollout
from tests.store.conformance.test_history import resources as past_resources
from tests.store.conformance.test_history import span as past_span
from tests.store.parts import span_of

RESOURCES: Any = {"p": PromptTemplate(template="", engine="jinja")}
REQUESTS = [EnqueueRolloutRequest(input=n, config=RolloutConfig(max_attempts=2)) for n in range(4)]
LONG_AFTER = 1e6
WRITES = frozenset(("save", "delete", "claim", "add_spans", "put", "drop"))
Script = Callable[[Tx], Any]


def ids(prefix: str = "") -> Ids:
    return lambda n: f"{prefix}{n}"


OLD = [attempt("ro-h1"), attempt("ro-h2", 1, status="timeout"), attempt("ro-h2", 2)]
HISTORY = History(
    [rollout("ro-h1"), rollout("ro-h2")], OLD, [past_span(each, each.sequence_id, reward=0.5) for each in OLD]
)


CANCELLED = {"status": "cancelled", "resources_id": "r"}
CALL = Call.of("operation", "token", {})
LONG_CALL = Call.of("operation", "another token", {})
STORY: list[tuple[str, Script]] = [
    ("publish", lambda tx: resources.publish(tx, 0.0, "r", "token", RESOURCES, None)),
    ("publish", lambda tx: resources.publish(tx, 0.5, "r", "another", RESOURCES, None)),
    ("publish", lambda tx: resources.publish(tx, 0.5, "old", None, RESOURCES, "a run without rollouts")),
    ("enqueue", lambda tx: enqueue.enqueue(tx, 1.0, ids(), REQUESTS)),
    ("heartbeat", lambda tx: workers.heartbeat(tx, 1.0, "w", {}, None)),
    ("heartbeat", lambda tx: workers.heartbeat(tx, 1.0, "leaves", {}, None)),
    ("start_rollout", lambda tx: enqueue.start_rollout(tx, 1.5, ids("s"), "at-s", REQUESTS[0], "w")),
    ("claim", lambda tx: claims.claim(tx, 2.0, ids(), "token", None, "w", 2)),
    ("claim", lambda tx: claims.claim(tx, 2.0, ids("c"), "token 2", "no run", "w", 1)),
    ("add_spans", lambda tx: spans.add_spans(tx, 3.0, [span_of(("ro-0", "at-0")), span_of(("ro-1", "at-1"))])),
    ("add_spans", lambda tx: spans.add_spans(tx, 3.0, [span_of(("ro-0", "at-0")), span_of(("ro-0", "at-0"))])),
    ("next_sequence_ids", lambda tx: spans.next_sequence_ids(tx, [("ro-0", "at-0"), ("ro-1", "at-1")])),
    ("queue_now", lambda tx: claims.queue_now(tx, 0.5, ["ro-2"])),
    ("update_rollout", lambda tx: updates.update_rollout(tx, 4.0, "ro-3", CANCELLED, CALL)),
    ("update_attempt", lambda tx: updates.update_attempt(tx, 4.0, "ro-0", "latest", {"status": "succeeded"})),
    ("expire", lambda tx: updates.expire(tx, 5.0, "ro-1", "at-1", "unresponsive", LEASE_EXPIRED, 1.0)),
    ("start_attempt", lambda tx: claims.start_attempt(tx, 6.0, "ro-1", "at-9", "w")),
    ("delete", lambda tx: deletion.delete(tx, 6.0, ["ro-0", "ro-3", "ro-s0"], "force", CALL)),
    ("begin_deletion", lambda tx: deletion.begin_deletion(tx, 6.0, LONG_CALL)),
    ("end_deletion", lambda tx: deletion.end_deletion(tx, LONG_CALL, 3)),
    (
        "import_resources",
        lambda tx: history.import_resources(tx, [past_resources(version=1), past_resources(version=2)]),
    ),
    ("import_history", lambda tx: history.import_history(tx, HISTORY)),
    ("forget_silent_workers", lambda tx: workers.forget_silent_workers(tx, LONG_AFTER, 1.0)),
    ("forget_claim_tokens", lambda tx: claims.forget_claim_tokens(tx, LONG_AFTER)),
    ("forget_call_tokens", lambda tx: forget_call_tokens(tx, LONG_AFTER)),
    ("forget_resources", lambda tx: resources.forget_resources(tx, LONG_AFTER, 1.0)),
]
"""The life of five rollouts, script by script; every step changes something."""

READING: dict[str, Script] = {
    "queued_ahead": lambda tx: claims.queued_ahead(tx, 0.1),
    "events": lambda tx: events.events(tx, "0", 10, None),
    "load_rollouts": lambda tx: events.load_rollouts(tx, ["ro-1", "ro-2", "unknown"]),
    "ended_rollouts": lambda tx: events.ended_rollouts(tx, ["ro-1", "ro-2", "unknown"]),
    "read_spans": lambda tx: spans.read_spans(tx, "ro-1", "latest", None),
    "read_page": lambda tx: spans.read_page(tx, "ro-1", "latest", None, False, 10, 0),
    "lost_claims": lambda tx: workers.lost_claims(tx, LONG_AFTER, 1.0),
    "resources_by_id": lambda tx: resources.resources_by_id(tx, "r", 1),
    "latest_resources": lambda tx: resources.latest_resources(tx, None),
}


class Stop(Exception):
    """Raised by a primitive."""


class FailingTx:
    """A `Tx` whose k-th primitive raises; with no k, those that write."""

    def __init__(self, tx: Tx, k: int | None) -> None:
        self._tx, self._left = tx, k

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._tx, name)
        if not callable(member):
            return member

        def primitive(*args: Any, **kwargs: Any) -> Any:
            if self._left is None:
                assert name not in WRITES, f"a reading script calls {name}"
            else:
                self._left -= 1
                if self._left < 0:
                    raise Stop
            return member(*args, **kwargs)

        return primitive


def contents(backend: Backend) -> Any:
    """Return everything that a script could have changed, and the rollouts that would be claimed next."""

    def read(tx: Tx) -> Any:
        records = sorted(tx.find(Plan())[0], key=lambda record: record.rollout.rollout_id)
        bodies = [list(tx.span_bodies(record.rollout.rollout_id, None)) for record in records]
        kinds: tuple[Any, ...] = ("worker", "resources", "resources_version", "latest_resources", "claim", "token")
        rows = [tx.scan(kind) for kind in kinds]
        due = [record.rollout.rollout_id for record in tx.due(LONG_AFTER, 10)]
        return records, bodies, rows, due, tx.counts(), tx.runs(), tx.held("w", 10), tx.next_available(None)

    def peek(tx: Tx) -> None:
        record = tx.claim(None, LONG_AFTER)
        raise Peeked(record and record.rollout.rollout_id)

    with pytest.raises(Peeked) as next_one:
        backend.execute(peek)
    return repr(backend.execute(read, write=False)[0]), next_one.value.args


class Peeked(Exception):
    """Aborts a claim."""


@pytest.fixture(params=SPECS)
async def backend(request: pytest.FixtureRequest, tmp_path: Path, stack: AsyncExitStack) -> Backend:
    store: Any = await stack.enter_async_context(fresh_place(request.param, request, tmp_path).opened())
    return store._backend


def test_every_script_has_a_step_or_is_known_to_read_only() -> None:
    written = {
        name
        for module in (claims, deletion, enqueue, events, history, resources, spans, updates, workers)
        for name, member in vars(module).items()
        if inspect.isfunction(member)
        and member.__module__ == module.__name__
        and not name.startswith("_")
        and next(iter(inspect.signature(member).parameters), None) == "tx"
    }
    written -= {"set_aside", "surplus"}  # of damaged records only; of ended rollouts only
    written.add("forget_call_tokens")  # the one script of its module
    written -= {"begin_attempt", "existing", "mark_idle", "note_change", "sync_worker", "take_version"}  # parts of some
    assert written == {name for name, _ in STORY} | set(READING)
    assert not {name for name, _ in STORY} & set(READING)


def test_a_script_that_fails_at_any_primitive_leaves_no_trace(backend: Backend) -> None:
    for name, script in STORY:
        before = contents(backend)
        for k in range(200):
            try:
                backend.execute(lambda tx, script=script, k=k: script(FailingTx(tx, k)))  # type: ignore[arg-type, misc]
                break
            except Stop:
                assert contents(backend) == before, f"{name}, primitive {k}"
        assert contents(backend) != before, f"{name} changes nothing"
        assert k > 0, f"{name} was not broken off"


def test_reading_scripts_write_nothing(backend: Backend) -> None:
    for _, script in STORY[:13]:
        backend.execute(script)
    before = contents(backend)
    for script in READING.values():
        assert backend.execute(lambda tx, script=script: script(FailingTx(tx, None)), write=False)[0]  # type: ignore[arg-type, misc]
    assert contents(backend) == before
