"""The records of a training run in its store. `RunLog` writes them, and reads them when the run is restarted.

A record has a kind, a step, a name and JSON data; the methods of `RunLog` describe each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from agentlightning.base.terminal import cut
from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.store.rules.values import to_json
from agentlightning.types.runs import BestFigure, RecordKind, Run, RunRecord
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.masking import masked

T = TypeVar("T")
Work = Callable[[LightningStore], Coroutine[Any, Any, T]]
logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
_LAST_SECONDS = 2.0
"""Timeout in seconds for storing the pending records when an algorithm fails."""
_MOST_PENDING = 10_000
"""Maximum number of records that are neither awaited nor stored."""
_TEXT_CHARACTERS = 4096
"""Maximum length of an alarm's text, in characters; longer texts are truncated."""
_CALL_BYTES = 8 * 1024 * 1024
"""Approximate maximum size of one call to the store, in bytes."""


def clean_run(run: Run) -> Run:
    """Return a copy of a run with secrets hidden."""
    return Run.model_validate(masked(run.model_dump(mode="json")))


def clean_record(record: RunRecord) -> RunRecord:
    """Return a copy of a record with secrets hidden; token rows are numbers and do not change."""
    data = dict(record.data)
    rows = data.pop("rows", None) if record.kind == "ledger" else None
    data = masked(data)
    if rows is not None:
        data["rows"] = rows
    return record.model_copy(update={"data": data})


class PendingWrite(Generic[T]):
    """The result of a call; `await` returns it once the record is stored."""

    def __init__(self, result: asyncio.Future[T] | T) -> None:
        self._result = result
        self.is_awaited = False

    def __await__(self) -> Generator[Any, None, T]:
        self.is_awaited = True
        if isinstance(self._result, asyncio.Future):
            return (yield from self._result)
        return self._result


class RunLog:
    """The records of one run, bound to its store.

    A write may be awaited; it returns when the record is stored. A record that a coroutine does not await is stored
    before the run ends; if that fails, the run fails. Called from a plain thread, each method returns when its record
    is stored. Before a record leaves this process, secrets are hidden and non-finite numbers become null. A record
    that already exists with the same kind, step and name does not change.

    Belongs to the event loop in which it was created; threads and other loops may call it. Without a store, or with a
    store that does not support runs (logged once), it discards the records.
    """

    def __init__(
        self,
        store: LightningStore | None,
        run_id: str | None = None,
        place: str = "",
        *,
        tell: Callable[[Sequence[RunRecord]], None] | None = None,
    ) -> None:
        """Bind the log to a store at `place`, a text for `--store` if there is one. `tell` is called with the records
        that were new to the store, or with all records if no store keeps them. It must not block."""
        self.run_id = run_id or ""
        """`""` is the run without a name."""
        self.place = place
        self._store = store
        self._tell: Callable[[Sequence[RunRecord]], None] = tell or (lambda records: None)
        self._pending: dict[asyncio.Future[Any], PendingWrite[Any]] = {}
        self._failed: BaseException | None = None
        self._loop = _running_loop()

    @property
    def keeps_records(self) -> bool:
        """False if no store keeps the records, so that callers can skip expensive records."""
        return self._store is not None

    # --- write -----------------------------------------------------------------------------------------------------

    def step(self, step: int, figures: Mapping[str, object]) -> PendingWrite[int]:
        """Record the metrics of a training step, such as `{"mean_reward": 0.5, "loss": 0.1}`."""
        return self.add([RunRecord(kind="step", step=step, data=dict(figures))])

    def evaluation(
        self,
        step: int,
        name: str,
        data: Mapping[str, object],
        *,
        value: float | None = None,
        counts_for_best: bool = True,
    ) -> PendingWrite[int]:
        """Record an evaluation after `step`; its `value` becomes the run's best of this name, unless one was better.

        A run has one best result, and a result of another name replaces it, so only one of several evaluations should
        have a `value`. For a comparison task by task, `data` holds `rewards` and `tasks`, see `tasks_of`.
        """
        record = RunRecord(kind="evaluation", step=step, name=name, data={**data, "value": value})
        return self.add([record], value if counts_for_best else None)

    def alarm(self, step: int, name: str, text: str, **data: object) -> PendingWrite[int]:
        """Record a warning.

        A condition that lasts for several steps has two records with the same name and these `data`: `state` (`raised`
        when it begins, `over` when it ends), `since` (the step after which it was raised), `value`, `threshold` and
        `what_to_try`, which is empty in the second. A record without a `state` is a single event.
        """
        data["text"] = cut(text, _TEXT_CHARACTERS)
        return self.add([RunRecord(kind="alarm", step=step, name=name, data=data)])

    def checkpoint(self, step: int, name: str = "", **data: object) -> PendingWrite[int]:
        """Record the path of weights and optimizer."""
        return self.add([RunRecord(kind="checkpoint", step=step, name=name, data=data)])

    def prompt(self, step: int, name: str, data: Mapping[str, object]) -> PendingWrite[int]:
        """Record a version of a prompt."""
        return self.add([RunRecord(kind="prompt", step=step, name=name, data=dict(data))])

    def state(self, step: int, data: Mapping[str, object], name: str = "") -> PendingWrite[int]:
        """Record the state that the algorithm needs to resume after `step`; `latest("state")` returns it."""
        return self.add([RunRecord(kind="state", step=step, name=name, data=dict(data))])

    def ledger(self, step: int, entries: Sequence[Mapping[str, Any]]) -> PendingWrite[int]:
        """Record the outcomes of the model calls of rollouts, one entry per rollout: see `ledger_records.py`."""
        return self.add([RunRecord(kind="ledger", step=step, name=e["rollout_id"], data=dict(e)) for e in entries])

    def add(self, records: Sequence[RunRecord], best: float | None = None) -> PendingWrite[int]:
        """Store records, in one call if their size allows it. Return the number of new ones.

        Raises:
            TypeError: a value in a record is not JSON. The message names its path.
            BadRequestError: a record is too large.
        """
        clean = [clean_record(record.model_copy(update={"data": to_json(record.data, "data")})) for record in records]

        async def add(store: LightningStore) -> int:
            new = 0
            for batch in _batches(clean):
                try:
                    added = await store.add_run_records(self.run_id, batch)
                except NotImplementedError:
                    self._tell(clean)
                    raise
                new += added
                if added:
                    self._tell(batch)
            if best is not None:
                figure = BestFigure(name=clean[-1].name, value=best, step=clean[-1].step)
                await store.update_run(self.run_id, best=figure)
            return new

        if self._store is None:
            self._tell(clean)
        return self._write(add, 0)

    def best(self, name: str, value: float, step: int) -> PendingWrite[None]:
        """Record a result as the best of the run, unless an earlier one with the same name was better."""
        figure = BestFigure(name=name, value=value, step=step)

        async def update(store: LightningStore) -> None:
            await store.update_run(self.run_id, best=figure)

        return self._write(update, None)

    def vocabulary(self, name: str, tokens: Sequence[str]) -> PendingWrite[bool]:
        """Store the text of each token id under the id of its table, once for all runs."""
        return self._write(lambda store: store.add_vocabulary(name, tokens), False)

    def rewind(self, step: int) -> PendingWrite[int]:
        """Remove the records of later steps, which a resumed run repeats. Return their number."""
        return self._write(lambda store: store.rewind_run(self.run_id, step), 0)

    async def flush(self) -> None:
        """Wait until all records are stored.

        Raises:
            Exception: a record that was not awaited could not be stored.
        """
        while self._pending:
            await asyncio.wait(self._pending)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    # --- read ------------------------------------------------------------------------------------------------------

    async def run(self) -> Run | None:
        """Return the run from the store; None if the store does not support runs."""
        return await self._ask(lambda store: store.get_run_by_id(self.run_id), None)

    async def latest(self, kind: RecordKind, name: str | None = None) -> RunRecord | None:
        """Return the record of the latest step, to resume from it; None if it does not exist."""
        query: dict[str, Any] = {"kind_in": [kind], "sort_order": "desc", "limit": 1, "name": name}
        page = await self._ask(lambda store: store.query_run_records(self.run_id, **query), [])
        return page[0] if page else None

    async def records(
        self, *kinds: RecordKind, step_from: int | None = None, step_to: int | None = None
    ) -> list[RunRecord]:
        """Return the records of these kinds (default: all), in the order of their steps. Limits are inclusive."""
        query: dict[str, Any] = {"kind_in": list(kinds) or None, "step_from": step_from, "step_to": step_to}
        return list(await self._ask(lambda store: store.query_run_records(self.run_id, **query), []))

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncGenerator[None]:
        """Send a heartbeat every ten seconds during the body, and at its end wait for the pending records. If the body
        raises an error, wait at most two seconds and raise the error."""

        async def beat() -> None:
            while self._store is not None:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                try:
                    await self._ask(lambda store: store.update_run(self.run_id, heartbeat=True), None)
                except Exception as error:  # the store is unreachable, which other calls notice and handle
                    logger.debug("Run %s could not send its heartbeat: %s", self.run_id, error)

        beating = asyncio.create_task(beat(), name="run-heartbeat")
        try:
            try:
                yield
            except BaseException:  # the records of the body are stored first in any case
                with contextlib.suppress(Exception):  # the body's own error is raised
                    await within(_LAST_SECONDS, self.flush())
                raise
            await self.flush()
        finally:
            beating.cancel()
            await asyncio.wait([beating])

    # --- how calls reach the store -----------------------------------------------------------------------------------

    def _write(self, work: Work[T], nothing: T) -> PendingWrite[T]:
        """Run the work on the store, after earlier writes; from a plain thread, wait for it."""

        async def in_order() -> T:
            return await self._queued(work, nothing)

        here = _running_loop()
        self._loop = self._loop or here
        if self._loop is None:
            return PendingWrite(asyncio.run(in_order()))
        if here is self._loop:
            return self._queued(work, nothing)
        future = asyncio.run_coroutine_threadsafe(in_order(), self._loop)
        return PendingWrite(future.result() if here is None else asyncio.wrap_future(future))

    def _queued(self, work: Work[T], nothing: T) -> PendingWrite[T]:
        if len(self._pending) >= _MOST_PENDING:
            raise BadRequestError(f"{_MOST_PENDING} records of {self._named} are waiting to be stored. Await each call")
        before = next(reversed(self._pending), None)

        async def after() -> T:
            if before is not None:
                await asyncio.wait([before])
            return await self._ask(work, nothing)

        task = asyncio.get_running_loop().create_task(after())
        write = self._pending[task] = PendingWrite(task)
        task.add_done_callback(self._note_end)
        return write

    def _note_end(self, task: asyncio.Future[Any]) -> None:
        write = self._pending.pop(task)
        if not write.is_awaited and not task.cancelled() and self._failed is None:
            self._failed = task.exception()

    async def _ask(self, work: Work[T], nothing: T) -> T:
        """Run the work in the loop of the store; return `nothing` if no store keeps runs."""
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(work, nothing), self._loop))
        if self._store is None:
            return nothing
        try:
            return await work(self._store)
        except NotImplementedError:
            logger.info("%s does not store runs; records of %s are discarded", type(self._store).__name__, self._named)
            self._store = None
            return nothing

    @property
    def _named(self) -> str:
        return f"run {self.run_id}" if self.run_id else "the run without a name"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop()
    return None


def _batches(records: Sequence[RunRecord]) -> Generator[list[RunRecord]]:
    """Yield the records in order, in batches that the store accepts in one call."""
    batch, size = list[RunRecord](), 0
    for record in records:
        own = len(json.dumps(record.data))
        if batch and size + own > _CALL_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += own
    if batch:
        yield batch
