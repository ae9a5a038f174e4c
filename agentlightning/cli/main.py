"""`agl`: exit codes, and how an error is shown.

Exit codes are those of `ExitCode`; of the commands that serve, Ctrl+C is the ordinary end. An error is one line; with
`--debug` or `AGL_DEBUG=1` its traceback comes before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import typer

from agentlightning.cli.commands import Commands
from agentlightning.cli.support.output import say, show_traceback
from agentlightning.exit_codes import ExitCode
from agentlightning.process_secrets import server_token
from agentlightning.utils.version import VERSION

WRONG_INPUT = (ValueError, TypeError, ImportError)
"""Errors that the user can mend: exit code 2 and one line."""
FAILED = (RuntimeError, OSError, ArithmeticError)
"""Errors of the environment, not of this package: exit code 1 and one line."""

_debug: ContextVar[bool] = ContextVar("agentlightning_cli_debug", default=False)

app = typer.Typer(
    name="agl",
    cls=Commands,
    help="Train any AI agent. `agl demo` shows an agent learning on this machine within three minutes.",
    epilog="Example: agl store --port 4747, then agl rollouts list --store http://127.0.0.1:4747",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"agentlightning {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
    debug: bool = typer.Option(False, "--debug", envvar="AGL_DEBUG", help="Show the traceback of an error."),
) -> None:
    _debug.set(debug)
    if context.invoked_subcommand != "vllm":
        server_token()  # leaves the environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run `agl` with the given arguments (those of the process by default) and return the exit code."""
    _debug.set(False)
    try:
        code = app(args=None if argv is None else list(argv), prog_name="agl", standalone_mode=False)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # who read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:  # the boundary: an error becomes a line and an exit code
        return _report(error)
    return code if isinstance(code, int) else ExitCode.DONE


def main_of(command: str) -> Callable[..., int]:
    """Return the `main` of a module that runs one command: `agentlightning.cli.store.main(["--port", "0"])`."""

    def command_main(argv: Sequence[str] | None = None) -> int:
        return main([command, *(sys.argv[1:] if argv is None else argv)])

    return command_main


def _report(error: Exception) -> int:
    """Show an error and return its exit code; one of the command line itself knows how it is shown."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if callable(show) and isinstance(code, int):
        show()
        return code
    if _debug.get():
        show_traceback(error)
    if isinstance(error, (*WRONG_INPUT, *FAILED)):
        say(f"agl: {error}", lines=True, to_stderr=True)
        return ExitCode.WRONG_INPUT if isinstance(error, WRONG_INPUT) else ExitCode.FAILED
    hint = "" if _debug.get() else " `agl --debug ...` shows where."
    say(f"agl: unforeseen {type(error).__name__}: {error}.{hint}", lines=True, to_stderr=True)
    return ExitCode.UNFORESEEN
