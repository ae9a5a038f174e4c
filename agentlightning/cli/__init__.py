"""The command `agl`; one file per sub-command."""

from agentlightning.cli.main import main

__all__ = ["main"]
