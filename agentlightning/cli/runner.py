"""`agl runner`: join a run from any machine that reaches its store."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from agentlightning.cli.support.output import LOG_JSON, log_to_stderr
from agentlightning.process_secrets import TOKEN, hold, read_secret


def runner(
    agent: str = typer.Argument(metavar="AGENT", help="The agent to run: module:object or file.py:object."),
    store: str = typer.Option(
        ..., envvar="AGENT_LIGHTNING_STORE_URL", help="The store of the run: http://algorithm-machine:4747."
    ),
    run: str | None = typer.Option(None, envvar="AGL_RUN_ID", help="Its run id; without one, rollouts of no run."),
    token_file: Path | None = typer.Option(None, help="File with the store's token; AGL_TOKEN by default."),
    runners: int = typer.Option(1, min=1, help="Runner processes."),
    concurrency: int = typer.Option(1, min=1, help="Rollouts at once in each of them."),
    max_rollouts: int | None = typer.Option(None, min=1, help="End after so many rollouts of each process."),
    outage: float = typer.Option(60.0, help="Give up when the store does not answer for so many seconds."),
    tracer: str | None = typer.Option(None, help="Import path of another tracer class."),
    log_level: str = typer.Option("INFO", help="DEBUG, INFO, WARNING or ERROR."),
    log_json: bool = LOG_JSON,
) -> int:
    """Run the rollouts of a run on this machine until the run ends or is told to stop.

    It waits for a store that does not answer yet, and for one that is started anew. Exit codes: 0 the run has ended;
    69 the store did not answer for --outage seconds; 77 it refuses the token; 130 Ctrl+C; 143 SIGTERM; 1 runners died
    again and again. Each runner is a process of its own, started again when an agent ends it; what agents start ends
    with it.

    Example: agl runner my_agent:agent --store http://10.0.0.5:4747 --run nightly --runners 4
    """
    from agentlightning.cli.support.training import fit, in_foreground
    from agentlightning.errors import BadRequestError

    log_to_stderr(log_level, json_lines=log_json)
    if token_file is not None:
        try:
            hold(TOKEN, read_secret(str(token_file), f"--token-file {token_file}"))
        except ValueError as error:
            raise BadRequestError(str(error)) from error
    if run is not None:
        os.environ["AGL_RUN_ID"] = run

    def work() -> None:
        from agentlightning.cli.support.plan import Plan
        from agentlightning.cli.support.target import load_target
        from agentlightning.store.spec import spec_of
        from agentlightning.trainer import Trainer

        player = load_target("AGENT", agent)
        trainer = Trainer(
            strategy={"type": "cs", "role": "runner", "managed_store": False},
            store=spec_of(store),
            n_runners=runners,
            max_rollouts=max_rollouts,
            tracer=tracer,
            runner={"concurrency": concurrency, "store_unreachable_timeout": outage},
        )
        fit(Plan(trainer, agent=player() if isinstance(player, type) else player))

    return in_foreground(work)
