"""What is hidden of data before it is written down for others: settings, figures and texts of a training run.

Three ways to know a secret work together: the name under which it stands (`secret_names.py`), its shape (`texts.py`),
and its value, where this process holds it or its environment names it as one. Names and shapes are a courtesy; a value
that this process knows to be secret is found wherever it stands in a text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from agentlightning.process_secrets import held_values
from agentlightning.utils.secret_names import HIDDEN, looks_secret, without_secrets
from agentlightning.utils.texts import mended, without_keys

_SHORTEST = 8
"""Characters of the shortest value that is looked for: `yes` in a variable `USE_AUTH` is no secret."""
_NO_SECRETS = ("PWD", "SESSION")
"""Ends of names of variables that every shell or desktop sets."""


def masked(value: object) -> Any:
    """Return a copy of JSON data in which secrets are hidden; tuples become lists, keys become texts."""
    return _masked(value, _known_secrets())


def masked_text(text: str) -> str:
    """Return a text in which secrets are hidden."""
    return cast(str, masked({"text": text})["text"])


def _masked(value: object, known: tuple[str, ...]) -> Any:
    named = without_secrets({"": value})
    return _hide_values(value if named is None else named[""], known)


def _hide_values(value: object, known: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        text = without_keys(mended(value))
        for secret in known:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        return text
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return {_hide_values(str(key), known): _hide_values(item, known) for key, item in entries.items()}
    if isinstance(value, (list, tuple)):
        return [_hide_values(item, known) for item in cast("list[object]", value)]
    return value


def _known_secrets() -> tuple[str, ...]:
    """Return the secret values that this process knows, the longest first: one may be a part of another."""
    named = {
        value
        for name, value in os.environ.items()
        if looks_secret(name) and not name.endswith(_NO_SECRETS) and not (value[:1] == "/" and os.path.exists(value))
    }
    return tuple(sorted((v for v in named | held_values() if len(v) >= _SHORTEST), key=len, reverse=True))
