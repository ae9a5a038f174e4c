"""Token ids and log-probabilities of a chat reply, as the span attributes that adapters read; whole or in chunks.

Engines put them in one of several places. Only the first choice is read, as adapters do; nothing here raises.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from agentlightning.types import Attributes

PROMPT_IDS, RESPONSE_IDS = "prompt_token_ids", "response_token_ids"
LOGPROBS = "logprobs.content"
TOKEN_FIELDS = frozenset((PROMPT_IDS, RESPONSE_IDS, LOGPROBS))


def token_attributes(reply: object) -> Attributes:
    """Return the attributes for a whole reply: a model of the client library or its JSON."""
    tokens = ReplyTokens()
    tokens.add(reply)
    return tokens.attributes()


class ReplyTokens:
    """Collects the tokens of a whole reply, or of the chunks of a stream."""

    def __init__(self) -> None:
        self._prompt: list[int] = []
        self._response: list[int] = []
        self._logprobs: list[object] = []

    def add(self, reply: object) -> None:
        """Take a chunk, or a whole reply."""
        fields = fields_of(reply)
        choice = fields_of(next(iter(entries(fields.get("choices"))), None))
        own = choice.get("provider_specific_fields")
        self._prompt = self._prompt or _ids(fields.get("prompt_token_ids"))
        self._response += (
            _ids(next(iter(entries(fields.get("response_token_ids"))), None))
            or _ids(choice.get("token_ids"))
            or _ids(fields_of(own).get("token_ids"))
        )
        self._logprobs += entries(fields_of(choice.get("logprobs")).get("content"))

    def attributes(self) -> Attributes:
        """Return what was found; nothing for what was not."""
        found: Attributes = {}
        if self._prompt:
            found[PROMPT_IDS] = self._prompt
        if self._response:
            found[RESPONSE_IDS] = self._response
        if self._logprobs:
            found[LOGPROBS] = json.dumps(self._logprobs, default=str)
        return found


def fields_of(value: object) -> Mapping[str, Any]:
    """Return a JSON object, or the fields of a model with those that the client library does not know."""
    if isinstance(value, Mapping):
        return cast(Mapping[str, Any], value)
    dump = getattr(value, "model_dump", None)
    if not callable(dump):
        return {}
    try:
        dumped = dump(mode="json", warnings=False)
    except Exception:  # a foreign model's own error: such a reply has no tokens to read
        return {}
    return cast(Mapping[str, Any], dumped) if isinstance(dumped, Mapping) else {}


def entries(value: object) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def _ids(value: object) -> list[int]:
    ids = entries(value)
    return list(ids) if all(type(item) is int for item in ids) else []
