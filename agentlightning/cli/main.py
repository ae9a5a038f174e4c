"""`agl`: sub-commands, exit codes, and how an error is shown.

Exit codes: 0 done; 1 failed, or a verdict that is not the one hoped for; 2 wrong use or wrong input; 130 interrupted.
Sub-commands import what they need when they run, so that `agl --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from agentlightning.cli import demo, gateway, rollouts, store
from agentlightning.utils.version import VERSION

WRONG_INPUT = (ValueError, TypeError, ImportError)
"""Errors that the user can mend: exit code 2 and one line."""
FAILED = (RuntimeError, OSError, ArithmeticError)
"""Errors of the world around us: exit code 1 and one line."""

app = typer.Typer(
    name="agl",
    help="Train any AI agent. `agl demo` shows an agent learning on this machine in about two minutes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("gateway")(gateway.gateway)
app.add_typer(store.app, name="store")
app.add_typer(rollouts.app, name="rollouts")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"agentlightning {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run `agl` with the given arguments (those of the process by default) and return the exit code."""
    try:
        code = app(args=None if argv is None else list(argv), prog_name="agl", standalone_mode=False)
    except KeyboardInterrupt:
        return 130
    except (*WRONG_INPUT, *FAILED) as error:
        print(f"agl: {error}", file=sys.stderr)
        return 2 if isinstance(error, WRONG_INPUT) else 1
    except Exception as error:
        return _usage_error(error)
    return code if isinstance(code, int) else 0


def _usage_error(error: Exception) -> int:
    """Show an error of the command line itself; anything else goes on with its traceback."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if not callable(show) or not isinstance(code, int):
        raise error
    show()
    return code
