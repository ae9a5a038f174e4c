"""`agl demo`: train an example agent on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def demo(
    tasks: Path | None = typer.Option(None, help='File of tasks, one {"question": ..., "answer": ...} per line'),
    steps: int | None = typer.Option(None, help="Number of training steps"),
    seed: int = typer.Option(0, help="Seed for tasks, model and training"),
    out: Path | None = typer.Option(None, help="Folder of the run; runs/<time> by default"),
    runners: int = typer.Option(2, help="Number of runner processes"),
    plain: bool = typer.Option(False, "--plain", help="Print plain lines, even on a terminal"),
) -> int:
    """Train a small agent to use a calculator, on this machine and within three minutes.

    Exit code 0 only if the agent improves on the held-out tasks. Example: agl demo --seed 3 --out runs/third
    """
    from agentlightning.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        tasks=tasks, seed=seed, out=out, runners=runners, progress="plain" if plain else "auto",
        **({} if steps is None else {"steps": steps}),
    )  # fmt: skip
    return 0 if run_demo(options, sys.stdout).better else 1
