"""The sub-commands of `agl`: where each one lives and its line on the help page.

A module is imported when its command is called, so that `agl --help` costs no more than typer.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override


@dataclass(frozen=True)
class Command:
    """One sub-command: its object as `module:name` below this package, its line and its panel on the help page."""

    target: str
    help: str
    panel: str


_TRY, _RUN, _SERVE, _LOOK = "Try", "Run", "Serve", "Look"
COMMANDS: dict[str, Command] = {
    "demo": Command("demo:demo", "An ordinary agent learns to use its calculator, within three minutes.", _TRY),
    "doctor": Command("doctor:doctor", "Say what is installed, what is missing, and what would not work here.", _TRY),
    "run": Command("run:app", "Run a Trainer from a file or from Python; stop a run.", _RUN),
    "export": Command("export:export", "Write a trained model merged, as an adapter, or as GGUF.", _RUN),
    "serve": Command("servers.serve:serve", "Serve a checkpoint as an OpenAI-style endpoint.", _SERVE),
    "runner": Command("runner:runner", "Join a run: run its rollouts on this machine.", _RUN),
    "store": Command("servers.store:app", "Serve a store; copy, check and measure its data.", _SERVE),
    "gateway": Command("servers.gateway:gateway", "Record the model calls of any program, without a Trainer.", _SERVE),
    "prometheus": Command("servers.prometheus:prometheus", "Serve the metrics that several processes share.", _SERVE),
    "agentops": Command("servers.agentops:agentops", "Take in what the AgentOps SDK sends, and store it.", _SERVE),
    "vllm": Command("servers.vllm:vllm", "Run vLLM's own command line, with token ids in its replies.", _SERVE),
    "dashboard": Command(
        "servers.dashboard:dashboard", "Open the page of a run that has ended, or of a server.", _LOOK
    ),
    "runs": Command("runs:app", "List, show, compare and export training runs and their ledgers.", _LOOK),
    "compare": Command("promotion:compare", "Compare two runs: the same as `agl runs compare`.", _LOOK),
    "promote": Command("promotion:promote", "Say whether a run may take the place of another, for CI.", _LOOK),
    "rollouts": Command("rollouts:app", "List, show, explain, retry, cancel, export rollouts.", _LOOK),
    "resources": Command("resources:app", "List and show what algorithms have published.", _LOOK),
    "replay": Command("replay:replay", "Take a step of a run again from its records, and compare.", _LOOK),
    "workers": Command("workers:workers", "List the workers that a store knows.", _LOOK),
    "import-v03": Command("import_v03:import_v03", "Take over what an installation of v0.3 has kept.", _LOOK),
    "stats": Command("servers.store:stats", "Show how much a store holds.", _LOOK),
}


class Commands(TyperGroup):
    """The group of all sub-commands. Each is a line of help until it is called."""

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


def load(name: str) -> Any:
    """Import a sub-command and return it as typer runs it."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    found: Any = getattr(importlib.import_module(f"agentlightning.cli.{module}"), attribute)
    holder = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        settings: dict[str, Any] = getattr(found, "command_settings", {})
        holder.command(name, **settings)(found)
    return typer.main.get_group(holder).commands[name]
