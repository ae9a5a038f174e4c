"""Options for the Claude Agent SDK, so that its command calls only the model of an attempt.

The command reads its address from its environment, which the SDK copies from the runner. So the options override
keys, logins and cloud accounts of the machine, settings and memories through which one rollout could affect
another, and features that make calls in addition to the agent's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from agentlightning.integrations.packages import package_of
from agentlightning.types import LLM

_NO_KEY = "unused"
_MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
    *(f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("FABLE", "HAIKU", "OPUS", "SONNET")),
)
_CLOUDS = tuple(
    f"CLAUDE_CODE_USE_{cloud}"
    for cloud in ("ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD", "BEDROCK", "FOUNDRY", "GATEWAY", "MANTLE", "VERTEX")
)
_DEFAULTS: Mapping[str, str] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # telemetry, updates, and the call for a session's title
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",  # the next rollout would read the notes
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line with version and hash at the start of each prompt
    "ENABLE_TOOL_SEARCH": "false",  # tools that only Anthropic's servers load on demand
}
"""Default variables, which `env=` may override."""
_EXTRA_BODY = "CLAUDE_CODE_EXTRA_BODY"


def claude_agent_options(llm: LLM, **options: Any) -> Any:
    """Return `ClaudeAgentOptions` that send all calls to `llm`, with its key, model and sampling parameters.

    Settings files and MCP servers of the machine are excluded unless `setting_sources` and `strict_mcp_config` include
    them.

    Args:
        llm: the model of the agent.
        options: further options of `ClaudeAgentOptions`; variables in `env` are added, and override the defaults.

    Raises:
        ImportError: claude-agent-sdk is not installed.
        ValueError: an option sets the model, the address or the key, which come from `llm`, or `env` holds a
            `CLAUDE_CODE_EXTRA_BODY` that is not a JSON object.
    """
    sdk = package_of("claude_agent_options", "claude_agent_sdk", "claude-agent-sdk")
    own: dict[str, str] = dict(options.pop("env", None) or {})
    address = _address(llm)
    conflicts = sorted(own.keys() & address.keys()) + [name for name in ("model",) if name in options]
    if conflicts:
        raise ValueError(f"Remove {', '.join(conflicts)}: the values come from llm (model {llm.model!r})")
    env = {**_DEFAULTS, **own, **address, **_around_proxies(llm, own)}
    if body := {**llm.sampling_parameters, **_extra_body(own)}:
        env[_EXTRA_BODY] = json.dumps(body)
    return sdk.ClaudeAgentOptions(
        **{"setting_sources": [], "strict_mcp_config": True, **options}, model=llm.model, env=env
    )


def _address(llm: LLM) -> dict[str, str]:
    key = llm.api_key or _NO_KEY
    return {
        "ANTHROPIC_BASE_URL": llm.get_base_url().removesuffix("/").removesuffix("/v1"),  # the command adds /v1/messages
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        **dict.fromkeys(_MODELS, llm.model),
        **dict.fromkeys(_CLOUDS, "0"),
    }


def _around_proxies(llm: LLM, own: Mapping[str, str]) -> dict[str, str]:
    """Return variables that exclude this address from proxies, which the command uses for any address."""
    host = urlsplit(llm.get_base_url()).hostname or ""
    values = {name: own.get(name, os.environ.get(name, "")) for name in ("NO_PROXY", "no_proxy")}
    return {name: ",".join(filter(None, (value, host))) for name, value in values.items()}


def _extra_body(own: Mapping[str, str]) -> dict[str, Any]:
    text = own.get(_EXTRA_BODY)
    if not text:
        return {}
    try:
        body: object = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ValueError(f"{_EXTRA_BODY} must be a JSON object of fields of the request; got {text!r}")
    return cast("dict[str, Any]", body)
