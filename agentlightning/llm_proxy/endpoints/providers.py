"""Addresses of providers that speak OpenAI's or Anthropic's API, by the name that LiteLLM has before a model.

They stand where an entry gives no `api_base`. Sources: the providers' API references.
"""

from __future__ import annotations

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


def address_of(place: str, model: str, key: object) -> tuple[str, str]:
    """Return the provider that a model names, and its address.

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
    if key is None:
        variable = f"{provider.upper()}_API_KEY"
        raise ValueError(
            f"{place}.api_key is missing: {provider} at {ADDRESSES[provider]} asks for one; write "
            f"'api_key': 'os.environ/{variable}', which takes it out of the environment"
        )
    return provider, ADDRESSES[provider]
