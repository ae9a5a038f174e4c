"""A run opened: the settings, model files and tasks it began with, and how it goes on if it is started again.

After the checkpoint come steps whose figures were recorded already. They are repeated with the rollouts of that time,
which the run's store gives again for equal requests (`trainer/resume.py`). On a CPU that gives the very same weights;
the digest in each step's record proves it, and then nothing of the step is written a second time. Where a digest
differs, the later steps were learned from other weights: their records are removed, their rollouts are not used again,
and their calls are entered as excluded (`step_undone`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from agentlightning.adapter.calls.calls import CallRef, ModelCall, model_calls
from agentlightning.errors import BadRequestError, ConflictError
from agentlightning.private_files import open_private
from agentlightning.store.base import FINISHED, LightningStore
from agentlightning.store.read_operations import pages_of
from agentlightning.store.rules.values import to_json
from agentlightning.training.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder, record_of
from agentlightning.training.ledger import ExclusionReason
from agentlightning.training.policies import fingerprint_of_models
from agentlightning.training.records import RunLog
from agentlightning.training.rollouts import evidence
from agentlightning.training.run_folder import RunFolder, held_folder, new_run_folder, read_lines, write_lines
from agentlightning.training.serving import check_resource_names
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.tasks import TAKE, OpenGroups
from agentlightning.types import NamedResources, Rollout
from agentlightning.utils.id import generate_id

if TYPE_CHECKING:
    from agentlightning.training.run_inputs import RunSource

logger = logging.getLogger(__name__)

STATE_NAME: Final = "grpo"
"""Of the run's record with what it began with."""


RUN_FILE: Final = "run.json"
_MAY_CHANGE: Final = frozenset(
    {
        *("max_steps", "save_steps", "save_total_limit", "eval_steps", "progress", "output_dir", "engine_batch"),
        *("step_timeout_seconds", "rollout_timeout_seconds", "late_rollouts", "max_drift", "resource_name", "alarms"),
        *("record_tokens", "max_tokens_per_forward", "gradient_checkpointing", "model", "solved_above"),
    }
)
"""Settings that a later start may change: they do not say what a step learns. The model may lie elsewhere; its files
are compared."""

_FACTS: Final = frozenset(("run_id", "settings", "model_files", "tasks", "held_out", "folder"))


@dataclass(frozen=True)
class OpenRun:
    """A run that may train."""

    facts: Mapping[str, Any]
    """What later starts are compared with."""
    resume: Resumption
    folder: RunFolder


async def open_run(
    source: RunSource,
    settings: GRPOSettings,
    tasks: Sequence[object],
    held_out: Sequence[object],
    held: ExitStack,
    **more_settings: object,
) -> OpenRun:
    """Return how a run goes on, with its folder, which is kept from other processes until `held` is closed.

    Args:
        more_settings: what else a later start is compared with, as JSON data by name.

    Raises:
        BadRequestError: the run was begun with something else, its folder is not there, has another run's files in
            it, or another process trains in it; or a resource of the Trainer's has the name of the policy.
    """
    resources = source.get_initial_resources() or {}
    check_resource_names({settings.resource_name}, resources)
    store, log = source.get_store(), source.get_run_log()
    run_id = log.run_id or getattr(store, "run_id", None) or ""
    facts = await asyncio.to_thread(facts_of, run_id, settings, tasks, held_out, resources)
    facts["settings"].update(more_settings)
    resume = await find_resumption(store, log, facts, settings.output_dir, held)
    folder = RunFolder(resume.folder or settings.output_dir or new_run_folder())
    if resume.folder is None:
        folder.check_unused()
        held.enter_context(held_folder(folder.path))
        facts["folder"] = str(folder.path.resolve())
        write_run_file(folder.path, facts)
        await log.state(0, facts, STATE_NAME)
    return OpenRun(facts, resume, folder)


def facts_of(
    run_id: str,
    settings: GRPOSettings,
    tasks: Sequence[object],
    held_out: Sequence[object],
    others: NamedResources | None = None,
) -> dict[str, Any]:
    """Return what later starts are compared with, as JSON data. Reads the whole model.

    Of resources `others` than the policy there are digests only, without where a model is reached.
    """
    resources = {name: each.model_dump(exclude={"endpoint", "api_key"}) for name, each in (others or {}).items()}
    return {
        "run_id": run_id,
        "settings": to_json(settings.as_json()),
        "model_files": fingerprint_of_models(settings),
        "tasks": _digest(tasks),
        "held_out": _digest(held_out),
        "resources": {name: _digest([each])[1] for name, each in resources.items()},
    }


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a run goes on as it began.

    Raises:
        BadRequestError: a setting that says what a step learns, the model's files, the tasks or the Trainer's resources
            are not those of the first start; names both values.
    """
    run, then, given = now["run_id"], before["settings"], now["settings"]
    what = f"Run {run!r} was begun with other settings than it is to go on with"
    way_out = "Give it what it had, or another run_id to begin a new run"
    changed = [name for name in given if name in then and name not in _MAY_CHANGE and then[name] != given[name]]
    if then["lr_scheduler_type"] == "linear" and then["max_steps"] != given["max_steps"]:
        changed.append("max_steps")  # it says how fast the learning rate falls
    if changed:
        told = "; ".join(f"{name} was {then[name]!r} and is {given[name]!r}" for name in changed)
        raise BadRequestError(f"{what}: {told}. {way_out}")
    if before["model_files"] != now["model_files"]:
        raise BadRequestError(
            f"The files of model={given['model']!r} are not those with which run {run!r} began "
            f"(model={then['model']!r}): their digest was {before['model_files'][:12]} and is "
            f"{now['model_files'][:12]}. {way_out}"
        )
    for name, dataset in (("tasks", "train_dataset"), ("held_out", "val_dataset")):
        if before[name] != now[name]:
            (count, digest), (other, wanted) = now[name], before[name]
            raise BadRequestError(
                f"{dataset} of run {run!r} was another one: it had {other} items (digest {wanted[:12]}) and has "
                f"{count} (digest {digest[:12]}). {way_out}"
            )
    had, has = before.get("resources", now["resources"]), now["resources"]  # older runs wrote none down
    if changed := sorted(name for name in {*had, *has} if had.get(name) != has.get(name)):
        told = "; ".join(
            f"{name!r} had the digest {str(had.get(name))[:12]} and has {str(has.get(name))[:12]}" for name in changed
        )
        raise BadRequestError(f"initial_resources of run {run!r} were others: {told}. {way_out}")


def write_run_file(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts beside the checkpoints, for a store that keeps no runs."""
    temporary = folder / f"{RUN_FILE}.tmp"
    with open_private(temporary, "w") as file:
        file.write(json.dumps(facts, indent=1) + "\n")
    temporary.replace(folder / RUN_FILE)


def read_run_file(folder: Path, run_id: str) -> dict[str, Any] | None:
    """Return the facts of this run in a folder; None if there are none, or they are another run's."""
    try:
        facts = json.loads((folder / RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(facts, dict) and facts.keys() >= _FACTS  # `agl runs export` writes a file of that name, too
    return cast("dict[str, Any]", facts) if is_ours and facts["run_id"] == run_id else None


def _digest(tasks: Sequence[object]) -> list[Any]:
    """Return how many there are, and the SHA-256 of their JSON."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(json.dumps(to_json(task), sort_keys=True).encode() + b"\n")
    return [len(tasks), found.hexdigest()]


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
        return self.recorded[step].get(TAKE) if step in self.recorded else self.take

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
    found = Resumption(log=log, folder=folder, checkpoint=checkpoint, state=state, take=state.get(TAKE))
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
        found.take = line.get(TAKE) or found.take
    await found._forget_after(step - 1)


async def _old_rollouts(store: LightningStore, found: Resumption) -> list[Rollout]:
    """Return the training rollouts of the steps after the checkpoint that an earlier start has made."""
    takes = {found.state.get(TAKE), *(line.get(TAKE) for line in found.recorded.values()), found.take}
    open_groups = None if found.state.get("flight") is None else OpenGroups(found.state["flight"])
    old: list[Rollout] = []
    async for page in pages_of(store.query_rollouts, sort_by="start_time", sort_order="desc"):
        steps = [(r, r.metadata or {}) for r in page if r.mode == "train"]
        if open_groups is not None:  # it knows of groups that were planned before the checkpoint and are still to come
            old += [r for r, about in steps if open_groups.concerns(about, takes)]
            continue
        old += [r for r, about in steps if about.get("step", 0) > found.steps and about.get(TAKE) in takes]
        if any(0 < about.get("step", 0) <= found.steps for _, about in steps):
            break  # what was made before a step of the checkpoint is in the checkpoint, or was undone
    return old
