"""`agl doctor`: what is here, what is missing, and what would not work, before a run finds out."""

from __future__ import annotations

import typer

from agentlightning.cli.support.output import JSON, say, show_json, show_table


def doctor(
    store: str | None = typer.Option(
        None, envvar="AGENT_LIGHTNING_STORE_URL", help="Also ask this store: a file, or http://host:4747."
    ),
    port: int = typer.Option(4747, help="Port that a store server of this machine is to take."),
    as_json: bool = JSON,
) -> int:
    """Look at this machine: Python, packages and extras, ports, folder, token, variables, GPUs, and a store.

    Exit code 1 if something is wrong; what is merely absent is no fault. Nothing is changed.

    Example: agl doctor --store http://10.0.0.5:4747
    """
    from dataclasses import asdict

    from agentlightning.cli.support.diagnosis import all_findings

    found = all_findings(store, port)
    if as_json:
        show_json([asdict(finding) for finding in found])
    else:
        show_table(("", "what", "found"), [(each.state, each.what, each.found) for each in found])
    wrong = [finding for finding in found if finding.state == "wrong"]
    if not as_json:
        say(f"{len(wrong)} things are wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0
