"""`agl`: its sub-commands, exit codes and error messages.

Exit codes are those of `ExitCode`. Commands that serve end normally on Ctrl+C. An error is printed as one line, after
its traceback if `--debug` or `AGL_DEBUG=1` is set.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from agentlightning.base.process_secrets import server_token
from agentlightning.cli.output import say, show_traceback
from agentlightning.exit_codes import ExitCode
from agentlightning.utils.version import VERSION


@dataclass(frozen=True)
class Command:
    """A sub-command: its object as `module:name` in this package, its help line, and its panel on the help page."""

    target: str
    help: str
    panel: str


_TRY, _RUN, _SERVE, _LOOK = "Get started", "Run", "Serve", "Inspect"
COMMANDS: dict[str, Command] = {
    "demo": Command("demo:demo", "Train a small agent to use a calculator, within three minutes.", _TRY),
    "doctor": Command("doctor:doctor", "Check this machine for missing packages and wrong settings.", _TRY),
    "run": Command("run:app", "Run a Trainer from a file or from Python; stop a run.", _RUN),
    "tasks": Command("tasks:app", "Measure the difficulty of tasks, and select tasks by it.", _RUN),
    "env": Command("env:app", "List environments for agents; try one with a model.", _RUN),
    "export": Command("export:export", "Export a trained model: merged, as an adapter, or as GGUF.", _RUN),
    "serve": Command("gateway:serve", "Serve a checkpoint as an OpenAI-style endpoint.", _SERVE),
    "runner": Command("run:runner", "Run rollouts of a run on this machine.", _RUN),
    "store": Command("store:app", "Serve a store; back up, check and measure its data.", _SERVE),
    "gateway": Command("gateway:gateway", "Record the model calls of any program, without a Trainer.", _SERVE),
    "prometheus": Command("prometheus:prometheus", "Serve the metrics of several processes on one page.", _SERVE),
    "agentops": Command("agentops_server:agentops", "Receive the data of the AgentOps SDK and store it.", _SERVE),
    "vllm": Command("vllm:vllm", "Run vLLM's command line, with token ids in its replies.", _SERVE),
    "dashboard": Command("dashboard:dashboard", "Open the dashboard of a run, a store or a server.", _LOOK),
    "runs": Command("runs:app", "List, show, compare and export training runs and their ledgers.", _LOOK),
    "compare": Command("promotion:compare", "Compare two runs. Same as `agl runs compare`.", _LOOK),
    "promote": Command("promotion:promote", "Check whether a run may replace another one, for CI.", _LOOK),
    "rollouts": Command("rollouts:app", "List, show, explain, retry, cancel and export rollouts.", _LOOK),
    "resources": Command("resources:app", "List and show the resources that algorithms publish.", _LOOK),
    "replay": Command("export:replay", "Repeat a step of a run and compare the result.", _LOOK),
    "workers": Command("resources:workers", "List the workers of a store.", _LOOK),
    "harbor": Command("harbor:app", "Check tasks in Harbor's format before training.", _LOOK),
    "import-v03": Command("import_v03:import_v03", "Import the data of a v0.3 installation.", _LOOK),
    "stats": Command("store:stats", "Show the size of a store.", _LOOK),
}


class Commands(TyperGroup):
    """The group of all sub-commands. A sub-command is imported when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, command in COMMANDS.items():
            self.add_command(
                TyperCommand(name, help=command.help, rich_help_panel=command.panel, add_help_option=False)
            )

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.add_command(load(args[0]))
        return super().resolve_command(ctx, args)


WRONG_INPUT = (ValueError, TypeError, ImportError)
"""Errors that the user can fix: exit code 2 and one line."""
FAILED = (RuntimeError, OSError, ArithmeticError)
"""Errors of the environment, not of this package: exit code 1 and one line."""

_debug: ContextVar[bool] = ContextVar("agentlightning_cli_debug", default=False)

app = typer.Typer(
    name="agl",
    cls=Commands,
    help="Train any AI agent. `agl demo` trains a small agent on this machine within three minutes.",
    epilog="Example: agl store --port 4747, then agl rollouts list --store http://127.0.0.1:4747",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_set: bool) -> None:
    if is_set:
        say(f"agentlightning {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version"),
    debug: bool = typer.Option(False, "--debug", envvar="AGL_DEBUG", help="Show the traceback of an error"),
) -> None:
    _debug.set(debug)
    if context.invoked_subcommand != "vllm":
        server_token()  # removes it from the environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run `agl` with the given arguments (those of the process by default) and return the exit code."""
    _debug.set(False)
    try:
        code = app(args=None if argv is None else list(argv), prog_name="agl", standalone_mode=False)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
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
    """Show an error and return its exit code. Usage errors print their own output."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if callable(show) and isinstance(code, int):
        show()
        return code
    if _debug.get():
        show_traceback(error)
    if isinstance(error, (*WRONG_INPUT, *FAILED)):
        say(f"agl: {error}", lines=True, to_stderr=True)
        return ExitCode.WRONG_INPUT if isinstance(error, WRONG_INPUT) else ExitCode.FAILED
    hint = "" if _debug.get() else " Run `agl --debug ...` to see the traceback."
    say(f"agl: unexpected {type(error).__name__}: {error}.{hint}", lines=True, to_stderr=True)
    return ExitCode.UNFORESEEN


def load(name: str) -> Any:
    """Import a sub-command and return it in typer's form."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    command: Any = getattr(importlib.import_module(f"agentlightning.cli.{module}"), attribute)
    holder = typer.Typer(add_completion=False)
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name)
    else:
        settings: dict[str, Any] = getattr(command, "command_settings", {})
        holder.command(name, **settings)(command)
    return typer.main.get_group(holder).commands[name]
