"""Token ids and log-probabilities in a choice of a reply, in the formats of the engines that return them.

- vLLM, and SGLang's completions: `token_ids` in the choice; the prompt's next to the choices or in each.
- SGLang's chat: `token_ids`, else `meta_info.output_token_logprobs` with [log-probability, id, text] per token.
- llama.cpp: `logprobs.content` with an `id` in each entry; none for the prompt.

Log-probabilities are in `logprobs`: a list of entries (`content`) or parallel lists (`token_logprobs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agentlightning.llm_proxy.dialects.json_values import Json, entries_of, is_list, object_in, objects

_LARGEST_ID = 2**31 - 1
_ROUNDED = 1e-3
"""Largest excess above 0 of a rounded log-probability."""
IDS = ("prompt_token_ids", "token_ids")


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of the prompt and the completion, with the model server's ids."""

    prompt_token_ids: list[int]
    """Empty if the server never returns them."""
    completion_token_ids: list[int]
    logprobs: list[float] | None
    """(len(completion_token_ids),) natural logarithm; None if missing or unusable."""
    contradicts: bool = False
    """True if the numbers of log-probabilities and of tokens differ."""


def tokens_in(choice: Json, prompt_ids: object) -> CallTokens | None:
    """Return the tokens of a call; None unless those of the prompt and of the completion are present.

    If the engine never returns the tokens of a prompt, the prompt of the result is empty.
    """
    prompt, completion = token_ids(prompt_ids), token_ids(choice.get("token_ids"))
    raw_triples = object_in(choice, "meta_info").get("output_token_logprobs")
    triples = (
        raw_triples if is_list(raw_triples) and all(len(entries_of(triple)) >= 2 for triple in raw_triples) else None
    )
    if completion is None and triples is not None:
        completion = token_ids([triple[1] for triple in triples])
    if completion is not None:
        return CallTokens(prompt, completion, *_logprobs(choice, triples, len(completion))) if prompt else None
    entries = objects(object_in(choice, "logprobs").get("content"))
    completion = token_ids([entry.get("id") for entry in entries]) if entries else None
    if completion is None:
        return None
    return CallTokens(prompt or [], completion, *_logprobs(choice, None, len(completion)))


def token_ids(value: object) -> list[int] | None:
    """Return a list of token ids; None for any other value."""
    if not is_list(value):
        return None
    fit = set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) <= _LARGEST_ID
    return value if fit else None


def _logprobs(choice: Json, triples: list[list[Any]] | None, length: int) -> tuple[list[float] | None, bool]:
    """Return the log-probabilities and False; None if one is not finite or not the logarithm of a probability.

    None and True if the server returned another number of them.
    """
    fields = object_in(choice, "logprobs")
    content, values = fields.get("content"), fields.get("token_logprobs")
    entries = objects(content)
    if is_list(content) and len(entries) == len(content):
        values = [entry.get("logprob") for entry in entries]
    numbers = entries_of(values)
    if len(numbers) != length and triples is not None:
        numbers = [triple[0] for triple in triples]
    if len(numbers) != length:
        return None, bool(numbers)
    if not set(map(type, numbers)) <= {int, float}:
        return None, False
    try:
        numbers = list(map(float, numbers))
    except OverflowError:  # an integer too large for a float
        return None, False
    fit = all(map(math.isfinite, numbers)) and max(numbers, default=0.0) <= _ROUNDED
    return (numbers if fit else None), False
