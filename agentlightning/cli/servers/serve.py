"""`agl serve`: a trained model behind the gateway, for any client of OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Any

import typer

from agentlightning.cli.export import MODEL, trained_at
from agentlightning.cli.servers.gateway import journal_beside, serve_gateway
from agentlightning.cli.support.output import LOG_JSON, log_to_stderr, say


def serve(
    model: str = MODEL,
    store: str | None = typer.Option(
        None, help="Where calls are recorded, and a run's id is looked up; without it nothing is kept."
    ),
    name: str = typer.Option("policy", help="The name that clients ask for."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; beyond loopback AGL_TOKEN is needed."),
    port: int = typer.Option(0, help="Port; 0 takes a free one."),
    max_batch: int = typer.Option(32, min=1, help="Calls that are generated at once."),
    log_level: str = typer.Option("WARNING", help="DEBUG, INFO, WARNING or ERROR."),
    log_json: bool = LOG_JSON,
) -> int:
    """Serve the model of a checkpoint with an OpenAI-style endpoint, through the gateway. Ctrl+C ends it.

    Prints the base URL to give to clients. Example: agl serve runs/20260101-120000 --store agl.db
    """
    log_to_stderr(log_level, json_lines=log_json)
    from agentlightning.utils.http.auth import check_bind, server_token

    check_bind(host, server_token())  # before a model is loaded
    trained = trained_at(model, store or "agl.db")
    from agentlightning.engine.engine import InferenceEngine

    engine = InferenceEngine(trained.load(), model_name=name, max_batch=max_batch)
    engine.start()
    try:
        say(f"{trained.path} is served as {name}")
        parameters = {"model": name, "api_base": engine.base_url, "engine": "agentlightning"}
        options: dict[str, Any] = {"model_list": [{"model_name": name, "litellm_params": parameters}]}
        if store is not None:
            options["journal"] = journal_beside(store, port)
        asyncio.run(serve_gateway(store or "memory", {"host": host, "port": port or None, **options}, "agl serve"))
    finally:
        engine.stop()
    return 0
