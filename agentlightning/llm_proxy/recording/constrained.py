"""Which settings of a request make the model server draw tokens from another distribution than the model's own.

Under them the recorded log-probabilities are not those of the drawing: a server gives the model's own (vLLM's
`raw_logprobs`, the embedded engine), to which the learner's are compared. Training such a call is a choice; it is noted
on the call, so that the ledger can say how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentlightning.llm_proxy.dialects.json_values import Json, fields_of

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "top_p": (1,),
}
"""Settings, with the values that change nothing."""
_GRAMMARS: Final = (
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structural_tag", "structured_outputs"),
    *("ebnf", "grammar", "json_schema", "regex"),
)
"""What vLLM, SGLang and llama.cpp call a grammar in a request."""


def constrained_by(request: Json) -> list[str]:
    """Return the names of these settings in a request of any dialect, in alphabetical order."""
    found = [name for name, neutral in _NEUTRAL.items() if request.get(name) not in (None, *neutral)]
    found += [name for name in _GRAMMARS if request.get(name) is not None]
    if request.get("temperature") == 0:  # only the likeliest token; another one changes the log-probabilities too
        found.append("temperature")
    choice = request.get("tool_choice")
    if fields_of(choice).get("type", choice) in ("required", "any", "tool", "function"):
        found.append("tool_choice")
    if _is_json(request.get("response_format")):
        found.append("response_format")
    if _is_json(fields_of(request.get("text")).get("format")):
        found.append("text.format")
    output = fields_of(request.get("output_config")).get("format") or request.get("output_format")
    if _is_json(output):
        found.append("output_format")
    return sorted(found)


def _is_json(form: object) -> bool:
    return fields_of(form).get("type") in ("json_object", "json_schema")
