"""`agl store`: serve a store; its sub-commands look after one: `backup`, `check`, `stats`."""

from __future__ import annotations

from enum import StrEnum

import typer

from agentlightning.cli import store_data as store_file
from agentlightning.cli.support.output import LOG_JSON, log_to_stderr


class Backend(StrEnum):
    """Where the data lies."""

    SQLITE = "sqlite"
    MEMORY = "memory"
    MONGO = "mongo"
    POSTGRES = "postgres"


class Tracker(StrEnum):
    """Where the metrics go."""

    PROMETHEUS = "prometheus"
    CONSOLE = "console"


app = typer.Typer(invoke_without_command=True)
app.command("backup")(store_file.backup)
app.command("check")(store_file.check)
app.command("stats")(store_file.stats)

_DEFAULT_PLACES = {
    Backend.SQLITE: "sqlite:///agl.db",
    Backend.MEMORY: "memory",
    Backend.MONGO: "mongodb://127.0.0.1:27017",
}


@app.callback()
def store(
    context: typer.Context,
    host: str = typer.Option("127.0.0.1", help="Address to listen on; beyond loopback AGL_TOKEN is needed."),
    port: int = typer.Option(4747, help="Port; 0 takes a free one."),
    db: str | None = typer.Option(
        None,
        help="Where the data lies: a file (agl.db by default, made if it is not there), memory, mongodb://host/db, "
        "postgresql://host/db.",
    ),
    backend: Backend | None = typer.Option(None, help="The same by kind; memory is gone with the process."),
    mongo_uri: str | None = typer.Option(None, help="Database of --backend mongo."),
    keep_last: int | None = typer.Option(None, help="Of each run, keep so many rollouts that have ended."),
    max_age: str | None = typer.Option(None, help="Delete rollouts so long after their end: seconds, or 90m, 12h, 7d."),
    max_bytes: str | None = typer.Option(None, help="Of each run, keep so many bytes of spans: bytes, or 500MB, 2GB."),
    lease_seconds: float | None = typer.Option(None, help="Silence that costs a worker its claims; 30 by default."),
    cors_origin: list[str] = typer.Option([], help="Origin whose pages may call the store; may be repeated."),
    allowed_host: list[str] = typer.Option(
        [], help="Further name under which clients may address this server; may be repeated."
    ),
    tracker: list[Tracker] = typer.Option([], help="Collect metrics, for these; may be repeated."),
    log_level: str = typer.Option("INFO", help="DEBUG, INFO, WARNING or ERROR."),
    log_json: bool = LOG_JSON,
) -> int:
    """Serve a store for algorithm and runners.

    Ctrl+C (or SIGTERM) ends it, exit code 0: requests in progress are answered. A second one ends it at once.

    Example: agl store --port 4747 --db run.db
    """
    if context.invoked_subcommand is not None:
        return _refuse_options(context)
    from agentlightning.cli.support.amounts import read_bytes, read_seconds
    from agentlightning.cli.support.serving import Serving, serve

    log_to_stderr(log_level, json_lines=log_json)
    serving = Serving(
        spec=place(db, backend, mongo_uri),
        host=host,
        port=port,
        cors_origins=cors_origin,
        allowed_hosts=allowed_host,
        trackers=[each.value for each in tracker],
        lease_seconds=lease_seconds,
        keep_last=keep_last,
        max_age=None if max_age is None else read_seconds("--max-age", max_age),
        max_bytes=None if max_bytes is None else read_bytes("--max-bytes", max_bytes),
    )
    return serve(serving)


def _refuse_options(context: typer.Context) -> int:
    """Let the sub-command go on, unless an option stands before it, where it would have no effect."""
    from agentlightning.errors import BadRequestError

    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            command = context.invoked_subcommand
            option = "--" + name.replace("_", "-")
            raise BadRequestError(f"{option} before {command!r} has no effect; write: agl store {command} {option} ...")
    return 0


def place(db: str | None, backend: Backend | None, mongo_uri: str | None) -> str:
    """Return the spec of the store that the options mean.

    Raises:
        BadRequestError: they contradict each other, or say too little.
    """
    from agentlightning.errors import BadRequestError
    from agentlightning.store.spec import public_form, spec_of

    if mongo_uri is not None and db is not None:
        raise BadRequestError("Give --db or --mongo-uri, not both; they are the same place")
    text = db if mongo_uri is None else mongo_uri
    if mongo_uri is not None:
        backend = backend or Backend.MONGO
    if text is None:
        if backend is Backend.POSTGRES:
            raise BadRequestError(
                "--backend postgres needs its database: --db postgresql://user:password@host/database"
            )
        return _DEFAULT_PLACES[backend or Backend.SQLITE]
    spec = spec_of(text)
    if backend is not None and not spec.startswith(backend.value):
        raise BadRequestError(f"--backend {backend.value} does not fit {public_form(spec)!r}; leave one of them out")
    return spec
