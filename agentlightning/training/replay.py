"""Replays a step of a run from its records: the same rows and the same weights must produce the same new weights.

The replay starts from the nearest checkpoint before the step, or from the initial model of the run. It repeats each
update up to the step with the ledger's rows and compares the result with its record. Nothing is sampled and nothing is
written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.base.terminal import counted
from agentlightning.engine.torch_setup import deterministic_torch
from agentlightning.errors import GoneError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.training.checkpoint import CHECKPOINTS, CheckpointFolder
from agentlightning.training.ledger_records import numbers_of
from agentlightning.training.policies import PolicyUpdater, fingerprint_of_models, load_policies
from agentlightning.training.ppo_settings import PPOSettings
from agentlightning.training.records import RunLog
from agentlightning.training.resume import RUN_FILE, STATE_NAME, read_run_file
from agentlightning.training.settings import GRPOSettings, TrainingSettings
from agentlightning.training.sft_settings import SFTSettings
from agentlightning.training.updater import StepUpdate
from agentlightning.types import RunRecord

_COMPARED: Final = ("loss", "grad_norm")


@dataclass
class Replay:
    """The result of a replay."""

    step: int
    source: str
    """Source of the weights before the step."""
    updates: int = 0
    """Number of updates, including that of the step."""
    tokens: int = 0
    """Number of trained tokens of the step whose log-probabilities were compared."""
    differences: list[str] = field(default_factory=list[str])
    """Descriptions of the differences from the records; empty if everything is equal, bit for bit."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a step, (B,) each, as its update used them."""

    samples: list[Sample]
    advantages: list[float | list[float]]
    trainer_logprobs: list[Sequence[float]]


async def replay(store: LightningStore, run_id: str, step: int, folder: Path | None = None) -> Replay:
    """Replay a step of a run. `folder`: the run's folder, if it was moved.

    Raises:
        NotFoundError: the run or the step does not exist.
        GoneError: a required part was not recorded or no longer exists. The message names it.
    """
    log = RunLog(store, run_id)
    begun, target = await log.latest("state", STATE_NAME), await _step_record(log, step)
    if begun is None or target is None:
        last = await log.latest("step")
        steps = "no steps of a training" if last is None or begun is None else f"steps up to {last.step}"
        raise NotFoundError(f"Run {run_id!r} has no step {step} to replay; it has {steps}")
    for key, trainer in (("trl", "TRL"), ("verl", "VERL"), ("tinker", "Tinker")):
        if key in begun.data["settings"]:
            raise GoneError(f"Run {run_id!r} was trained by {trainer}, whose steps cannot be replayed")
    folder = folder or Path(begun.data["folder"])
    if read_run_file(folder, run_id) is None:
        raise GoneError(
            f"{str(folder)!r} is not the folder of run {run_id!r}: it has no {RUN_FILE} of this run. If the folder was "
            "moved, pass it with agl replay --folder"
        )
    recorded: Mapping[str, Any] = begun.data["settings"]
    kind = SFTSettings if "best_per_task" in recorded else PPOSettings if "vf_coef" in recorded else GRPOSettings
    names = {field.name for field in dataclasses.fields(kind)}
    settings = kind(**{name: value for name, value in recorded.items() if name in names})
    checkpoint = CheckpointFolder(folder / CHECKPOINTS).last_good(before=step)
    if (checkpoint is None or _keeps_the_model(settings)) and (
        fingerprint_of_models(settings) != begun.data["model_files"]
    ):
        raise GoneError(f"model={settings.model!r} does not exist, or its files have changed since the first start")
    first = 1 if checkpoint is None else checkpoint.step + 1
    replayed = Replay(step, str(settings.model if checkpoint is None else checkpoint.path))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if checkpoint is None else checkpoint.facts["state"]["threads"])
    try:
        with deterministic_torch(settings.device if settings.deterministic else "cpu"):
            updater = PolicyUpdater(load_policies(settings, checkpoint), settings)
            for number in range(first, step + 1):
                await _repeat(log, number, updater, replayed)
    finally:
        torch.set_num_threads(threads)
    return replayed


def _keeps_the_model(settings: TrainingSettings) -> bool:
    """Return whether the initial model of the run is needed in addition to a checkpoint."""
    return settings.loss_settings.needs_reference or any(own.lora for own in settings.by_policy().values())


async def _repeat(log: RunLog, number: int, updater: PolicyUpdater, replayed: Replay) -> None:
    record = await _step_record(log, number)
    if record is None:
        raise GoneError(f"Step {number} has no record, but it comes before step {replayed.step}")
    figures: Mapping[str, Any] = record.data["update"]
    if figures.get("rows"):
        by_call = updater.learners[0].settings.rewards.turn_advantage_weight > 0
        ledger = await log.records("ledger", step_from=number, step_to=number)
        rows = _rows_of(number, figures, ledger, by_call=by_call)
        learners = [each.name for each in updater.learners if any(map(each.takes, rows.samples))]
        shares = {name: figures["share" if name is None else f"{name}/share"] for name in learners}
        result = updater.learn(number, rows.samples, rows.advantages, shares)
        replayed.updates += 1
        if number == replayed.step:
            _compare_figures(figures, rows, result, replayed)
    digest = updater.digest()
    if digest != record.data["weights"] and (number == replayed.step or not replayed.differences):
        replayed.differences.append(f"weights after step {number}: {digest} instead of {record.data['weights']}")


def _rows_of(step: int, figures: Mapping[str, Any], records: Sequence[RunRecord], *, by_call: bool) -> _Rows:
    """Return the rows of a step in the order of its batch, with the advantages of calls instead of rollouts if
    `by_call`; raise GoneError if not all were recorded with tokens."""
    rows: dict[int, tuple[Sample, float | list[float], Sequence[float]]] = {}
    for record in records:
        for row in record.data.get("rows", ()):
            numbers = numbers_of(row)
            mask, engine = list(numbers["mask"]), iter(numbers["engine_logprobs"])
            calls = [(place, call) for place, call in enumerate(record.data["calls"]) if call["row"] == row["row"]]
            sample = Sample(
                rollout_id=record.name,
                attempt_id=str(record.data["attempt_id"]),
                token_ids=list(numbers["tokens"]),
                mask=mask,
                logprobs=[next(engine) if trained else 0.0 for trained in mask],
                call_ids=[],
                weight_versions=[call["weight_version"] for _, call in calls],
                policy=row.get("policy"),
                turns=[(place, call["tokens"]) for place, call in calls],
            )
            of_calls = [call["advantage"] for _, call in calls]
            rows[row["row"]] = sample, of_calls if by_call else of_calls[-1], numbers["trainer_logprobs"]
    count = int(figures["rows"])
    if len(rows) < count:
        evicted = sum(bool(record.data.get("evicted")) for record in records)
        why = f"the store evicted those of {counted(evicted, 'rollout')} because it was full" if evicted else (
            "train with record_tokens='all' to record all rows; 'auto' records a sample of the rows of a large model"
        )  # fmt: skip
        raise GoneError(f"Only {len(rows)} of the {count} rows of step {step} are recorded with their tokens: {why}")
    ordered = [rows[number] for number in sorted(rows)]
    return _Rows([row[0] for row in ordered], [row[1] for row in ordered], [row[2] for row in ordered])


def _compare_figures(figures: Mapping[str, Any], rows: _Rows, result: StepUpdate, replayed: Replay) -> None:
    for name in _COMPARED:
        now, then = result.figures[name], figures[name]
        if now != then and not (then is None and not math.isfinite(now)):
            replayed.differences.append(f"{name}: {now!r} instead of {then!r}")
    now = np.concatenate([row["trainer_logprobs"] for row in result.rows])
    then = np.concatenate([np.asarray(row, dtype=np.float32) for row in rows.trainer_logprobs])
    replayed.tokens = len(now)
    if not np.array_equal(now, then):
        differ = int((now != then).sum())
        replayed.differences.append(
            f"log-probabilities of {differ} of {len(now)} tokens, by {float(np.abs(now - then).max()):.3g} at most"
        )


async def _step_record(log: RunLog, step: int) -> RunRecord | None:
    records = await log.records("step", step_from=step, step_to=step)
    return records[0] if records else None
