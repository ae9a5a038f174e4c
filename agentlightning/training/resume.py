"""Opens a run: records the settings, model files and tasks that it began with, and resumes it after a restart.

The steps after the checkpoint already have records. They are repeated with their original rollouts, which the run's
store returns for equal requests (`trainer/resume.py`). On a CPU that produces the same weights: if the digest equals
that in the step's record, nothing of the step is written again. If a digest differs, the later steps learned from other
weights: their records are removed, their rollouts are not reused, and their calls are recorded as excluded
(`step_undone`).
"""

from __future__ import annotations

import asyncio
import dataclasses
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
from agentlightning.store.base import FINISHED, LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.store.rules.values import to_json
from agentlightning.training.checkpoint import CHECKPOINTS, Checkpoint, CheckpointFolder
from agentlightning.training.ledger import ExclusionReason
from agentlightning.training.optimizer_settings import depends_on_length
from agentlightning.training.policies import fingerprint_of_models
from agentlightning.training.records import RunLog
from agentlightning.training.rollouts import evidence
from agentlightning.training.run_folder import (
    METRICS,
    RunFolder,
    held_folder,
    new_run_folder,
    read_lines,
    replace_file,
    write_lines,
)
from agentlightning.training.serving import check_resource_names
from agentlightning.training.settings import GRPOSettings, TrainingSettings
from agentlightning.training.tasks import TAKE, OpenGroups
from agentlightning.types import NamedResources, Rollout
from agentlightning.utils.id import generate_id

if TYPE_CHECKING:
    from agentlightning.training.run_inputs import RunSource

logger = logging.getLogger(__name__)

STATE_NAME: Final = "grpo"
"""Name of the record with the inputs of the run."""
RUN_FILE: Final = "run.json"
_MAY_CHANGE: Final = frozenset(
    {
        *("max_steps", "save_steps", "save_total_limit", "eval_steps", "progress", "output_dir", "engine_batch"),
        *("step_timeout_seconds", "rollout_timeout_seconds", "late_rollouts", "max_drift", "resource_name", "alarms"),
        *("record_tokens", "max_tokens_per_forward", "gradient_checkpointing", "model", "solved_above"),
        "activation_offloading",
    }
)
"""Settings that a later start may change, because they do not affect the result of a step. The path of the model may
change, because its files are compared."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    each.name: to_json(each.default)
    for each in dataclasses.fields(GRPOSettings)
    if each.default is not dataclasses.MISSING
}
"""Defaults of the settings, which runs of earlier versions had if their records do not contain a setting."""
_FACTS: Final = frozenset(("run_id", "settings", "model_files", "tasks", "held_out", "folder"))


@dataclass(frozen=True)
class OpenRun:
    """An opened run."""

    facts: Mapping[str, Any]
    """Inputs to compare with those of later starts."""
    resume: Resumption
    folder: RunFolder


async def open_run(
    source: RunSource,
    settings: TrainingSettings,
    tasks: Sequence[object],
    held_out: Sequence[object],
    held: ExitStack,
    **more_settings: object,
) -> OpenRun:
    """Open or resume a run, and return it with its folder, which is locked until `held` is closed.

    Args:
        more_settings: additional inputs to compare with those of later starts, as JSON data by name.

    Raises:
        BadRequestError: the run began with other inputs; its folder does not exist, has files of another run, or is
            used by another process; or a resource of the Trainer has the name of the policy.
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
    settings: TrainingSettings,
    tasks: Sequence[object],
    held_out: Sequence[object],
    others: NamedResources | None = None,
) -> dict[str, Any]:
    """Return the inputs to compare with those of later starts, as JSON data. Reads all files of the model.

    `others`, the resources besides the policy, appear only as digests, without the addresses of models.
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


def _digest(tasks: Sequence[object]) -> list[Any]:
    """Return the number of tasks, and the SHA-256 of their JSON."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps(to_json(task), sort_keys=True).encode() + b"\n")
    return [len(tasks), digest.hexdigest()]


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check that a run resumes with the inputs that it began with.

    Raises:
        BadRequestError: a setting that affects the result of a step, the model's files, the tasks or the Trainer's
            resources differ from the first start. The message names both values.
    """
    run, old, new = now["run_id"], {**_DEFAULTS, **before["settings"]}, now["settings"]
    way_out = "Pass the original value, or another run_id to start a new run"
    changed = [name for name in new if name in old and name not in _MAY_CHANGE and old[name] != new[name]]
    schedules = [{**old, **own} for own in (old.get("policies") or {"": {}}).values()]
    if any(map(depends_on_length, schedules)) and old["max_steps"] != new["max_steps"]:
        changed.append("max_steps")  # the schedule of the learning rate depends on it
    if old["curriculum"] != "none" and old["solved_above"] != new["solved_above"]:
        changed.append("solved_above")  # the solve rates depend on it
    if changed:
        values = "; ".join(f"{name} was {old[name]!r} and is {new[name]!r}" for name in changed)
        raise BadRequestError(f"Cannot resume run {run!r}, because its settings have changed: {values}. {way_out}")
    if before["model_files"] != now["model_files"]:
        raise BadRequestError(
            f"The files of model={new['model']!r} differ from those that run {run!r} began with "
            f"(model={old['model']!r}): their digest was {before['model_files'][:12]} and is "
            f"{now['model_files'][:12]}. {way_out}"
        )
    for name, dataset in (("tasks", "train_dataset"), ("held_out", "val_dataset")):
        if before[name] != now[name]:
            (count, digest), (other, old_digest) = now[name], before[name]
            raise BadRequestError(
                f"{dataset} of run {run!r} has changed: it had {other} items (digest {old_digest[:12]}) and has "
                f"{count} (digest {digest[:12]}). {way_out}"
            )
    had, has = before.get("resources", now["resources"]), now["resources"]  # older runs recorded none
    if changed := sorted(name for name in {*had, *has} if had.get(name) != has.get(name)):
        digests = "; ".join(
            f"{name!r} had the digest {str(had.get(name))[:12]} and has {str(has.get(name))[:12]}" for name in changed
        )
        raise BadRequestError(f"initial_resources of run {run!r} have changed: {digests}. {way_out}")


def write_run_file(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the inputs into the run's folder, for a store that does not support runs."""
    replace_file(folder / RUN_FILE, json.dumps(facts, indent=1) + "\n")


def read_run_file(folder: Path, run_id: str) -> dict[str, Any] | None:
    """Return the inputs of this run from its folder; None if they are missing or belong to another run."""
    try:
        facts = json.loads((folder / RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(facts, dict) and facts.keys() >= _FACTS  # `agl runs export` also writes a file of that name
    return cast("dict[str, Any]", facts) if is_ours and facts["run_id"] == run_id else None


# --- how it goes on --------------------------------------------------------------------------------------------------


async def find_resumption(
    store: LightningStore, log: RunLog, now: Mapping[str, Any], output_dir: str | Path | None, held: ExitStack
) -> Resumption:
    """Return the resumption of a run; it is empty at the first start. The folder of a resumed run is locked until
    `held` is closed.
    """
    run_id: str = now["run_id"]
    if not run_id:  # without an id it is unknown which run to resume
        return Resumption(log=log)
    record = await log.latest("state", STATE_NAME)
    before = record.data if record is not None else None
    if before is None and output_dir is not None:
        before = read_run_file(Path(output_dir), run_id)
    if before is None:
        rollouts = await store.query_rollouts(limit=1)  # possibly of other weights
        return Resumption(log=log, take=generate_id(8) if len(rollouts) else None)
    check_same(before, now)
    folder = Path(output_dir or before["folder"])
    if read_run_file(folder, run_id) is None:
        raise BadRequestError(
            f"The checkpoints of run {run_id!r} are in {before['folder']!r}, but {str(folder)!r} does not have them. "
            "Pass their folder as output_dir=, or start a new run with another run_id"
        )
    held.enter_context(held_folder(folder))
    checkpoints = CheckpointFolder(folder / CHECKPOINTS)
    checkpoints.tidy()
    checkpoint = checkpoints.last_good()
    state: dict[str, Any] = {} if checkpoint is None else dict(checkpoint.facts["state"])
    resumption = Resumption(log=log, folder=folder, checkpoint=checkpoint, state=state, take=state.get(TAKE))
    await resumption.read_steps()
    await resumption.record_missing(before)
    await resumption.read_rollouts(store)
    last = max(resumption.recorded, default=resumption.steps)
    logger.info(
        "Run %s resumes after step %d (%s); later steps repeated with their original rollouts: %d",
        *(run_id, resumption.steps, checkpoint.path if checkpoint else "no checkpoint yet", last - resumption.steps),
    )
    return resumption


@dataclass(kw_only=True)
class Resumption:
    """The state from which the current start of a run resumes. Belongs to the loop."""

    log: RunLog
    folder: Path | None = None
    """Folder of the run; None if this is its first start."""
    checkpoint: Checkpoint | None = None
    """The last good checkpoint; None starts from the model's own weights."""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """State of the loop in the checkpoint."""
    lines: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """Lines of `metrics.jsonl`, by step."""
    take: str | None = None
    """Marker that distinguishes the rollouts of a repeated step from earlier ones; None for the first execution."""
    recorded: dict[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    """Metrics of the recorded steps after the checkpoint that were not undone, by step."""
    _old: list[Rollout] = field(default_factory=list[Rollout])
    """Training rollouts of earlier starts whose calls may be missing from all ledgers."""
    _late: list[tuple[str, set[CallRef]]] = field(default_factory=list[tuple[str, set[CallRef]]])
    """Rollouts that may have late calls, each with the calls that are in a ledger."""

    @property
    def steps(self) -> int:
        """The number of steps in the checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def take_of(self, step: int) -> str | None:
        """Return the marker of the rollouts of a step."""
        return self.recorded[step].get(TAKE) if step in self.recorded else self.take

    async def repeats(self, step: int, digest: str) -> bool:
        """Return whether the completed step already has a record with the same weights, so that it is not recorded
        again. Otherwise remove the records of this step and of later ones."""
        if step not in self.recorded:
            return False
        weights = self.recorded[step].get("weights")
        if weights == digest:
            return True
        undone = [later for later in sorted(self.recorded) if later >= step]
        logger.warning(
            "step %d produced different weights than before (%s, now %s); repeating steps %d to %d",
            *(step, str(weights)[:12], digest[:12], step, undone[-1]),
        )
        for later in undone:
            del self.recorded[later]
        self.take = generate_id(8)
        await self._forget_after(step - 1)
        return False

    async def unaccounted(
        self,
        store: LightningStore,
        present: Collection[str],
        is_to_come: Callable[[Rollout], bool] | None = None,
    ) -> list[tuple[list[ModelCall], ExclusionReason]]:
        """Return the calls of earlier starts that are in no ledger, with the reason for their exclusion. Each call is
        returned only once. Call this in each recorded step.

        `present`: the rollouts of that step. They are skipped, as are those that a later step will use (`is_to_come`).
        """
        waiting = [rollout for rollout in self._old if is_to_come is not None and is_to_come(rollout)]
        later = {rollout.rollout_id for rollout in waiting}
        old = [(each.rollout_id, set[CallRef]()) for each in self._old if each.rollout_id not in later]
        self._old = [rollout for rollout in waiting if rollout.rollout_id not in present]
        late, self._late = self._late, []
        if not old and not late:
            return []
        booked = {
            (record.name, call["attempt_id"], call["call_id"])
            for step in sorted(self.recorded)  # one at a time: records hold token rows
            for record in await self.log.records("ledger", step_from=step, step_to=step)
            for call in record.data["calls"]
        }
        unaccounted: list[tuple[list[ModelCall], ExclusionReason]] = []
        for rollout_id, counted in [*old, *late]:
            rollout = None if rollout_id in present else await store.get_rollout_by_id(rollout_id)
            if rollout is None:
                continue
            if rollout.status not in FINISHED:
                with suppress(ConflictError):  # it ended in this moment
                    rollout = await store.update_rollout(rollout_id, status="cancelled")
            current = await evidence(store, rollout)
            calls = [call for call in model_calls(current.spans) if call.ref not in counted and call.ref not in booked]
            if calls:
                attempt_cancelled = current.latest is not None and current.latest.outcome == "cancelled"
                cancelled = rollout.status == "cancelled" or attempt_cancelled
                unaccounted.append((calls, "cancelled" if cancelled else "step_undone"))
        return unaccounted

    # --- what is read at the start -----------------------------------------------------------------------------------

    async def read_steps(self) -> None:
        """Read the metrics of the steps after the checkpoint, up to the first incomplete one, and remove the records of
        that step and of later ones."""
        assert self.folder is not None
        self.lines = read_lines(self.folder / METRICS)
        steps = {record.step: record.data for record in await self.log.records("step", step_from=self.steps + 1)}
        figures: Mapping[int, Mapping[str, Any]] = steps if self.log.keeps_records else self.lines
        step = self.steps + 1
        while step in figures:
            self.recorded[step] = figures[step]
            self.take = figures[step].get(TAKE) or self.take
            step += 1
        await self._forget_after(step - 1)

    async def record_missing(self, begun: Mapping[str, Any]) -> None:
        """Record the inputs of the run, and the checkpoint if its writer was killed before recording it. Existing
        records do not change."""
        assert self.folder is not None
        await self.log.state(0, {**begun, "folder": str(self.folder.resolve())}, STATE_NAME)
        if self.checkpoint is not None:
            await self.log.checkpoint(self.checkpoint.step, **self.checkpoint.record())

    async def read_rollouts(self, store: LightningStore) -> None:
        """Read the rollouts of earlier starts whose calls may be missing from all ledgers."""
        self._late = [(name, {CallRef(*ref) for ref in refs}) for name, refs in self.state.get("late", [])]
        takes = {self.state.get(TAKE), *(line.get(TAKE) for line in self.recorded.values()), self.take}
        open_groups = None if self.state.get("flight") is None else OpenGroups(self.state["flight"])
        async for page in pages_of(store.query_rollouts, sort_by="start_time", sort_order="desc"):
            rollouts = [(r, r.metadata or {}) for r in page if r.mode == "train"]
            if open_groups is not None:  # groups that were planned before the checkpoint may still be open
                self._old += [r for r, about in rollouts if open_groups.concerns(about, takes)]
                continue
            self._old += [r for r, about in rollouts if about.get("step", 0) > self.steps and about.get(TAKE) in takes]
            if any(0 < about.get("step", 0) <= self.steps for _, about in rollouts):
                break  # what was made before a step of the checkpoint is in the checkpoint, or was undone

    async def _forget_after(self, step: int) -> None:
        await self.log.rewind(step)
        self.lines = {number: line for number, line in self.lines.items() if number <= step}
        if self.folder is not None:
            write_lines(self.folder / METRICS, self.lines.values())
