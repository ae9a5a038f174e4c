"""`agl resources`: the resources that algorithms publish for agents. API keys are never shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import JSON, STORE, moment, say, shortened, show_json, show_table, with_store

if TYPE_CHECKING:
    from agentlightning.types import Resource, ResourcesUpdate, Worker

app = typer.Typer(no_args_is_help=True)


@app.callback()
def resources() -> None:
    """Show the resources of a store: models and prompts for agents.

    Example: agl resources list --store run.db
    """


@app.command("list")
def list_resources(
    store: str = STORE,
    limit: int = typer.Option(100, min=1, help="Maximum number of sets"),
    as_json: bool = JSON,
) -> None:
    """Show the newest version of each set of resources, most recently changed first.

    Example: agl resources list --store http://127.0.0.1:4747
    """
    from agentlightning.store.http.redaction import hidden

    newest = with_store(
        store, lambda connection: connection.query_resources(sort_by="update_time", sort_order="desc", limit=limit)
    )
    updates: list[ResourcesUpdate] = [hidden(each) for each in newest]
    if as_json:
        show_json(updates)
        return
    lines = [
        (each.resources_id, str(each.version), each.run_id or "-", moment(each.update_time), name, _summary(resource))
        for each in updates
        for name, resource in each.resources.items()
    ]
    show_table(("resources", "version", "run", "changed", "name", "what"), lines)
    say(f"{counted(len(updates), 'set')} of resources")


@app.command("show")
def show(
    resources_id: str = typer.Argument(metavar="ID", help="Id of the set"),
    store: str = STORE,
    version: int | None = typer.Option(None, help="Version of the set; the newest by default"),
) -> None:
    """Show one version of a set of resources as JSON, without API keys.

    Exit code 2 if it does not exist. Example: agl resources show re-1a2b3c --version 3 --store run.db
    """
    from agentlightning.errors import NotFoundError
    from agentlightning.store.http.redaction import hidden

    update = with_store(store, lambda connection: connection.get_resources_by_id(resources_id, version))
    if update is None:
        suffix = "" if version is None else f" in version {version}"
        raise NotFoundError(
            f"Resources {resources_id!r} not found{suffix}. List the resources with: agl resources list"
        )
    show_json(hidden(update))


def _summary(resource: Resource) -> str:
    """Return a resource as one line: its kind, then the model and its address, or the start of the prompt."""
    from agentlightning.types import LLM, PromptTemplate

    if isinstance(resource, LLM):
        return f"{resource.resource_type} {resource.model} at {resource.get_base_url()}"
    if isinstance(resource, PromptTemplate):
        return f"{resource.engine} {shortened(resource.template)!r}"
    return str(resource.resource_type)


def workers(
    store: str = STORE,
    run: str | None = typer.Option(None, help="Only workers of this run"),
    limit: int = typer.Option(100, min=1, help="Maximum number of workers"),
    as_json: bool = JSON,
) -> None:
    """Show the workers of a store, most recent heartbeat first.

    Example: agl workers --store http://127.0.0.1:4747
    """
    from agentlightning.semconv import CONTROL_PREFIX
    from agentlightning.store.http.redaction import hidden

    all_workers = with_store(
        store, lambda connection: connection.query_workers(sort_by="last_heartbeat_time", sort_order="desc")
    )
    real_workers = [worker for worker in all_workers if not worker.worker_id.startswith(CONTROL_PREFIX)]
    shown: list[Worker] = [hidden(worker) for worker in real_workers if run is None or worker.run_id == run][:limit]
    if as_json:
        show_json(shown)
        return
    show_table(("worker", "status", "run", "last heartbeat", "rollout", "attempt"), [_line(worker) for worker in shown])
    say(counted(len(shown), "worker"))


def _line(worker: Worker) -> tuple[str, ...]:
    return (
        worker.worker_id,
        worker.status,
        worker.run_id or "-",
        moment(worker.last_heartbeat_time),
        worker.current_rollout_id or "-",
        worker.current_attempt_id or "-",
    )
