"""The command `agl`; one file per sub-command."""

import sys

from agentlightning.base.process_secrets import protect_early

if sys.argv[1:2] != ["vllm"] and "agentlightning.cli.vllm" not in sys.orig_argv:  # see there
    protect_early()

from agentlightning.cli.main import main

__all__ = ["main"]
