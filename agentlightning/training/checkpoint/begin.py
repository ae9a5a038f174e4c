"""What a run is: settings, model files and tasks, written down at its first start and compared at every later one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.errors import BadRequestError
from agentlightning.private_files import open_private
from agentlightning.store.rules.values import to_json
from agentlightning.training.policies.loading import fingerprint_of_models
from agentlightning.training.settings import GRPOSettings
from agentlightning.types import NamedResources

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


def facts_of(
    run_id: str,
    settings: GRPOSettings,
    tasks: Sequence[object],
    held_out: Sequence[object],
    beside: NamedResources | None = None,
) -> dict[str, Any]:
    """Return what later starts are compared with, as JSON data. Reads the whole model.

    Of resources `beside` the policy there are digests only, without where a model is reached.
    """
    resources = {name: each.model_dump(exclude={"endpoint", "api_key"}) for name, each in (beside or {}).items()}
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
    if others := sorted(name for name in {*had, *has} if had.get(name) != has.get(name)):
        told = "; ".join(
            f"{name!r} had the digest {str(had.get(name))[:12]} and has {str(has.get(name))[:12]}" for name in others
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
