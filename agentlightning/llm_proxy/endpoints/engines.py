"""The engines of model servers: their names, the fields that request tokens, and advice if one returns none.

| engine          | fields that request the tokens of a chat                   | in streams | prompt ids             |
| --------------- | ---------------------------------------------------------- | ---------- | ---------------------- |
| vLLM            | `return_token_ids`, `logprobs`                             | yes        | next to the choices    |
| SGLang          | `return_prompt_token_ids`, `return_meta_info`, `logprobs`  | no         | in each choice         |
| llama.cpp       | `logprobs`: each entry has the `id` of its token           | yes        | never                  |
| embedded engine | as vLLM                                                    | yes        | next to the choices    |

An engine is identified by the owner of its models (`GET /models`), or by `engine` in its model's entry. An unknown
one gets the fields for vLLM. Sources: the request models of vLLM and SGLang (`protocol.py`), and the README of
llama.cpp's server.

Providers with OpenAI's or Anthropic's API have a default address for entries without `api_base`, by LiteLLM's prefix of
their models (sources: their API references). Any other provider is reached through the package LiteLLM, which is loaded
only if an entry or a call needs it.
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
    """`gen_ai.system` of its calls; None is the provider in the model's entry."""
    advice: str
    """Advice for calls without token ids."""
    asks: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    """Fields that request tokens, by route. For a route without an entry no tokens are requested."""
    streams_chat_tokens: bool = True
    """False if it refuses to return token ids in a chat stream."""
    continues_messages: bool = False
    """True if it continues a last message of the assistant when requested by `continue_final_message`."""


_USE_ANOTHER = (
    "serve the model with vLLM (0.10.2 or later) or SGLang (0.5.13 or later), or assign its calls to an external policy"
)

VLLM = Engine(
    "vLLM",
    "hosted_vllm",
    "vLLM returns them from version 0.10.2 if requested by 'return_token_ids', as here: update vLLM",
    {"chat/completions": _VLLM_CHAT, "completions": _COMPLETIONS},
    continues_messages=True,
)
SGLANG = Engine(
    "SGLang",
    "sglang",
    "SGLang returns them from version 0.5.13 if requested by 'return_prompt_token_ids', as here: update SGLang",
    {"chat/completions": _SGLANG_CHAT, "completions": _COMPLETIONS},
    streams_chat_tokens=False,
    continues_messages=True,
)
LLAMA_CPP = Engine(
    "llama.cpp",
    "llama_cpp",
    "llama.cpp returns the ids of generated tokens, never those of a chat's prompt: send the prompt as token ids to "
    f"'completions', or {_USE_ANOTHER}",
    {"chat/completions": {"logprobs": True, "top_logprobs": 1}, "completions": {"logprobs": 1}},
)
EMBEDDED = Engine(
    "the embedded engine",
    "agentlightning",
    "this engine always returns them: see its log",
    {"chat/completions": _VLLM_CHAT, "completions": _COMPLETIONS},
)
OPENAI = Engine("OpenAI", "openai", f"its API has none: {_USE_ANOTHER}")
ANTHROPIC = Engine("Anthropic", "anthropic", f"its API has none: {_USE_ANOTHER}")
LITELLM = Engine(
    "reached through LiteLLM", None, f"LiteLLM passes none on: call the server directly, or {_USE_ANOTHER}"
)
OTHER = Engine(
    "an unknown engine",
    None,
    "the gateway sends 'return_token_ids' to every unknown engine, which vLLM supports from version 0.10.2: "
    f"{_USE_ANOTHER}",
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
"""Engines by their name in a model's entry."""

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
    """Return the engine of models with one of these owners."""
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
"""Known providers without a default address."""


def address_of(place: str, model: str, key: str | None) -> tuple[str, str, str | None]:
    """Return the provider that a model names, its address and its key.

    As with LiteLLM, a missing key is read from `<PROVIDER>_API_KEY`, and the address of `openai/` from
    `OPENAI_BASE_URL` or `OPENAI_API_BASE`, which then needs no key. These variables stay in the environment, because
    the program may also read them.

    Raises:
        ValueError: the address or its key is missing; names the setting.
    """
    provider, slash, _ = model.partition("/")
    if provider == "azure" and slash:
        form = "https://<resource>.openai.azure.com/openai/v1"
        raise ValueError(f"{place}.api_base is missing: for 'azure/' set it to the address of your resource, {form}")
    if provider not in ADDRESSES or not slash:
        names = ", ".join(f"{name}/" for name in ADDRESSES)
        raise ValueError(
            f"{place}.api_base is missing; it can be omitted only for models with one of these prefixes: {names}. To "
            "reach other providers through LiteLLM, set engine='litellm'"
        )
    variable = f"{provider.upper()}_API_KEY"
    key = key or os.environ.get(variable) or secret(variable)
    if provider == "openai" and (base_url := os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")):
        return provider, base_url, key
    if key is None:
        raise ValueError(
            f"{place}.api_key is missing: {provider} at {ADDRESSES[provider]} requires one. Set 'api_key': "
            f"'os.environ/{variable}', which reads the variable and removes it from the environment"
        )
    return provider, ADDRESSES[provider], key


def is_reached_through_litellm(model: str, *, has_address: bool) -> bool:
    """True for a model of a provider that is registered with LiteLLM by the program, or that only LiteLLM can reach."""
    provider, slash, _ = model.partition("/")
    registered: list[dict[str, Any]] = getattr(sys.modules.get("litellm"), "custom_provider_map", None) or []
    if slash and any(entry.get("provider") == provider for entry in registered):
        return True
    if has_address or not slash or provider in ADDRESSES or provider in _OWN:
        return False
    return importlib.util.find_spec("litellm") is not None and provider in litellm_library().provider_list


def litellm_library() -> Any:
    """Load the package LiteLLM and return it."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices when imported
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm
