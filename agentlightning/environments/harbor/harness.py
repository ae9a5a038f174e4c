"""What each harness needs to call the model of an attempt: Harbor's `AgentConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from agentlightning.litagent.command.attempt_folder import NO_KEY
from agentlightning.types import LLM

ApiFormat = Literal["openai_chat_completions", "openai_responses", "anthropic_messages"]

BUILT_IN = ("oracle", "nop")
"""Agents of Harbor that are no programs: the solution of the task, and nothing."""
_QUIET = {
    **{"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    **{"OPENCODE_DISABLE_AUTOUPDATE": "1", "MSWEA_COST_TRACKING": "ignore_errors"},
}
"""Variables that keep agents in a sandbox from requests of their own."""
_FORMATS: Mapping[str, ApiFormat] = {"claude-code": "anthropic_messages", "codex": "openai_responses"}
_PROVIDERS = {"opencode": "agl", "opencode-v2": "agl"}
"""Agents for which `openai` means OpenAI itself; any other name means a compatible server."""


def agent_fields(
    own: Mapping[str, Any], model: LLM | None, api_format: ApiFormat | None, *, installs: bool
) -> dict[str, Any]:
    """Return the fields of Harbor's `AgentConfig` for one attempt.

    Args:
        own: the fields that the user has set, with `name` or `import_path`.
        model: the model for the harness; None for an agent that calls none.
        api_format: the API that the harness calls; None for its usual one.
        installs: whether Harbor installs the harness in the sandbox, unless `own` says otherwise.
    """
    name, fields = str(own.get("name") or own.get("import_path")), dict(own)
    if not installs and own.get("name") not in (None, *BUILT_IN):
        fields["kwargs"] = {"skip_install": True, **own.get("kwargs", {})}
    if model is None:
        return fields
    base = model.get_base_url()
    api_format = api_format or _FORMATS.get(name, "openai_chat_completions")
    if api_format == "anthropic_messages":
        key_name, provider = "ANTHROPIC_API_KEY", "anthropic"
        base = base.removesuffix("/").removesuffix("/v1")  # its clients add /v1/messages
    else:
        key_name, provider = "OPENAI_API_KEY", _PROVIDERS.get(name, "openai")
    fields["env"] = {**_QUIET, **own.get("env", {}), key_name: model.api_key or NO_KEY}
    fields.setdefault("model_name", f"{provider}/{model.model}")
    if "import_path" in own:  # a class of the user's, which need not support Harbor's fields for the model
        url = "ANTHROPIC_BASE_URL" if key_name == "ANTHROPIC_API_KEY" else "OPENAI_BASE_URL"
        fields["env"][url] = base
        return fields
    if name == "codex":
        fields["kwargs"] = _with_provider(fields.get("kwargs", {}), base, key_name)
    return {"base_url": base, "model_api_key_name": key_name, "model_api_format": api_format, **fields}


def _with_provider(kwargs: Mapping[str, Any], base: str, key_name: str) -> dict[str, Any]:
    """Return the arguments of codex with a provider that is not OpenAI, so that the model itself writes summaries."""
    provider = {"name": "agl", "base_url": base, "env_key": key_name, "wire_api": "responses"}
    config = kwargs.get("config", {})
    if not isinstance(config, Mapping):  # the path of a file
        return dict(kwargs)
    own = cast("Mapping[str, Any]", config)
    providers = {"agl": provider, **own.get("model_providers", {})}
    return {**kwargs, "config": {"model_provider": "agl", **own, "model_providers": providers}}
