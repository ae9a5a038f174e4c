"""A custom runner and a custom hook: each rollout gets a working folder, and a line is printed at its end."""

# pyright: reportIncompatibleMethodOverride=false
# a callback of a hook takes only the parameters that it needs, and may be an ordinary function

from __future__ import annotations

import os
import tempfile
from contextvars import ContextVar
from pathlib import Path

import agentlightning as agl

workspace: ContextVar[Path] = ContextVar("workspace")
"""The folder of the current rollout."""


class WorkspaceRunner(agl.Runner[str]):
    """Makes a folder for each rollout. The framework's runner does everything else."""

    async def execute(self, task: agl.AttemptedRollout) -> object:
        with tempfile.TemporaryDirectory(prefix=f"{task.rollout_id}-") as folder:
            token = workspace.set(Path(folder))
            try:
                return await super().execute(task)
            finally:
                workspace.reset(token)


class Report(agl.Hook):
    """Prints a line at the end of each rollout; each callback names the arguments that it needs."""

    def on_rollout_error(self, *, error: BaseException) -> None:
        print(f"failed: {error}")

    def on_rollout_end(self, *, rollout: agl.AttemptedRollout, spans: list[agl.Span]) -> None:
        folder = workspace.get()
        print(f"{rollout.input:7} reward {agl.find_final_reward(spans)}, in its folder: {os.listdir(folder)}")


@agl.rollout
async def writes_a_file(task: str) -> float:
    if task == "nothing":
        raise ValueError("nothing to write")
    notes = workspace.get() / "notes.txt"
    assert not notes.exists(), "a folder of another rollout"
    notes.write_text(task)
    return float(len(notes.read_text()))


def main() -> None:
    trainer = agl.Trainer(runner=WorkspaceRunner, hooks=[Report()], strategy="shm")
    evaluation = trainer.evaluate(writes_a_file, ["ash", "birch", "nothing", "cedar"])
    print(evaluation.rewards)


if __name__ == "__main__":
    main()
