"""What is kept of prompts and replies: the user's choice, made before anything leaves the process.

Whatever the choice, keys that are known by their shape are hidden before (`recorder.py`); token ids stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from agentlightning.semconv import LightningCallAttributes
from agentlightning.store.rules.values import evolve
from agentlightning.types import Span, TraceStatus

Kept = Literal["all", "tokens", "counts"]
"""`tokens`: token ids and log-probabilities, no text; `counts`: how many, how long, which model, how it ended."""
Redact = Callable[[Span], Span]

_TEXT = ("gen_ai.prompt.", "gen_ai.completion.", "llm.request.functions.", "llm.hosted_vllm.", "error.message")
_SHORT = (".role", ".finish_reason", ".id", ".model")
"""Ends of keys below `_TEXT` that say nothing of what was said."""
_TOKENS = (
    LightningCallAttributes.PROMPT_TOKEN_IDS.value,
    LightningCallAttributes.COMPLETION_TOKEN_IDS.value,
    LightningCallAttributes.COMPLETION_LOGPROBS.value,
)
_COUNTS = {
    LightningCallAttributes.PROMPT_TOKEN_IDS.value: LightningCallAttributes.PROMPT_TOKENS.value,
    LightningCallAttributes.COMPLETION_TOKEN_IDS.value: LightningCallAttributes.COMPLETION_TOKENS.value,
}


class Privacy:
    """Takes out of the spans of a call what is not to be kept.

    Raises:
        ValueError: `keep` is none of the choices.
    """

    def __init__(self, keep: Kept = "all", redact: Redact | None = None) -> None:
        if keep not in get_args(Kept):
            raise ValueError(f"keep must be one of {', '.join(get_args(Kept))}; got {keep!r}")
        self._keep: Kept = keep
        self._redact = redact

    def apply(self, spans: Sequence[Span]) -> list[Span]:
        """Return what may leave the process. An error of the user's function passes: then nothing leaves."""
        kept = [span if self._keep == "all" else _without_text(span, self._keep) for span in spans]
        return kept if self._redact is None else [self._redact(span) for span in kept]


def _without_text(span: Span, keep: Kept) -> Span:
    left_out = _TOKENS if keep == "counts" else ()
    attributes = {
        key: value
        for key, value in span.attributes.items()
        if key not in left_out and (not key.startswith(_TEXT) or key.endswith(_SHORT))
    }
    if keep == "counts":
        for key, count in _COUNTS.items():
            if isinstance(ids := span.attributes.get(key), (list, tuple)):
                attributes[count] = len(ids)
    status = TraceStatus(status_code=span.status.status_code)
    return evolve(span, attributes=attributes, status=status)
