"""`agl workers`: the workers that run the rollouts of a store, and when each was last heard of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from agentlightning.cli.support.output import JSON, moment, say, show_json, show_table
from agentlightning.cli.support.store_access import STORE, with_store

if TYPE_CHECKING:
    from agentlightning.types import Worker


def workers(
    store: str = STORE,
    run: str | None = typer.Option(None, help="Only those of this run."),
    limit: int = typer.Option(100, min=1, help="At most so many, those heard of last."),
    as_json: bool = JSON,
) -> int:
    """Show the workers that a store knows, those heard of last first.

    Example: agl workers --store http://127.0.0.1:4747
    """
    from agentlightning.semconv import CONTROL_PREFIX
    from agentlightning.store.http.redaction import hidden

    known = with_store(store, lambda opened: opened.query_workers(sort_by="last_heartbeat_time", sort_order="desc"))
    players = [worker for worker in known if not worker.worker_id.startswith(CONTROL_PREFIX)]
    found: list[Worker] = [hidden(worker) for worker in players if run is None or worker.run_id == run][:limit]
    if as_json:
        show_json(found)
        return 0
    show_table(("worker", "status", "run", "heard of", "rollout", "attempt"), [_line(worker) for worker in found])
    say(f"{len(found)} workers")
    return 0


def _line(worker: Worker) -> tuple[str, ...]:
    return (
        worker.worker_id,
        worker.status,
        worker.run_id or "-",
        moment(worker.last_heartbeat_time),
        worker.current_rollout_id or "-",
        worker.current_attempt_id or "-",
    )
