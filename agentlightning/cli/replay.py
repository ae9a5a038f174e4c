"""`agl replay`: a step of a run taken again from its records, and compared."""

from __future__ import annotations

from pathlib import Path

import typer

from agentlightning.cli.support.output import say
from agentlightning.cli.support.store_access import STORE, with_store


def replay(
    run: str = typer.Argument(metavar="RUN", help="Id of the run."),
    step: int = typer.Option(min=1, help="The step to take again."),
    store: str = STORE,
    folder: Path | None = typer.Option(None, help="Folder of the run, if it was moved since."),
) -> int:
    """Take a step of a run again from the nearest checkpoint and the ledger, and compare weights, loss, gradient norm
    and the log-probability of each token with what was recorded. Nothing is sampled or written.

    Exit code 1 if something differs. Example: agl replay run-1a2b3c --step 7 --store runs/20260101-120000
    """
    import agentlightning.engine.torch_setup  # noqa: F401 -- says what is not installed # pyright: ignore[reportUnusedImport]
    from agentlightning.training.replay import replay as take_again

    found = with_store(store, lambda opened: take_again(opened, run, step, folder))
    say(f"step {step} of run {run}, from {found.source}: {found.updates} updates made again")
    for difference in found.differences:
        say(f"differs: {difference}")
    if not found.differences:
        say(f"the same, bit for bit: weights, loss, gradient norm, log-probabilities of {found.tokens} tokens")
    return 1 if found.differences else 0
