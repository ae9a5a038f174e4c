"""The engines of model servers: their names, the fields that ask each for tokens, and advice where one returns none.

| engine          | chat is asked for its tokens by                            | in streams | prompt ids             |
| --------------- | ---------------------------------------------------------- | ---------- | ---------------------- |
| vLLM            | `return_token_ids`, `logprobs`                             | yes        | beside the choices     |
| SGLang          | `return_prompt_token_ids`, `return_meta_info`, `logprobs`  | no         | in each choice         |
| llama.cpp       | `logprobs`: each entry has the `id` of its token           | yes        | never                  |
| embedded engine | as vLLM                                                    | yes        | beside the choices     |

An engine is identified by the owner of its models (`GET /models`), or by `engine` in its model's entry. An unknown
one is asked as vLLM is. Sources: the request models of vLLM and SGLang (`protocol.py`), and the README of
llama.cpp's server.

Providers that speak OpenAI's or Anthropic's API have a default address, by the name that LiteLLM has before a model,
for an entry without `api_base` (sources: their API references). Any other provider is reached through the
package LiteLLM, which is loaded when an entry or a call needs it; nothing else of the gateway does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.base.process_secrets import secret

_VLLM_CHAT: Mapping[str, object] = {"return_token_ids": True, "logprobs": True}
_COMPLETIONS: Mapping[str, object] = {"return_token_ids": True, "logprobs": 1}
_SGLANG_CHAT: Mapping[str, object] = {
    "return_prompt_token_ids": True,
    "return_token_ids": True,
    "return_meta_info": True,
    "logprobs": True,
}


@dataclass(frozen=True, slots=True)
class Engine:
    """One kind of model server."""

    name: str
    """Name of the engine, for display."""
    system: str | None
    """`gen_ai.system` of its calls; None is the provider that the model's entry names."""
    advice: str
    """Advice for calls without token ids."""
    asks: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    """Fields that ask for tokens, by route. A route without an entry is not asked for tokens."""
    streams_chat_tokens: bool = True
    """False if it refuses to return the ids of tokens in a chat stream."""
    continues_messages: bool = False
    """True if it continues a last message of the assistant when asked with `continue_final_message`."""


_USE_ANOTHER = (
    "serve the model with vLLM (0.10.2 or later) or SGLang (0.5.13 or later), or give its calls an external policy"
)

VLLM = Engine(
    "vLLM",
    "hosted_vllm",
    "it gives them from 0.10.2 on when asked with 'return_token_ids', as the gateway does: use a later version",
    {"chat/completions": _VLLM_CHAT, "completions": _COMPLETIONS},
    continues_messages=True,
)
SGLANG = Engine(
    "SGLang",
    "sglang",
    "it gives them from 0.5.13 on when asked with 'return_prompt_token_ids', as the gateway does: use a later version",
    {"chat/completions": _SGLANG_CHAT, "completions": _COMPLETIONS},
    streams_chat_tokens=False,
    continues_messages=True,
)
LLAMA_CPP = Engine(
    "llama.cpp",
    "llama_cpp",
    "it gives the ids of what it generates, never those of a chat's prompt, and has no setting for it: send the prompt "
    f"as token ids to 'completions', or {_USE_ANOTHER}",
    {"chat/completions": {"logprobs": True, "top_logprobs": 1}, "completions": {"logprobs": 1}},
)
EMBEDDED = Engine(
    "the embedded engine",
    "agentlightning",
    "it gives them always: look at its log",
    {"chat/completions": _VLLM_CHAT, "completions": _COMPLETIONS},
)
OPENAI = Engine("OpenAI", "openai", f"its API has none: {_USE_ANOTHER}")
ANTHROPIC = Engine("Anthropic", "anthropic", f"its API has none: {_USE_ANOTHER}")
LITELLM = Engine("reached through LiteLLM", None, f"LiteLLM passes none on: reach the server itself, or {_USE_ANOTHER}")
OTHER = Engine(
    "an engine that is not known",
    None,
    "vLLM gives them from 0.10.2 on when asked with 'return_token_ids', as the gateway asks every engine that it does "
    f"not know: {_USE_ANOTHER}",
    {"chat/completions": _VLLM_CHAT, "completions": _COMPLETIONS},
)

LITELLM_ENGINE = "litellm"
ENGINES: Mapping[str, Engine] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "agentlightning": EMBEDDED,
    "openai": OPENAI,
    "anthropic": ANTHROPIC,
    LITELLM_ENGINE: LITELLM,
}
"""Engines by the name for a model's entry."""

_OWNERS: Mapping[str, Engine] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMA_CPP,
    "agentlightning": EMBEDDED,
    "openai": OPENAI,
    "openai-internal": OPENAI,
    "system": OPENAI,
}


def engine_of_owners(owners: Iterable[object]) -> Engine:
    """Return the engine whose models have one of these owners."""
    engines = (_OWNERS[owner] for owner in owners if isinstance(owner, str) and owner in _OWNERS)
    return next(engines, OTHER)


# --- providers -------------------------------------------------------------------------------------------------------

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
"""Known names without a default address."""


def address_of(place: str, model: str, key: str | None) -> tuple[str, str, str | None]:
    """Return the provider that a model names, its address and its key.

    As with LiteLLM, a missing key is read from `<PROVIDER>_API_KEY`, and the address of `openai/` from
    `OPENAI_BASE_URL` or `OPENAI_API_BASE`, which then needs no key. These variables stay in the environment, since the
    program may read them, too.

    Raises:
        ValueError: the address is not known, or there is no key for it; names the missing setting.
    """
    provider, slash, _ = model.partition("/")
    if provider == "azure" and slash:
        form = "https://<resource>.openai.azure.com/openai/v1"
        raise ValueError(f"{place}.api_base is missing: with 'azure/' it is the address of your resource, {form}")
    if provider not in ADDRESSES or not slash:
        names = ", ".join(f"{name}/" for name in ADDRESSES)
        raise ValueError(
            f"{place}.api_base is missing; only a model that names one of these providers needs none: {names}. Others "
            "are reached through LiteLLM: engine='litellm'"
        )
    variable = f"{provider.upper()}_API_KEY"
    key = key or os.environ.get(variable) or secret(variable)
    if provider == "openai" and (base_url := os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")):
        return provider, base_url, key
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
