"""LlamaIndex: a language model with chat completions and tools, at the temperature of the run."""

from __future__ import annotations

from typing import Any

from agentlightning.integrations.packages import package_of
from agentlightning.types import LLM

_FIELDS = ("temperature", "max_tokens")
"""Sampling parameters that are fields of LlamaIndex; all others go into `additional_kwargs`."""


def llama_index_llm(llm: LLM, **settings: Any) -> Any:
    """Return an `OpenAILike` for this attempt that uses chat and tool calls.

    By default, `OpenAILike` uses text completions, assumes that the model has no tools, and sends
    `temperature=0.1`, at which the rollouts of a group hardly differ. Here the temperature is that of
    `llm.sampling_parameters`, or 1.0 without one. `settings` are those of `OpenAILike`, such as `context_window`
    (tokens; 3900 by default), and take precedence.

    Raises:
        ImportError: llama-index-llms-openai-like is not installed.
        ValueError: `settings` set another model, address or key.
    """
    module = package_of("llama_index_llm", "llama_index.llms.openai_like", "llama-index-llms-openai-like")
    if conflicts := sorted({"model", "api_base", "api_key"} & set(settings)):
        raise ValueError(
            f"llama_index_llm uses {', '.join(conflicts)} of the attempt's llm. "
            "Remove the setting, or create an OpenAILike."
        )
    sampling = dict(llm.sampling_parameters)
    own = {name: sampling.pop(name) for name in _FIELDS if name in sampling}
    return module.OpenAILike(
        model=llm.model,
        api_base=llm.get_base_url(),
        api_key=llm.api_key or "unused",
        **{
            "is_chat_model": True,
            "is_function_calling_model": True,
            "temperature": 1.0,
            **own,
            **settings,
            "additional_kwargs": {**sampling, **settings.get("additional_kwargs", {})},
        },
    )
