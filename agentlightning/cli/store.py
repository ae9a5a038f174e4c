"""`agl store`: serve a store. Its sub-commands `backup`, `check` and `stats` maintain one."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.main import main_of
from agentlightning.cli.output import HOST, JSON, LOG_JSON, LOG_LEVEL, log_to_stderr, say, show_json, with_store
from agentlightning.errors import BadRequestError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore, LightningStoreStatistics
    from agentlightning.utils.metrics import MetricsBackend

_SERVER_CHECK_SECONDS = 1.0
"""Seconds between checks that the server is running, because it does not report its own end."""
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Backend(StrEnum):
    """Kind of storage."""

    SQLITE = "sqlite"
    MEMORY = "memory"
    MONGO = "mongo"
    POSTGRES = "postgres"


class Tracker(StrEnum):
    """Destination of the metrics."""

    PROMETHEUS = "prometheus"
    CONSOLE = "console"


app = typer.Typer(invoke_without_command=True)

_DEFAULT_SPECS = {
    Backend.SQLITE: "sqlite:///agl.db",
    Backend.MEMORY: "memory",
    Backend.MONGO: "mongodb://127.0.0.1:27017",
}


@app.callback()
def store(
    context: typer.Context,
    host: str = HOST,
    port: int = typer.Option(4747, help="Port; 0 selects a free port"),
    db: str | None = typer.Option(
        None,
        help="Storage: a file (agl.db by default, created if missing), memory, mongodb://host/db or "
        "postgresql://host/db",
    ),
    backend: Backend | None = typer.Option(
        None, help="sqlite, memory, mongo or postgres; with memory, the data is lost when the process ends"
    ),
    mongo_uri: str | None = typer.Option(None, help="Address of a MongoDB database, instead of --db"),
    keep_last: int | None = typer.Option(None, help="Number of ended rollouts to keep for each run"),
    max_age: str | None = typer.Option(None, help="Age at which ended rollouts are deleted: seconds, or 90m, 12h, 7d"),
    max_bytes: str | None = typer.Option(None, help="Size of the spans to keep for each run: bytes, or 500MB, 2GB"),
    max_run_age: str | None = typer.Option(
        None, help="Age at which ended runs are deleted with their records; same form as --max-age"
    ),
    lease_seconds: float | None = typer.Option(
        None, help="Seconds without a heartbeat before a worker's claims are released; 30 by default"
    ),
    cors_origin: list[str] = typer.Option([], help="Origin of web pages that may call the store; may be repeated"),
    allowed_host: list[str] = typer.Option(
        [], help="Additional host name under which clients may address this server; may be repeated"
    ),
    tracker: list[Tracker] = typer.Option([], help="Destination of metrics: prometheus or console; may be repeated"),
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
) -> None:
    """Serve a store for an algorithm and its runners.

    Press Ctrl+C (or send SIGTERM) to stop. Requests in progress are completed, and the exit code is 0. A second Ctrl+C
    stops the command immediately.

    Example: agl store --port 4747 --db run.db
    """
    if (command := context.invoked_subcommand) is not None:  # options before a sub-command have no effect
        for name in context.params:
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                option = "--" + name.replace("_", "-")
                text = f"{option} before {command!r} has no effect. Use: agl store {command} {option} ..."
                raise BadRequestError(text)
        return
    from agentlightning.store.spec import retention_policy
    from agentlightning.utils.http.auth import check_bind, server_token

    log_to_stderr(log_level, json_lines=log_json)
    spec = store_spec(db, backend, mongo_uri)
    bounds = _given(
        keep_last=keep_last,
        max_age=None if max_age is None else read_seconds("--max-age", max_age),
        max_bytes=None if max_bytes is None else read_bytes("--max-bytes", max_bytes),
        max_run_age=None if max_run_age is None else read_seconds("--max-run-age", max_run_age),
    )
    check_bind(host, server_token())
    metrics = _metrics_backend(tracker)
    retention = retention_policy(**bounds) if bounds else None
    settings = _given(lease_seconds=lease_seconds, retention=retention, tracker=metrics)
    options = _given(allowed_hosts=allowed_host or None, tracker=metrics)
    options.update(host=host, port=port, cors_allow_origins=cors_origin)
    asyncio.run(serve_store(spec, settings, options))
    say("store closed")


def store_spec(db: str | None, backend: Backend | None, mongo_uri: str | None) -> str:
    """Return the spec of the store that the options describe."""
    from agentlightning.store.spec import public_form, spec_of

    if mongo_uri is not None and db is not None:
        raise BadRequestError("Use either --db or --mongo-uri, not both")
    text = db if mongo_uri is None else mongo_uri
    if mongo_uri is not None:
        backend = backend or Backend.MONGO
    if text is None:
        if backend is Backend.POSTGRES:
            raise BadRequestError("--backend postgres requires --db postgresql://user:password@host/database")
        return _DEFAULT_SPECS[backend or Backend.SQLITE]
    spec = spec_of(text)
    if backend is not None and not spec.startswith(backend.value):
        raise BadRequestError(f"--backend {backend.value} and {public_form(spec)!r} are incompatible. Use one of them")
    return spec


def read_seconds(option: str, text: str) -> float:
    """Return the number of seconds that a text such as `90`, `90m` or `7d` specifies."""
    return _read_amount(option, text, _SECONDS, "seconds, or a number with one of s, m, h, d (90m)")


def read_bytes(option: str, text: str) -> int:
    """Return the number of bytes that a text such as `1000000`, `500MB` or `2GiB` specifies."""
    return int(_read_amount(option, text, _BYTES, "bytes, or a number with one of kB, MB, GB, KiB, MiB, GiB (500MB)"))


def _read_amount(option: str, text: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        raise BadRequestError(f"{option} {text!r}: expected {expected}")
    return float(match[1]) * units[match[2]]


def _given(**settings: object) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def _metrics_backend(trackers: list[Tracker]) -> MetricsBackend | None:
    if not trackers:
        return None
    from agentlightning.utils.metrics import ConsoleMetricsBackend, MultiMetricsBackend, PrometheusMetricsBackend

    kinds = {Tracker.PROMETHEUS: PrometheusMetricsBackend, Tracker.CONSOLE: ConsoleMetricsBackend}
    backends: list[MetricsBackend] = [kinds[tracker]() for tracker in dict.fromkeys(trackers)]
    return backends[0] if len(backends) == 1 else MultiMetricsBackend(backends)


async def serve_store(
    spec: str,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    on_page: Callable[[str], None] = lambda url: say(f"dashboard: {url}"),
) -> None:
    """Serve until SIGINT or SIGTERM. `settings` configure the store's class, `options` the server.

    `on_page` is called with the address of the dashboard when it is available.

    On return the port is free, requests in progress have a response (503 with `Retry-After` for requests that wait),
    and the data of all successful requests is stored.
    """
    from agentlightning.cli.serving import end_of_process
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.spec import public_form, store_from_spec

    store = store_from_spec(spec, **settings)
    try:
        server = LightningStoreServer(store, **options)
        server.bind()
        end = end_of_process()
        say(f"store in {public_form(spec).removeprefix('sqlite:///')} listens on {server.endpoint}")
        await server.start()
        on_page(f"{server.endpoint}/")
        try:
            while not end.done():
                await asyncio.wait([end], timeout=_SERVER_CHECK_SECONDS)
                if not end.done() and not server.server_launcher.is_running():
                    raise RuntimeError("The server stopped unexpectedly. See the log for the reason")
        finally:
            await server.stop()
    finally:
        await store.close()


# --- maintenance of the data of a store, also while it is served ------------------------------------------------------

_DB = typer.Option("agl.db", help="File of the store")
_DATA = typer.Option("agl.db", "--db", help="Store: a file, mongodb://host/db or postgresql://host/db")
_COPY = typer.Argument(help="File of the copy")
_PLACE = typer.Argument(
    "agl.db", envvar="AGENT_LIGHTNING_STORE_URL", help="Store: a file or an address such as http://127.0.0.1:4747"
)
_ELSEWHERE = {
    "mongodb": "copy a MongoDB database with mongodump --uri=URI",
    "postgres": "copy a PostgreSQL database with pg_dump URI",
    "http": "run this command on the machine with the server's file",
    "memory": "a store in memory has no file",
}


@app.command("backup")
def backup(
    file: Path = _COPY,
    db: str = _DB,
    force: bool = typer.Option(False, "--force", help="Replace an existing file"),
) -> None:
    """Copy the file of a store, also while it is served. It is checked before it is renamed to FILE.

    Example: agl store backup monday.db --db run.db
    """
    from agentlightning.store.sqlite.file import backup_file

    size = backup_file(_file_of(db), file, force=force)
    say(f"{file}: {size} bytes, consistent copy of {db}")


@app.command("check")
def check(db: str = _DATA, as_json: bool = JSON) -> int:
    """Check that the data of a store is consistent, also while it is served.

    For a file, this includes the integrity check of SQLite. For MongoDB, the command only checks that every record can
    be read. Lists the problems. Exit code 1 if there are any.

    Example: agl store check --db run.db
    """
    from agentlightning.store.spec import public_form, spec_of

    spec = spec_of(db)
    if spec.startswith(("postgres", "mongodb")):
        from agentlightning.store.check import check_database

        report, db = check_database(spec), public_form(spec)
    else:
        from agentlightning.store.check import check_file

        report = check_file(_file_of(db))
    if as_json:
        show_json(report)
        return 1 if report.found else 0
    for problem in report.problems:
        say(problem)
    if report.found:
        say(f"{db}: {counted(report.found, 'problem')}, {len(report.problems)} of them listed")
        return 1
    size = f"{counted(report.rollouts, 'rollout')}, {counted(report.spans, 'span')}"
    say(f"{db}: ok, {size}, schema version {report.schema_version}")
    if not report.complete:
        say("This schema version is old. The store is upgraded when it is opened. A file is not checked further.")
    return 0


@app.command("stats")
def stats(place: str = _PLACE, as_json: bool = JSON) -> None:
    """Show the size of a store, and its rollouts by status. agl stats and agl store stats are the same command.

    Example: agl store stats http://127.0.0.1:4747
    """
    statistics, totals = with_store(place, _counts)
    if as_json:
        show_json({**statistics, "rollouts": totals})
        return
    for name, value in statistics.items():
        say(f"{name:<26} {value:.1f}" if isinstance(value, float) else f"{name:<26} {value}")
    for status, total in totals.items():
        say(f"rollouts {status:<17} {total}")


async def _counts(store: LightningStore) -> tuple[LightningStoreStatistics, dict[str, int]]:
    """Return the counters of the store, and the number of rollouts by status."""
    from agentlightning.store.rules.lifecycle import ROLLOUT_STATUSES

    pages = {status: await store.query_rollouts(status_in=[status], limit=1) for status in ROLLOUT_STATUSES}
    return await store.statistics(), {status: page.total for status, page in pages.items()}


def _file_of(db: str) -> Path:
    """Return the file that an option names."""
    from agentlightning.store.spec import public_form, spec_of

    spec = spec_of(db)
    if spec.startswith("sqlite:///"):
        return Path(spec.partition("?")[0].removeprefix("sqlite:///"))
    advice = next((text for scheme, text in _ELSEWHERE.items() if spec.startswith(scheme)), "expected a file")
    raise BadRequestError(f"{public_form(spec)!r} is not a store file: {advice}")


main = main_of("store")

if __name__ == "__main__":
    sys.exit(main())
