"""A run that is started again: from which checkpoint, which steps are repeated, and which calls are still unaccounted.

After the checkpoint come steps whose figures were recorded already. They are repeated with the rollouts of that time,
which the run's store gives again for equal requests (`trainer/resume.py`). On a CPU that gives the very same weights;
the digest in each step's record proves it, and then nothing of the step is written a second time. Where a digest
differs, the later steps were learned from other weights: their records are removed, their rollouts are not used again,
and their calls are entered as excluded (`step_undone`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.adapter.calls.calls import CallRef, ModelCall, model_calls
from agentlightning.errors import BadRequestError, ConflictError
from agentlightning.store.base import FINISHED, LightningStore
from agentlightning.store.read_operations import pages_of
from agentlightning.training.checkpoint.begin import check_same, read_run_file
from agentlightning.training.checkpoint.folder import Checkpoint, CheckpointFolder
from agentlightning.training.checkpoint.keeper import record_of
from agentlightning.training.flight.plan import Standing
from agentlightning.training.ledger import ExclusionReason
from agentlightning.training.records import RunLog
from agentlightning.training.rollouts import evidence
from agentlightning.training.run_folder import held_folder, read_lines, write_lines
from agentlightning.types import Rollout
from agentlightning.utils.id import generate_id

logger = logging.getLogger(__name__)

STATE_NAME: Final = "grpo"
"""Of the run's record with what it began with."""
CHECKPOINTS: Final = "checkpoints"
_OPEN: Final = "take"


@dataclass(kw_only=True)
class Resumption:
    """How the present start of a run goes on from earlier ones. Belongs to the loop."""

    log: RunLog
    folder: Path | None = None
    """Of the run; None if this is its first start."""
    checkpoint: Checkpoint | None = None
    """Where to go on; None begins with the model's own weights."""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the loop, as the checkpoint holds it."""
    lines: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """Of `metrics.jsonl`, by step."""
    take: str | None = None
    """Tells the rollouts of a step that is taken anew from those of earlier times; None for the first time."""
    recorded: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    """Figures of the steps after the checkpoint that were recorded and not undone, by step."""
    _old: list[Rollout] = field(default_factory=list[Rollout])
    _watched: list[tuple[str, set[CallRef]]] = field(default_factory=list[tuple[str, set[CallRef]]])

    @property
    def steps(self) -> int:
        """How many steps are in the checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def take_of(self, step: int) -> str | None:
        """Return the mark of the rollouts of a step."""
        return self.recorded[step].get(_OPEN) if step in self.recorded else self.take

    async def repeats(self, step: int, digest: str) -> bool:
        """Return whether a step that was just taken was recorded before with the same weights, so that nothing of it is
        to be recorded again. What does not fit, the records of this step and of later ones, is removed."""
        if step not in self.recorded:
            return False
        if self.recorded[step].get("weights") == digest:
            return True
        undone = sorted(self.recorded)[sorted(self.recorded).index(step) :]
        logger.warning(
            "step %d gave other weights than when it was first taken (%s, then %s): steps %d to %d are taken anew",
            *(step, digest[:12], str(self.recorded[step].get("weights"))[:12], step, undone[-1]),
        )
        for later in undone:
            del self.recorded[later]
        self.take = generate_id(8)
        await self._forget_after(step - 1)
        return False

    async def _forget_after(self, step: int) -> None:
        await self.log.rewind(step)
        self.lines = {number: line for number, line in self.lines.items() if number <= step}
        if self.folder is not None:
            write_lines(self.folder / "metrics.jsonl", self.lines.values())

    async def unaccounted(
        self,
        store: LightningStore,
        present: Collection[str],
        is_to_come: Callable[[Rollout], bool] | None = None,
    ) -> list[tuple[list[ModelCall], ExclusionReason]]:
        """Return the calls that earlier starts have left out of every ledger, each with the reason of its exclusion.

        To be asked in each step that is recorded; what was told once is not told again. `present` are the rollouts of
        that step, which account for themselves; so will those that a later step asks for (`is_to_come`).
        """
        waiting = [rollout for rollout in self._old if is_to_come is not None and is_to_come(rollout)]
        later = {rollout.rollout_id for rollout in waiting}
        old = [rollout for rollout in self._old if rollout.rollout_id not in later]
        self._old = [rollout for rollout in waiting if rollout.rollout_id not in present]
        watched, self._watched = self._watched, []
        if not old and not watched:
            return []
        booked = {
            (record.name, call["attempt_id"], call["call_id"])
            for step in sorted(self.recorded)  # one at a time: records hold token rows
            for record in await self.log.records("ledger", step_from=step, step_to=step)
            for call in record.data["calls"]
        }
        found: list[tuple[list[ModelCall], ExclusionReason]] = []
        for rollout_id, counted in [*((rollout.rollout_id, set[CallRef]()) for rollout in old), *watched]:
            rollout = None if rollout_id in present else await store.get_rollout_by_id(rollout_id)
            if rollout is None:
                continue
            if rollout.status not in FINISHED:
                with suppress(ConflictError):  # it ended in this moment
                    rollout = await store.update_rollout(rollout_id, status="cancelled")
            seen = await evidence(store, rollout)
            calls = [call for call in model_calls(seen.spans) if call.ref not in counted and call.ref not in booked]
            if calls:
                stopped = rollout.status == "cancelled" or (
                    seen.latest is not None and seen.latest.outcome == "cancelled"
                )
                found.append((calls, "cancelled" if stopped else "step_undone"))
        return found


async def find_resumption(
    store: LightningStore, log: RunLog, now: Mapping[str, Any], output_dir: str | Path | None, held: ExitStack
) -> Resumption:
    """Return how a run goes on; one without an earlier start begins. The folder of one that goes on is kept from other
    processes until `held` is closed.

    Raises:
        BadRequestError: it was begun with something else (see `check_same`), its folder is not there, or another
            process trains in it.
    """
    run_id: str = now["run_id"]
    if not run_id:  # nobody can say which one goes on
        return Resumption(log=log)
    record = await log.latest("state", STATE_NAME)
    before = record.data if record is not None else None
    if before is None and output_dir is not None:
        before = read_run_file(Path(output_dir), run_id)
    if before is None:
        known = await store.query_rollouts(limit=1)  # of other weights, for all that can be told
        return Resumption(log=log, take=generate_id(8) if len(known) else None)
    check_same(before, now)
    folder = Path(output_dir or before["folder"])
    if read_run_file(folder, run_id) is None:
        raise BadRequestError(
            f"Run {run_id!r} keeps its checkpoints in {before['folder']!r}, and {str(folder)!r} does not hold them. "
            "Say where they are with output_dir=, or begin a new run with another run_id"
        )
    held.enter_context(held_folder(folder))
    checkpoints = CheckpointFolder(folder / CHECKPOINTS)
    checkpoints.tidy()
    checkpoint = checkpoints.last_good()
    state: dict[str, Any] = {} if checkpoint is None else dict(checkpoint.facts["state"])
    found = Resumption(log=log, folder=folder, checkpoint=checkpoint, state=state, take=state.get(_OPEN))
    await _read_steps(found)
    await _record_missing(found, before)
    found._watched = [(rollout_id, {CallRef(*ref) for ref in counted}) for rollout_id, counted in state.get("late", [])]
    found._old = await _old_rollouts(store, found)
    last = max(found.recorded, default=found.steps)
    logger.info(
        "Run %s goes on after step %d (%s); %d later steps are repeated with the rollouts that they had",
        *(run_id, found.steps, checkpoint.path if checkpoint else "no checkpoint yet", last - found.steps),
    )
    return found


async def _record_missing(found: Resumption, begun: Mapping[str, Any]) -> None:
    """Record what the run began with, in a store that does not know it yet, and the checkpoint, whose writer may have
    been killed before it was recorded. What is there already stays as it was."""
    assert found.folder is not None
    await found.log.state(0, {**begun, "folder": str(found.folder.resolve())}, STATE_NAME)
    if found.checkpoint is not None:
        await found.log.checkpoint(found.checkpoint.step, **record_of(found.checkpoint))


async def _read_steps(found: Resumption) -> None:
    """Read the figures of the steps after the checkpoint, up to the first that is not recorded whole, and remove what
    is there of that one and of later ones."""
    assert found.folder is not None
    path = found.folder / "metrics.jsonl"
    found.lines = read_lines(path)
    steps = {record.step: record.data for record in await found.log.records("step", step_from=found.steps + 1)}
    known: Mapping[int, Mapping[str, Any]] = steps if found.log.keeps_records else found.lines
    step = found.steps + 1
    while step in known:
        found.recorded[step] = known[step]
        step += 1
    for line in found.recorded.values():
        found.take = line.get(_OPEN) or found.take
    await found._forget_after(step - 1)


async def _old_rollouts(store: LightningStore, found: Resumption) -> list[Rollout]:
    """Return the training rollouts of the steps after the checkpoint that an earlier start has made."""
    takes = {found.state.get(_OPEN), *(line.get(_OPEN) for line in found.recorded.values()), found.take}
    standing = None if found.state.get("flight") is None else Standing(found.state["flight"])
    old: list[Rollout] = []
    async for page in pages_of(store.query_rollouts, sort_by="start_time", sort_order="desc"):
        steps = [(r, r.metadata or {}) for r in page if r.mode == "train"]
        if standing is not None:  # it knows of groups that were planned before the checkpoint and are still to come
            old += [r for r, about in steps if standing.concerns(about, takes)]
            continue
        old += [r for r, about in steps if about.get("step", 0) > found.steps and about.get(_OPEN) in takes]
        if any(0 < about.get("step", 0) <= found.steps for _, about in steps):
            break  # what was made before a step of the checkpoint is in the checkpoint, or was undone
    return old


def metadata_of(step: int, task: int, sample: int, take: str | None) -> dict[str, object]:
    """Return what a training rollout says of its place in the run; what an earlier start has made is found by it."""
    return {"step": step, "task": task, "sample": sample, **({} if take is None else {_OPEN: take})}


def place_of(rollout: Rollout) -> str | None:
    """Return the place of a rollout in the run, for its seed; None if the loop did not make it."""
    about = rollout.metadata or {}
    if not isinstance(about.get("step"), int) or not isinstance(about.get("task"), int):
        return None
    parts = (rollout.mode, about.get("sampling"), about["step"], about["task"], about.get("sample"))
    return " ".join(map(str, parts))


def figures_by_step(lines: Mapping[int, Mapping[str, Any]], last: int) -> Sequence[Mapping[str, Any]]:
    """Return the lines up to a step, in their order."""
    return [lines[step] for step in sorted(lines) if step <= last]
