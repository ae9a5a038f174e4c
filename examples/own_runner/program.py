"""A runner and a hook of one's own: each rollout gets a folder to work in, and the slow ones are named at the end."""

# pyright: reportIncompatibleMethodOverride=false
# a callback of a hook takes the parameters that it needs, and need not be a coroutine

from __future__ import annotations

import os
import tempfile
from contextvars import ContextVar
from pathlib import Path

import agentlightning as agl

workspace: ContextVar[Path] = ContextVar("workspace")
"""The folder of the rollout that runs here."""


class WorkspaceRunner(agl.Runner[str]):
    """Makes a folder around each rollout. All that it does not override, the framework's runner does."""

    async def execute(self, task: agl.AttemptedRollout) -> object:
        with tempfile.TemporaryDirectory(prefix=f"{task.rollout_id}-") as folder:
            token = workspace.set(Path(folder))
            try:
                return await super().execute(task)
            finally:
                workspace.reset(token)


class Report(agl.Hook):
    """Prints a line at the end of each rollout; each callback names what it needs."""

    def on_rollout_error(self, *, error: BaseException) -> None:
        print(f"it failed: {error}")

    def on_rollout_end(self, *, rollout: agl.AttemptedRollout, spans: list[agl.Span]) -> None:
        left = workspace.get()
        print(f"{rollout.input:7} reward {agl.find_final_reward(spans)}, in its folder: {os.listdir(left)}")


@agl.rollout
async def writes_a_file(task: str) -> float:
    if task == "nothing":
        raise ValueError("there is nothing to write")
    notes = workspace.get() / "notes.txt"
    assert not notes.exists(), "a folder of another rollout"
    notes.write_text(task)
    return float(len(notes.read_text()))


def main() -> None:
    trainer = agl.Trainer(runner=WorkspaceRunner, hooks=[Report()], strategy="shm")
    found = trainer.evaluate(writes_a_file, ["ash", "birch", "nothing", "cedar"])
    print(found.rewards)


if __name__ == "__main__":
    main()
