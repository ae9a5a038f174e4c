"""Logs a run to MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agentlightning.trackers.tracker import RunEnding, TrackedRun, flat, load, numbers_of, require, safe_name, text_of
from agentlightning.types.runs import RunRecord

KEY_TAG = "agl.run_key"
"""Tag that identifies a run: its id, without characters that MLflow's search does not accept."""
_PARAM_CHARACTERS = 500
_TAG_CHARACTERS = 4000
_AT_ONCE = 100
_STATES = {"succeeded": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}


class MLflowTracker:
    """An MLflow run per run, identified by the tag `agl.run_key`. Uses its own client: MLflow's active
    run and default address stay unchanged.

    Args:
        tracking_uri: such as `sqlite:///mlflow.db` or the address of a server; None uses MLflow's default, such as
            `MLFLOW_TRACKING_URI`.
        experiment: name of the experiment; created if it does not exist.
        artifact_location: location for a new experiment; None uses MLflow's default.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "agentlightning",
        *,
        artifact_location: str | None = None,
    ) -> None:
        require("mlflow", "MLflowTracker", "mlflow")
        self.tracking_uri, self.experiment, self.artifact_location = tracking_uri, experiment, artifact_location
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        """Open the MLflow run, or continue the one with the run's id."""
        self._client = client = load("mlflow.tracking").MlflowClient(self.tracking_uri)
        if experiment := client.get_experiment_by_name(self.experiment):
            place = experiment.experiment_id
        else:
            place = client.create_experiment(self.experiment, artifact_location=self.artifact_location)
        key = safe_name(run.run_id)
        if matches := client.search_runs([place], f"tags.`{KEY_TAG}` = '{key}'", max_results=1):
            self._run_id = matches[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {KEY_TAG: key, "agl.run_id": run.run_id, "agl.algorithm": run.algorithm or ""}
            self._run_id = client.create_run(place, run_name=run.run_id, tags=tags).info.run_id
        self._log_params({**flat(run.config), **flat(dict(run.versions), "versions")})
        client.log_dict(self._run_id, {"config": dict(run.config), "versions": dict(run.versions)}, "config.json")

    def record(self, record: RunRecord) -> None:
        """Log numbers as metrics, and alarms, checkpoints and prompts as tags."""
        metric = load("mlflow.entities").Metric
        at = int(1000 * (record.time or time.time()))
        metrics = [metric(name, value, at, record.step) for name, value in numbers_of(record).items()]
        self._log("metrics", metrics)
        text = text_of(record)
        if text is not None:
            self._client.set_tag(self._run_id, f"{record.kind}.{record.name or 'last'}", text[:_TAG_CHARACTERS])

    def finish(self, ending: RunEnding) -> None:
        """Write the outcome of the run as tags, and end the MLflow run."""
        for name, value in ending.summary().items():
            self._client.set_tag(self._run_id, f"agl.{name}", str(value)[:_TAG_CHARACTERS])
        self._client.set_terminated(self._run_id, _STATES.get(ending.state, "KILLED"))
        self._client = None

    def _log_params(self, config: Mapping[str, Any]) -> None:
        """Log the settings. MLflow cannot change a parameter: if a later start changed it, the new value is a tag."""
        param, present = load("mlflow.entities").Param, self._client.get_run(self._run_id).data.params
        values = {name: str(value)[:_PARAM_CHARACTERS] for name, value in config.items()}
        self._log("params", [param(name, value) for name, value in values.items() if name not in present])
        for name, value in values.items():
            if name in present and present[name] != value:
                self._client.set_tag(self._run_id, f"changed.{name}", value)

    def _log(self, kind: str, items: list[Any]) -> None:
        for first in range(0, len(items), _AT_ONCE):
            self._client.log_batch(self._run_id, **{kind: items[first : first + _AT_ONCE]})
