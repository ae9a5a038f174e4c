"""Logs a run to SwanLab."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from agentlightning.trackers.tracker import RunEnding, TrackedRun, load, numbers_of, require, safe_name, text_of
from agentlightning.types.runs import RunRecord


class SwanLabTracker:
    """A SwanLab experiment per run, with the run's id. Online, a resumed run continues it; offline, each start
    writes a folder with that id. Host name, command line and git state are not recorded.

    Args:
        project: name of the SwanLab project.
        workspace: user or organization; None uses the account's own.
        mode: `online`, `local`, `offline` (files below `folder`) or `disabled`.
        folder: output folder of SwanLab.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(
        self,
        project: str = "agentlightning",
        *,
        workspace: str | None = None,
        mode: Literal["online", "local", "offline", "disabled"] = "online",
        folder: str | Path = "runs/swanlab",
    ) -> None:
        require("swanlab", "SwanLabTracker", "swanlab")
        self.project, self.workspace, self.mode, self.folder = project, workspace, mode, str(folder)
        self._run: Any = None
        self._last_step = 0

    def start(self, run: TrackedRun) -> None:
        """Open the experiment, or continue it."""
        swanlab = load("swanlab")
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._last_step = 0
        self._run = swanlab.init(
            project=self.project,
            workspace=self.workspace,
            mode=self.mode,
            log_dir=self.folder,
            name=run.run_id,
            id=safe_name(run.run_id),
            resume="allow",
            config={**run.config, "versions": dict(run.versions), "algorithm_name": run.algorithm},
            settings=swanlab.Settings(interactive=False, probe={"runtime": False, "git": False}),
        )

    def record(self, record: RunRecord) -> None:
        """Log numbers at their step, and alarms, checkpoints and prompts as text."""
        self._last_step = max(self._last_step, record.step)
        numbers, text = numbers_of(record), text_of(record)
        if numbers:
            self._run.log(numbers, step=record.step)
        if text is not None:
            self._run.log_text(key=f"{record.kind}s/{record.name or 'last'}", data=text, step=record.step)

    def finish(self, ending: RunEnding) -> None:
        """Write the outcome of the run, and close the experiment."""
        run, self._run = self._run, None
        text = "\n".join(f"{name}: {value}" for name, value in ending.summary().items())
        run.log_text(key="ending", data=text, step=self._last_step)
        state = {"succeeded": "success", "stopped": "success", "failed": "crashed"}.get(ending.state, "aborted")
        run.finish(state=state, error=ending.error if state == "crashed" else None)
