"""`agl vllm`: vLLM's command line, after a check that this version of vLLM can return token ids."""

from __future__ import annotations

import re
import sys
from importlib import import_module, metadata
from typing import Any

import typer

from agentlightning.base.process_secrets import TOKEN, discard
from agentlightning.cli.main import main_of

_FIRST_WITH_TOKEN_IDS = (0, 10, 2)
"""The first vLLM version that supports `return_token_ids` in a request. The gateway sends it."""


def vllm(context: typer.Context) -> int:
    """Run vLLM's command line with the given arguments.

    Behind the gateway (agl gateway, LLMProxy) its replies contain the token ids that training requires.

    Example: agl vllm serve my-org/my-model --port 8000
    """
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        if context.args in (["--help"], ["-h"]):  # with vLLM installed, its own help follows
            typer.echo(context.get_help())
            return 0
        raise ImportError("agl vllm requires the package 'vllm'. Install it with: pip install vllm") from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
    if numbers < _FIRST_WITH_TOKEN_IDS:
        first = ".".join(map(str, _FIRST_WITH_TOKEN_IDS))
        raise ImportError(
            f"vllm {version} does not return token ids, which training requires. "
            f"Install {first} or newer with: pip install --upgrade vllm"
        )
    discard(TOKEN)  # an engine does not need it, and its own workers trace it
    vllm_main: Any = import_module("vllm.entrypoints.cli.main").main
    before, sys.argv = sys.argv, ["vllm", *context.args]
    try:
        code = vllm_main()
    finally:
        sys.argv = before
    return code if isinstance(code, int) else 0


vllm.command_settings = {  # pyright: ignore[reportFunctionMemberAccess] -- read by `main.load`
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
}


main = main_of("vllm")

if __name__ == "__main__":
    sys.exit(main())
