"""Masking of secrets in data before it is written for others: settings, metrics, texts, attributes of spans.

A secret is recognised in three ways: by its name, by its shape (`texts.py`), and by its value, if this process uses it
or if a variable of its environment has the name of a secret. Names and shapes work on a best-effort basis; a value that
this process knows to be secret is found anywhere in a text.

Names of secrets are, for example, `api_key`, `http.request.header.authorization`, `clientSecret`. Counts and lists of a
model's tokens (`gen_ai.usage.prompt_tokens`, `token_ids`), its special tokens (`eos_token`) and the tokens of its
log-probabilities are not secret. A secret under an unexpected name is shown.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from agentlightning.base.process_secrets import held_values
from agentlightning.utils.texts import mended, without_keys

HIDDEN = "[hidden]"
_LONGEST = 200
_DEEPEST = 32
"""Levels of a value that are inspected; deeper values are hidden completely."""
_READ = 16 * 1024
"""Maximum length of a text that is searched for names."""
_SECRET = re.compile(
    r"(?:^|[^a-z0-9])"
    r"(?:(?:api|access|private|secret|signing|encryption|account|subscription|master|shared)[._-]?keys?"
    r"|x[_-](?:[a-z0-9]+[_-]){1,4}key"
    r"|secrets?|passwords?|passwd|passphrase|pwd|pass|(?:proxy[_-])?authorization|auth|bearer|jwt|dsn|sas"
    r"|credentials?|(?:set[_-])?cookies?|session|sessionid|connection[_-]?string|token)"
    r"(?:\.\d+)*$"
)
_MODEL_TOKEN = re.compile(
    r"(?:logprobs?\b.*|(?:^|[^a-z0-9])(?:eos|bos|pad|unk|sep|cls|mask|stop|next|special|first|last|image|audio))[._-]?token$"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_QUERY = frozenset(("key", "sig", "signature", "x-amz-signature", "x-goog-signature"))
_PASSWORD_IN_URL = re.compile(r"(://[^\s/@:?#\"'<>]{0,256}:)[^\s/@\"'<>]{1,256}(?=@)")
_USER_IN_URL = re.compile(r"(https?://)[^\s/@:?#\"'<>]{1,2048}:?(?=@)", re.IGNORECASE)
"""A user without a password in a URL, which may be a token."""
_NAME = re.compile(r"""(?P<mark>[?&])?(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,63})(?:\\{0,3}["'])?\s{0,3}[=:](?!//)\s{0,3}""")
_VALUE = re.compile(
    r"""(?:"(?:[^"\\]|\\.){1,16384}(?:"|\\?$)|'(?:[^'\\]|\\.){1,16384}(?:'|\\?$)|\\{1,3}["'][^"'\\]{1,16384}"""
    r"""|(?:[Bb]earer|[Bb]asic|[Tt]oken)\s{1,3}[^\s,;&"']{1,16384}|[^\s,;&"'{\[\\]{1,16384})"""
)
"""A value after a name; a truncated text may end within it."""
_SOURCE = re.compile(r'^[ |]*File "[^"\n]*", line \d+.*(?:\n[ |]* {4}.*)+', re.MULTILINE)
"""A frame of a traceback with its lines of source code."""
_ATTRIBUTE = re.compile(r"(?:[A-Za-z_]\w*\.)+(\w+)(?=[\s),]|$)")
_TEXT_OF_MODELS = ("gen_ai.", "llm.", "agentlightning.")
"""Attributes with texts of agent and model, which are trained on: names within these texts are not masked."""
_SHORTEST = 8
"""Minimum number of characters of a searched value: `yes` in a variable `USE_AUTH` is not a secret."""
_NO_SECRETS = ("PWD", "SESSION")
"""Endings of variable names that every shell or desktop sets."""


def masked(value: object) -> Any:
    """Return a copy of JSON data in which secrets are hidden; tuples become lists, keys become strings."""
    return _masked(value, _known_secrets())


def masked_text(text: str) -> str:
    """Return a text in which secrets are hidden."""
    return cast(str, masked({"text": text})["text"])


def _masked(value: object, secrets: tuple[str, ...]) -> Any:
    named = without_secrets({"": value})
    return _hide_values(value if named is None else named[""], secrets)


def _hide_values(value: object, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        text = without_keys(mended(value))
        for secret in secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        return text
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return {_hide_values(str(key), secrets): _hide_values(item, secrets) for key, item in entries.items()}
    if isinstance(value, (list, tuple)):
        return [_hide_values(item, secrets) for item in cast("list[object]", value)]
    return value


def _known_secrets() -> tuple[str, ...]:
    """Return the secret values that this process knows, the longest first: one may be a part of another."""
    named = {
        value
        for name, value in os.environ.items()
        if looks_secret(name) and not name.endswith(_NO_SECRETS) and not (value[:1] == "/" and os.path.exists(value))
    }
    return tuple(sorted((v for v in named | held_values() if len(v) >= _SHORTEST), key=len, reverse=True))


# --- names of secrets ------------------------------------------------------------------------------------------------


def looks_secret(name: str) -> bool:
    """Return True if a value with this name is likely a secret, judged by the end of the name."""
    return _judge(name if len(name) <= _LONGEST else name[-_LONGEST:])


@lru_cache(maxsize=4096)
def _judge(name: str) -> bool:
    plain = _CAMEL.sub("_", name).lower()
    return _SECRET.search(plain) is not None and _MODEL_TOKEN.search(plain) is None


def without_secrets(values: Mapping[str, object]) -> dict[str, object] | None:
    """Return a copy in which the values of secret names, in mappings, lists, pairs of a header, addresses and short
    texts, are replaced with `[hidden]`; None without such values.

    Numbers, bools and None are never secrets and are kept.
    """
    hidden: dict[str, object] = {}
    for name, value in values.items():
        replaced = _hide(name, value, _DEEPEST)
        if replaced is not value:
            hidden[name] = replaced
    for name in _named_elsewhere(values):
        if isinstance(values[name], (str, list, tuple)):
            hidden[name] = HIDDEN
    return {**values, **hidden} if hidden else None


def _hide(name: str, value: object, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if looks_secret(name):
        return HIDDEN
    if isinstance(value, str):
        return value if name.startswith(_TEXT_OF_MODELS) else _hide_in_text(value)
    return _hide_within(name, value, depth)


def _hide_within(name: str, value: object, depth: int) -> Any:
    if isinstance(value, Mapping):
        if depth <= 0:
            return HIDDEN
        values = cast("Mapping[str, Any]", value)
        of_a_model = "logprob" in values
        names = {key: name if of_a_model and key == "token" else str(key) for key in values}
        entries = {key: _hide(names[key], each, depth - 1) for key, each in values.items()}
        entries |= dict.fromkeys(_named_elsewhere(values), HIDDEN)
        return entries if any(entries[key] is not values[key] for key in values) else values
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        if not items or isinstance(items[0], (bool, int, float)):
            return cast(Any, value)
        if depth <= 0:
            return HIDDEN
        if len(items) == 2 and isinstance(items[0], str) and looks_secret(items[0]):  # a header as a pair
            return [items[0], HIDDEN]
        hidden = [_hide(name, item, depth - 1) for item in items]
        changed = any(new is not old for new, old in zip(hidden, items, strict=True))
        return hidden if changed else cast(Any, value)
    return value


def _named_elsewhere(values: Mapping[str, object]) -> list[str]:
    """Return the keys that another key names: `{"name": "Authorization", "value": ...}`, `h.0.0` next to `h.0.1`."""
    keys: list[str] = []
    for key, value in values.items():
        if isinstance(value, str) and len(value) <= _LONGEST:
            place, dot, last = str(key).rpartition(".")
            other = {"name": "value", "key": "value", "header": "value", "0": "1"}.get(last)
            if other is not None and f"{place}{dot}{other}" in values and looks_secret(value):
                keys.append(f"{place}{dot}{other}")
    return keys


# --- names within texts ----------------------------------------------------------------------------------------------


def _hide_in_text(text: str) -> str:
    """Hide named values: JSON, `password=...`, `Authorization: Bearer ...`, `?key=...`, `user:password@`, `https://token@`."""
    if len(text) > _READ or not ("=" in text or ":" in text):
        return text
    if text[:1] in ("{", "["):
        try:
            read: Any = json.loads(text)
            within = _hide_within("", read, _DEEPEST)
        except (ValueError, RecursionError):  # no JSON
            pass
        else:
            return text if within is read else json.dumps(within, ensure_ascii=False)
    without_user = _USER_IN_URL.sub(lambda match: match[1] + HIDDEN, text)
    hidden = _hide_named(_PASSWORD_IN_URL.sub(lambda match: match[1] + HIDDEN, without_user))
    return text if hidden == text else hidden


def _hide_named(text: str) -> str:
    """Hide the values of secret names; the value of another name may contain names, as in `failed: api_key=...`.

    In the source code of a traceback, `api_key=llm.api_key` stays: an attribute with the same name is not a value.
    """
    parts: list[str] = []
    sources = [source.span() for source in _SOURCE.finditer(text)]
    done = at = 0
    while (match := _NAME.search(text, at)) is not None:
        name, at = match["name"], match.end()
        if not (looks_secret(name) or (match["mark"] is not None and name.lower() in _IN_QUERY)):
            continue
        attribute = _ATTRIBUTE.match(text, at)
        is_same_name = attribute is not None and attribute[1] == name.rpartition(".")[2]
        if is_same_name and any(begin < at < end for begin, end in sources):
            continue
        value = _VALUE.match(text, at)
        if value is not None and not value[0].startswith(HIDDEN):
            quote = value[0][0] if value[0][0] in "\"'" else ""
            parts += (text[done:at], f"{quote}{HIDDEN}{quote}")
            done = at = value.end()
    return "".join((*parts, text[done:]))
