"""Writes a run as TensorBoard's event files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from agentlightning.base.private_files import private_folder
from agentlightning.trackers.tracker import RunEnding, TrackedRun, load, numbers_of, require, safe_name, text_of
from agentlightning.types.runs import RunRecord

_PROTO = "tensorboard.compat.proto"


class TensorBoardTracker:
    """A folder of event files per run, below `log_dir`: `tensorboard --logdir runs/tensorboard` shows it. A resumed run
    writes another file into its folder, which replaces later points of the earlier files.

    Raises:
        MissingExtraError: the package is not installed.
    """

    def __init__(self, log_dir: str | Path = "runs/tensorboard") -> None:
        require("tensorboard", "TensorBoardTracker", "tensorboard")
        self.log_dir = str(log_dir)
        self._writer: Any = None
        self._resumes = False
        self._last_step = 0

    def start(self, run: TrackedRun) -> None:
        """Open an event file in the run's folder."""
        folder = Path(self.log_dir) / safe_name(run.run_id)
        private_folder(folder)
        writer = load("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._writer = writer(str(folder), max_queue_size=100, flush_secs=10)
        self._resumes, self._last_step = run.resumed, 0
        about = {"run": run.run_id, "algorithm": run.algorithm, "config": run.config, "versions": run.versions}
        if not run.resumed:
            self._text("config", f"```json\n{json.dumps(about, indent=1)}\n```", 0)

    def record(self, record: RunRecord) -> None:
        """Write numbers as scalars, alarms, checkpoints and prompts as text."""
        if self._resumes and record.kind == "step":  # hides this step and later ones of earlier files
            self._resumes = False
            log = load(f"{_PROTO}.event_pb2").SessionLog
            self._event(record.step, None, session_log=log(status=log.START))
        self._last_step = max(self._last_step, record.step)
        numbers, text = numbers_of(record), text_of(record)
        for name, value in numbers.items():
            self._value(record.step, record.time, tag=name, simple_value=value)
        if text is not None:
            self._text(f"{record.kind}s/{record.name}" if record.name else f"{record.kind}s", text, record.step)
        if record.kind != "step":
            self._writer.flush()

    def finish(self, ending: RunEnding) -> None:
        """Write the outcome of the run, and close the file."""
        text = "\n".join(f"- {name}: {value}" for name, value in ending.summary().items())
        self._text("ending", text, self._last_step)
        self._writer.close()
        self._writer = None

    def _text(self, tag: str, text: str, step: int) -> None:
        plugin = load(f"{_PROTO}.summary_pb2").SummaryMetadata.PluginData(plugin_name="text")
        metadata = load(f"{_PROTO}.summary_pb2").SummaryMetadata(plugin_data=plugin)
        dim = load(f"{_PROTO}.tensor_shape_pb2").TensorShapeProto
        tensor = load(f"{_PROTO}.tensor_pb2").TensorProto(
            dtype="DT_STRING", string_val=[text.encode()], tensor_shape=dim(dim=[dim.Dim(size=1)])
        )
        self._value(step, None, tag=f"{tag}/text_summary", tensor=tensor, metadata=metadata)

    def _value(self, step: int, at: float | None, **value: Any) -> None:
        summary = load(f"{_PROTO}.summary_pb2").Summary
        self._event(step, at, summary=summary(value=[summary.Value(**value)]))

    def _event(self, step: int, at: float | None, **content: Any) -> None:
        event = load(f"{_PROTO}.event_pb2").Event(wall_time=at or time.time(), step=step, **content)
        self._writer.add_event(event)
