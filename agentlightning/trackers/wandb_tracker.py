"""Logs a run to Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from agentlightning.trackers.tracker import RunEnding, TrackedRun, load, numbers_of, require, safe_name, text_of
from agentlightning.types.runs import RunRecord


class WandbTracker:
    """A W&B run per run, with the run's id: a resumed run continues it, and `wandb sync` joins files that were written
    offline. Terminal output, source code and git state are not uploaded unless `settings` enables it.

    Args:
        project: name of the W&B project.
        entity: user or team; None uses the account's own.
        mode: `online`, `offline` (files below `folder`) or `disabled`; None uses W&B's default, or `WANDB_MODE`.
        folder: output folder of W&B; None is the working directory.
        settings: settings of `wandb.Settings`, such as `{"console": "auto"}`.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(
        self,
        project: str = "agentlightning",
        *,
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | Path | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        require("wandb", "WandbTracker", "wandb")
        self.project, self.entity, self.mode = project, entity, mode
        self.folder = None if folder is None else str(folder)
        defaults = {"console": "off", "disable_code": True, "disable_git": True, "silent": True, "login_timeout": 5}
        self.settings = {**defaults, **(settings or {})}
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open the W&B run, or continue it."""
        wandb = load("wandb")
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=self.folder,
            id=safe_name(run.run_id),
            name=run.run_id,
            resume="allow",
            reinit="create_new",  # the program's own W&B run stays unchanged
            config={**run.config, "versions": dict(run.versions), "algorithm_name": run.algorithm},
            allow_val_change=True,
            settings=wandb.Settings(**self.settings),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, record: RunRecord) -> None:
        """Log numbers against the run's steps; a raised alarm also sends a W&B alert."""
        numbers, text = numbers_of(record), text_of(record)
        if numbers:
            self._run.log({**numbers, "step": record.step})
        if text is not None:
            self._run.summary[f"{record.kind}s/{record.name or 'last'}"] = text
        if record.kind == "alarm" and text is not None and record.data.get("state") != "over":
            self._run.alert(title=f"{record.name} (step {record.step})", text=text)

    def finish(self, ending: RunEnding) -> None:
        """Write the outcome of the run into the summary, and wait until W&B has received everything."""
        run, self._run = self._run, None
        for name, value in ending.summary().items():
            run.summary[f"ending/{name}"] = value
        run.finish(exit_code=0 if ending.state in ("succeeded", "stopped") else 1)
