"""`agl agentops`: a local end point for programs that the AgentOps SDK traces. What they send goes to a store."""

from __future__ import annotations

import typer

from agentlightning.cli.support.output import LOG_JSON, log_to_stderr


def agentops(
    store: str = typer.Option("sqlite:///agl.db", help="Where the spans are kept: a file or a store spec."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; beyond loopback AGL_TOKEN is needed."),
    port: int = typer.Option(0, help="Port; 0 takes a free one."),
    log_level: str = typer.Option("INFO", help="DEBUG, INFO, WARNING or ERROR."),
    log_json: bool = LOG_JSON,
) -> int:
    """Take in what the AgentOps SDK sends, without its service and without an account. Ctrl+C ends it, exit code 0.

    Prints the variables to set for the program. Each of its traces becomes one rollout, which ends with the trace;
    spans that name a rollout and an attempt of ours go there. With AGL_TOKEN set, that is the program's API key.

    Example: agl agentops --store run.db --port 4749
    """
    import asyncio

    from agentlightning.cli.support.agentops_server import serve
    from agentlightning.store.spec import spec_of

    log_to_stderr(log_level, json_lines=log_json)
    asyncio.run(serve(spec_of(store), host, port))
    return 0
