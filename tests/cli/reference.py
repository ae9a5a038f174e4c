"""Generates the second part of `docs/reference/cli.md` from the commands: `python -m tests.cli.reference`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from agentlightning.cli.main import COMMANDS, load

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"

FIRST = "## agl demo"
"""Start of the generated part. The text before it is written by hand."""


def page() -> str:
    head = PAGE.read_text().partition(FIRST)[0]
    return head + "\n".join([*(line for name in COMMANDS for line in section((name,), load(name)))])


def section(path: tuple[str, ...], command: Any) -> Iterator[str]:
    """Yield the lines of a command, then those of its sub-commands."""
    yield f"{'##' if len(path) == 1 else '###'} agl {' '.join(path)}\n"
    text = inspect.cleandoc(command.help or "")
    prose, _, example = text.partition("Example: ")
    yield textwrap.fill(" ".join(prose.split()), 118) + "\n"
    if example:
        yield f"```bash\n{' '.join(example.split())}\n```\n"
    rows = [row(parameter) for parameter in command.params if parameter.name != "help"]
    if rows:
        yield "\n".join(["| Name | Default | Description |", "| --- | --- | --- |", *rows]) + "\n"
    for name, below in getattr(command, "commands", {}).items():
        yield from section((*path, name), below)


def row(parameter: Any) -> str:
    is_option = parameter.opts[0].startswith("-")
    names = (*parameter.opts, *parameter.secondary_opts)
    name = "`, `".join(names) if is_option else (parameter.metavar or parameter.name).upper()
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    is_none = default is None or default is False or default == [] or callable(default)
    shown = "" if is_none else f"`{default}`"
    help_text = re.sub(r"\s+", " ", parameter.help or "").replace("|", "\\|")
    variable = f" (variable `{parameter.envvar}`)" if parameter.envvar else ""
    return f"| `{name}` | {shown} | {help_text}{variable} |"


if __name__ == "__main__":
    PAGE.write_text(page())
