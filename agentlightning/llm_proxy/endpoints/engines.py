"""The engines of model servers: their names, the fields that ask each for tokens, and advice where one gives none.

| engine          | chat is asked for its tokens by                            | in streams | prompt ids             |
| --------------- | ---------------------------------------------------------- | ---------- | ---------------------- |
| vLLM            | `return_token_ids`, `logprobs`                             | yes        | beside the choices     |
| SGLang          | `return_prompt_token_ids`, `return_meta_info`, `logprobs`  | no         | in each choice         |
| llama.cpp       | `logprobs`: each entry has the `id` of its token           | yes        | never                  |
| embedded engine | as vLLM                                                    | yes        | beside the choices     |

An engine is known by the owner that it gives its models (`GET /models`), or by `engine` in its model's entry. One that
is not known is asked as vLLM is. Sources: the request models of vLLM and SGLang (`protocol.py`), and the README of
llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    """For people."""
    system: str | None
    """`gen_ai.system` of its calls; None is the provider that the model's entry names."""
    advice: str
    """What to do where its calls have no token ids."""
    asks: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    """By route: the fields that ask for tokens. A route that is not there is asked for none."""
    streams_chat_tokens: bool = True
    """False refuses to give the ids of tokens in a chat stream."""
    continues_messages: bool = False
    """True goes on with a last message of the assistant when asked with `continue_final_message`."""


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
"""By the name that a model's entry may give."""

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
    """Return the engine that names these as the owners of its models."""
    known = (_OWNERS[owner] for owner in owners if isinstance(owner, str) and owner in _OWNERS)
    return next(known, OTHER)
