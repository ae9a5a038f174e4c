"""`agl rollouts pairs`: preference pairs for trainers that learn from what was better and what was worse."""

from __future__ import annotations

from pathlib import Path

import typer

from agentlightning.cli.support.output import say
from agentlightning.cli.support.store_access import STORE, with_store


def pairs(
    out: Path = typer.Option(..., help="New file of JSON Lines to write."),
    margin: float = typer.Option(0.0, help="Best and worst rollout of a task differ by more than this."),
    store: str = STORE,
) -> int:
    """Write the best rollout of each task against its worst, in TRL's format: prompt, chosen, rejected, tools.

    Rollouts that failed or earned nothing are in no pair; how many were left out, and why, is said.

    Example: agl rollouts pairs --out pairs.jsonl --margin 0.5 --store runs/20260101-120000
    """
    from agentlightning.training.preferences import preference_pairs, write_pairs

    found = with_store(store, lambda opened: preference_pairs(opened, margin=margin))
    write_pairs(found, out)
    left_out = ", ".join(f"{count} {reason}" for reason, count in found.excluded.most_common()) or "nothing"
    say(f"{out}: {len(found.pairs)} pairs; left out: {left_out}")
    return 0
