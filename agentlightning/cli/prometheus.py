"""`agl prometheus`: one page with the metrics of all processes that share a folder (`PROMETHEUS_MULTIPROC_DIR`)."""

from __future__ import annotations

import asyncio
import os
import sys

import typer

from agentlightning.base.private_files import private_folder
from agentlightning.cli.main import main_of
from agentlightning.cli.output import HOST, LOG_JSON, LOG_LEVEL, log_to_stderr
from agentlightning.errors import BadRequestError


def prometheus(
    host: str = HOST,
    port: int = typer.Option(4748, help="Port; 0 selects a free port"),
    metrics_path: str = typer.Option("/v1/prometheus", help="Path of the metrics page"),
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
    access_log: bool = typer.Option(False, "--access-log", help="Log every request"),
) -> None:
    """Serve the metrics of all processes that share the folder in PROMETHEUS_MULTIPROC_DIR.

    Set the variable for these processes and for this command. The folder is created if it is missing. A single
    `agl store --tracker prometheus` serves its own page at /v1/prometheus. Press Ctrl+C to stop (exit code 0).

    Example: PROMETHEUS_MULTIPROC_DIR=metrics agl prometheus --port 4748
    """
    log_to_stderr(log_level, json_lines=log_json)
    path = metrics_path.rstrip("/")
    if not path.startswith("/"):
        raise BadRequestError(
            f"--metrics-path {metrics_path!r} must begin with a slash and be followed by a name, such as /metrics"
        )
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        raise BadRequestError(
            "PROMETHEUS_MULTIPROC_DIR is not set. Set it to a folder, for this command and for the other processes"
        )
    private_folder(folder)

    from prometheus_client.exposition import choose_encoder
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from agentlightning.cli.serving import app_with_checks, serve_until_signal
    from agentlightning.utils.metrics import get_prometheus_registry
    from agentlightning.utils.server_launcher import PythonServerLauncherArgs

    async def page(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = await asyncio.to_thread(lambda: encode(get_prometheus_registry()))  # reads the files of every process
        return Response(body, headers={"content-type": content_type})

    routes = [Route(each, page, methods=["GET"]) for each in (path, path + "/")]
    args = PythonServerLauncherArgs(host=host, port=port, access_log=access_log)
    app = app_with_checks(routes, host)
    asyncio.run(serve_until_signal(app, args, lambda endpoint: [f"metrics of {folder}: {endpoint}{path}"]))


main = main_of("prometheus")

if __name__ == "__main__":
    sys.exit(main())
