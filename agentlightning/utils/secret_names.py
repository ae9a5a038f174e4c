"""Names that look as if a secret were behind them: `api_key`, `http.request.header.authorization`, `clientSecret`.

Counts and lists of a model's tokens (`gen_ai.usage.prompt_tokens`, `token_ids`) are no such names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

HIDDEN = "[hidden]"
_LONGEST = 200
_SECRET = re.compile(
    r"(?:^|[^a-z0-9])"
    r"(?:(?:api|access|private|secret|signing|encryption|account|subscription)[._-]?key"
    r"|secret|password|passwd|passphrase|authorization|credentials?|(?:set[_-])?cookie"
    r"|(?:access|refresh|auth|id|session|bearer|api|bot|hf|hub|github|gitlab|agl|personal)[._-]?token)"
    r"(?:\.\d+)*$"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def looks_secret(name: str) -> bool:
    """True if what stands under this name is likely a secret; judged by the end of the name."""
    return _judge(name if len(name) <= _LONGEST else name[-_LONGEST:])


@lru_cache(maxsize=4096)
def _judge(name: str) -> bool:
    return _SECRET.search(_CAMEL.sub("_", name).lower()) is not None


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a copy in which what stands under such names, at any depth, is `[hidden]`; None if nothing does.

    Numbers, bools and None stay: no secret is one.
    """
    hidden: dict[str, Any] = {}
    for name, value in values.items():
        replaced = _hide(name, value)
        if replaced is not value:
            hidden[name] = replaced
    return {**values, **hidden} if hidden else None


def _hide(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if looks_secret(name):
        return HIDDEN
    if isinstance(value, Mapping):
        return without_secrets(cast("Mapping[str, Any]", value)) or cast(Any, value)
    return value
