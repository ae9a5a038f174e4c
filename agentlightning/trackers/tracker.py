"""The protocol of experiment trackers, and functions that this package's trackers share."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from agentlightning.base.field_help import explain_fields
from agentlightning.errors import MissingExtraError
from agentlightning.types.runs import BestFigure, RunRecord, RunState


@explain_fields
@dataclass(frozen=True)
class TrackedRun:
    """A run that begins or is resumed."""

    run_id: str
    """Id of the run, the same at every start."""
    algorithm: str | None = None
    """Name of the algorithm's class or function."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings, by the component that they configure, as JSON data without secrets."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Versions of Python and of the main packages."""
    resumed: bool = False
    """True if the run was started before: a tracker then continues its earlier output."""


@explain_fields
@dataclass(frozen=True)
class RunEnding:
    """The end of a run."""

    state: RunState
    """`succeeded`, `failed`, `stopped` or `interrupted`."""
    error: str | None = None
    """Class and text of the error that ended it, without secrets; None without an error."""
    best: BestFigure | None = None
    """The best result."""
    model_path: str | None = None
    """Folder of the trained model; None if the algorithm writes none."""

    def summary(self) -> dict[str, str | float | int]:
        """Return the fields that are set, by name."""
        best: dict[str, str | float | int] = {}
        if self.best is not None:
            best = {"best": self.best.value, "best_name": self.best.name, "best_step": self.best.step}
        ending = {"state": self.state, "error": self.error, "model_path": self.model_path}
        return {**{name: value for name, value in ending.items() if value is not None}, **best}


@runtime_checkable
class Tracker(Protocol):
    """Receives one run after another. All calls for a run come from a separate thread. They may be slow or raise
    errors; training continues."""

    def start(self, run: TrackedRun) -> None:
        """Begin a run, or continue one."""

    def record(self, record: RunRecord) -> None:
        """Receive a record of the kinds `step`, `evaluation`, `alarm`, `checkpoint` and `prompt`, without secrets.
        Records of an earlier start are not sent again; a repeated step is."""

    def finish(self, ending: RunEnding) -> None:
        """End the run. Called once for every `start` that returned."""


# --- shared by trackers ----------------------------------------------------------------------------------------------


def require(package: str, feature: str, extra: str) -> None:
    """Check that a package is installed, without importing it.

    Raises:
        MissingExtraError: the package is not installed.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:  # a folder of runs, such as ./wandb, is not a package
        raise MissingExtraError(feature, extra, package)


def load(module: str) -> Any:
    """Return a module of a tracker's package; these packages are at most partially typed."""
    return importlib.import_module(module)


def flat(data: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Return nested data by path, such as `update/loss`."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{parent}/{name}" if parent else str(name)
        leaves |= flat(cast("Mapping[str, Any]", value), path) if isinstance(value, Mapping) else {path: value}
    return leaves


def numbers_of(record: RunRecord) -> dict[str, float]:
    """Return the finite numbers of a record, by their names in trackers.

    For a step: its metrics, such as `mean_reward` and `update/loss`. For an evaluation: `evaluation/NAME` and its other
    numbers. For an alarm: `alarm/NAME`, 1 when it is raised and 0 when it is over.
    """
    if record.kind == "alarm":
        return {f"alarm/{record.name}": 0.0 if record.data.get("state") == "over" else 1.0}
    if record.kind not in ("step", "evaluation"):
        return {}
    numbers = {
        name: float(value)
        for name, value in flat(record.data).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
    if record.kind == "step":
        return {name: value for name, value in numbers.items() if name not in ("step", "steps")}
    path = f"evaluation/{record.name or 'evaluation'}"
    return {path if name == "value" else f"{path}/{name}": value for name, value in numbers.items()}


def text_of(record: RunRecord) -> str | None:
    """Return the text of a record; None if it has none."""
    data = record.data
    if record.kind == "alarm":
        state = f" ({data['state']})" if data.get("state") else ""
        hint = f" To try: {data['what_to_try']}" if data.get("what_to_try") else ""
        return f"step {record.step}: {record.name}{state}: {data.get('text', '')}.{hint}"
    if record.kind == "checkpoint" and data.get("path"):
        return f"step {record.step}: {data['path']}"
    if record.kind == "prompt":
        return f"step {record.step}: {record.name}: {data.get('text') or data.get('template') or data}"
    return None


def safe_name(run_id: str, longest: int = 64) -> str:
    """Return a run's id in a form that services and file systems accept; different ids give different names."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", run_id)[:longest]
    if name == run_id and name:
        return name
    return f"{name[: longest - 9]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}".lstrip("-")
