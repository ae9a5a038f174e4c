"""Stores as strings: change one string to move from a laptop to a cluster.

    memory                            sqlite:///run.db               mongodb://host/database
    http://127.0.0.1:4747             sqlite:////var/lib/run.db      postgresql://user:password@host/database

Settings follow a `?`: `sqlite:///run.db?synchronous=NORMAL`. The settings of each form are in `_KINDS`. In the URI of a
database, all other settings are passed to its driver. The package for a form is imported when a store is created.
"""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote_plus

from pydantic import ValidationError

from agentlightning.base.process_secrets import hide
from agentlightning.errors import BadRequestError, closest_name
from agentlightning.store.base import LightningStore
from agentlightning.types import RetentionPolicy
from agentlightning.utils.texts import is_file_name, without_password

FORMS = (
    "memory",
    "sqlite:///run.db",
    "mongodb://host/database",
    "postgresql://host/database",
    "http://127.0.0.1:4747",
)
"""One example of each supported form."""

_RETENTION = ("keep_last", "max_age", "max_bytes", "max_run_age")
_Settings = dict[str, Any]
"""Keyword arguments of a store's class."""
_Value = Literal["a number", "a whole number", "text"]
_OF_EVERY_ENGINE: dict[str, _Value] = {
    "lease_seconds": "a number",
    "keep_last": "a whole number",
    "max_age": "a number",
    "max_bytes": "a whole number",
    "max_run_age": "a number",
}
_OF_MEMORY: dict[str, _Value] = {
    "max_span_bytes": "a whole number",
    "max_decoded_span_bytes": "a whole number",
    "max_record_bytes": "a whole number",
}


def is_store_spec(text: str) -> bool:
    """Return True if the string is no import path: it is a store spec, or names a file, which a spec may name."""
    body = text.partition("?")[0]
    return body == "memory" or ":" in text or is_file_name(body)


def store_from_spec(spec: str | LightningStore, **settings: Any) -> LightningStore:
    """Return the store for a string; a store is returned unchanged.

    `sqlite:///run.db` is a file in the current folder, `sqlite:////var/run.db` is an absolute path. `settings` are
    additional keyword arguments for the store's class.

    Raises:
        BadRequestError: the string has none of the supported forms (the message lists them), or a setting is unknown,
            has a wrong value or is set twice.
        MissingExtraError: the driver of the database is not installed; the message has the command that installs it.
    """
    if isinstance(spec, LightningStore):
        if settings:
            raise TypeError(f"{type(spec).__name__} already exists; pass {', '.join(settings)} when you create it")
        return spec
    body, _, query = spec.partition("?")
    scheme = body if body == "memory" else body.partition("://")[0]
    kind = _KINDS.get(scheme)
    if kind is None or not kind.address.fullmatch(body):
        guess = _closest(public_form(spec))
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise BadRequestError(f"{public_form(spec)!r} is not a store; expected one of: {', '.join(FORMS)}{hint}")
    own, foreign = _read_settings(kind, query)
    twice = sorted(own.keys() & settings.keys())
    if twice:
        raise BadRequestError(f"{', '.join(twice)} is set twice: in {public_form(spec)!r} and as an argument")
    if (password := re.search(r"://[^:/@]*:(.*)@", body)) is not None:
        hide(password[1])
    return kind.make("?".join(filter(None, (body, foreign))), {**own, **settings})


def spec_of(text: str) -> str:
    """Return the spec for a command line value: the value itself, or the SQLite file with this name."""
    match = re.match(r"(\w+):", text)
    meant = match and closest_name(match[1].lower(), _KINDS)
    return text if "://" in text or meant or text.partition("?")[0] == "memory" else f"sqlite:///{text}"


def database_of(spec: str) -> tuple[str, str]:
    """Return the URI for the driver and the partition in the spec of a database."""
    body, _, query = spec.partition("?")
    own, foreign = _read_settings(_KINDS[body.partition("://")[0]], query)
    return "?".join(filter(None, (body, foreign))), own.get("partition", "default")


def public_form(spec: str) -> str:
    """Return a spec for display, without its settings and its password."""
    return without_password(spec.partition("?")[0])


# --- settings ------------------------------------------------------------------------------------------------------


def _read_settings(kind: _Kind, query: str) -> tuple[_Settings, str]:
    """Return the settings in a query string as keyword arguments, and the other parts for the driver."""
    settings: _Settings = {}
    foreign: list[str] = []
    for piece in filter(None, query.split("&")):
        name, _, text = piece.partition("=")
        name = unquote_plus(name)
        if name in kind.settings:
            if name in settings:
                raise BadRequestError(f"{name} is set twice in the settings of a store of the form {kind.example}")
            settings[name] = _read(name, kind.settings[name], unquote_plus(text))
        else:
            near = closest_name(name, kind.settings, cutoff=0.75)
            if near or not kind.has_driver:
                hint = f"did you mean {near!r}?" if near else f"it has: {', '.join(kind.settings)}"
                raise BadRequestError(f"A store of the form {kind.example} has no setting {name!r}; {hint}")
            foreign.append(piece)
    bounds = {name: settings.pop(name) for name in _RETENTION if name in settings}
    if bounds:
        settings["retention"] = retention_policy(**bounds)
    return settings, "&".join(foreign)


def _read(name: str, expected: _Value, text: str) -> str | float:
    try:
        value = text if expected == "text" else int(text) if expected == "a whole number" else float(text)
    except ValueError:
        value = None
    if value is None or value == "" or value in (math.inf, -math.inf) or value != value:
        raise BadRequestError(f"{name}={text!r} in a store's settings: expected {expected}")
    return value


def retention_policy(**bounds: Any) -> RetentionPolicy:
    """Return the policy with these limits.

    Raises:
        BadRequestError: a limit is negative.
    """
    try:
        return RetentionPolicy(**bounds)
    except ValidationError as error:
        wrong = [f"{detail['loc'][0]}={detail['input']!r}: {detail['msg']}" for detail in error.errors()]
        raise BadRequestError(f"Wrong retention policy: {'; '.join(wrong)}") from None


# --- the forms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """One form of address, its settings, and the class of its stores, which gets the address."""

    example: str
    address: re.Pattern[str]
    module: str
    name: str
    settings: dict[str, _Value]
    has_driver: bool = False
    """True if other settings are passed to its driver."""

    def make(self, address: str, settings: _Settings) -> LightningStore:
        """Create a store."""
        cls: Any = getattr(importlib.import_module(f"agentlightning.store.{self.module}"), self.name)
        if self.module == "memory":
            return cls(**settings)
        if self.module == "mongo":
            if "partition" in settings:
                settings["partition_id"] = settings.pop("partition")
            store = cls(mongo_uri=address, **settings)
            store.connect()  # so that serving or reading an address fails at once if there is no server
            return store
        unused = ", ".join(settings.keys() - {"deadline", "token", "request_timeout", "retry_delays"})
        if self.module == "http.client" and unused:
            raise BadRequestError(f"{public_form(address)} is served by another process; pass {unused} to that process")
        return cls(address.removeprefix("sqlite:///"), **settings)


_HOST = re.compile(r"[\w+]+://[^/?#\s][^?#\s]*")
_OF_DATABASE: dict[str, _Value] = {**_OF_EVERY_ENGINE, "partition": "text"}
_MEMORY = _Kind(FORMS[0], re.compile("memory"), "memory", "InMemoryLightningStore", {**_OF_EVERY_ENGINE, **_OF_MEMORY})
_FILE = re.compile(r"sqlite:///(?!:memory:).+")
_SQLITE = _Kind(FORMS[1], _FILE, "sqlite", "SQLiteLightningStore", {**_OF_EVERY_ENGINE, "synchronous": "text"})
_MONGO = _Kind(FORMS[2], _HOST, "mongo", "MongoLightningStore", _OF_DATABASE, has_driver=True)
_POSTGRES = _Kind(FORMS[3], _HOST, "postgres", "PostgresLightningStore", _OF_DATABASE, has_driver=True)
_HTTP = _Kind(FORMS[4], _HOST, "http.client", "LightningStoreClient", {"deadline": "a number"})
_KINDS = {
    **{"memory": _MEMORY, "sqlite": _SQLITE, "mongodb": _MONGO, "mongodb+srv": _MONGO},
    **{"postgresql": _POSTGRES, "postgres": _POSTGRES, "http": _HTTP, "https": _HTTP},
}


# --- suggestions ---------------------------------------------------------------------------------------------------

_IN_MEMORY = re.compile(r":?(in-?)?memory:?|mem|sqlite:/*(:memory:)?", re.IGNORECASE)


def _closest(text: str) -> str | None:
    """Return the valid spec that is most similar to an invalid one; None if none is similar."""
    if _IN_MEMORY.fullmatch(text):
        return "memory"
    scheme, colon, rest = text.partition(":")
    if colon and not rest.startswith("/") and re.fullmatch(r"\d+(/.*)?", rest):
        return f"http://{text}"
    near = closest_name(scheme.lower().partition("+")[0], _KINDS)
    if colon and near:
        return _completed(near, rest)
    if not colon and is_file_name(text) and not text.endswith(".py"):
        return f"sqlite:///{text}"
    return None if colon or not near else _KINDS[near].example


def _completed(scheme: str, rest: str) -> str | None:
    """Return a spec of this scheme with the address that was probably intended."""
    name = rest.lstrip("/")
    slashes = len(rest) - len(name)
    if scheme == "sqlite" and name:
        return f"sqlite:///{'/' if slashes in (1, 4) else ''}{name}"
    return f"{scheme}://{name}" if name and slashes < 3 and scheme != "memory" else _KINDS[scheme].example
