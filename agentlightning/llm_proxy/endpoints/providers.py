"""Addresses of providers that speak OpenAI's or Anthropic's API, by the name that LiteLLM has before a model.

They stand where an entry gives no `api_base`. Sources: the providers' API references. Any other provider is reached
through the package LiteLLM, which is loaded when an entry or a call needs it; nothing else of the gateway does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from agentlightning.process_secrets import secret

ADDRESSES: dict[str, str] = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com/v1",
    "gemini": "https://generativelanguage.googleapis.com/v1beta/openai",
    "groq": "https://api.groq.com/openai/v1",
    "mistral": "https://api.mistral.ai/v1",
    "deepseek": "https://api.deepseek.com/v1",
    "together_ai": "https://api.together.xyz/v1",
    "openrouter": "https://openrouter.ai/api/v1",
    "fireworks_ai": "https://api.fireworks.ai/inference/v1",
    "xai": "https://api.x.ai/v1",
    "perplexity": "https://api.perplexity.ai",
    "cerebras": "https://api.cerebras.ai/v1",
    "nvidia_nim": "https://integrate.api.nvidia.com/v1",
}


_OWN = ("hosted_vllm", "azure")
"""Known names without an address of their own."""


def address_of(place: str, model: str, key: str | None) -> tuple[str, str, str | None]:
    """Return the provider that a model names, its address and its key.

    As with LiteLLM, a missing key is read from `<PROVIDER>_API_KEY`, and the address of `openai/` from
    `OPENAI_BASE_URL` or `OPENAI_API_BASE`, which then needs no key. These variables stay in the environment, since the
    program may read them, too.

    Raises:
        ValueError: the address is not known, or there is no key for it; says what to give.
    """
    provider, slash, _ = model.partition("/")
    if provider == "azure" and slash:
        form = "https://<resource>.openai.azure.com/openai/v1"
        raise ValueError(f"{place}.api_base is missing: with 'azure/' it is the address of your resource, {form}")
    if provider not in ADDRESSES or not slash:
        known = ", ".join(f"{name}/" for name in ADDRESSES)
        raise ValueError(
            f"{place}.api_base is missing; only a model that names one of these providers needs none: {known}. Others "
            "are reached through LiteLLM: engine='litellm'"
        )
    variable = f"{provider.upper()}_API_KEY"
    key = key or os.environ.get(variable) or secret(variable)
    if provider == "openai" and (own := os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")):
        return provider, own, key
    if key is None:
        raise ValueError(
            f"{place}.api_key is missing: {provider} at {ADDRESSES[provider]} asks for one; write "
            f"'api_key': 'os.environ/{variable}', which takes it out of the environment"
        )
    return provider, ADDRESSES[provider], key


def is_reached_through_litellm(model: str, *, has_address: bool) -> bool:
    """True for a model whose provider the program has registered with LiteLLM, or that only LiteLLM can reach."""
    provider, slash, _ = model.partition("/")
    registered: list[dict[str, Any]] = getattr(sys.modules.get("litellm"), "custom_provider_map", None) or []
    if slash and any(entry.get("provider") == provider for entry in registered):
        return True
    if has_address or not slash or provider in ADDRESSES or provider in _OWN:
        return False
    return importlib.util.find_spec("litellm") is not None and provider in litellm_library().provider_list


def litellm_library() -> Any:
    """Return the package LiteLLM, loaded."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices when imported
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm
