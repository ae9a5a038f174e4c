"""Stores as strings: one string to move from a laptop to a cluster."""

from __future__ import annotations

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore

FORMS = ("memory", "sqlite:///run.db", "http://127.0.0.1:4747")
"""One example of each form that is understood."""


def is_store_spec(text: str) -> bool:
    """True if the string has the form of a store spec."""
    return text == "memory" or text.startswith(("sqlite:", "http://", "https://"))


def store_from_spec(spec: str | LightningStore) -> LightningStore:
    """Return the store that a string names; a store is returned as it is.

    `sqlite:///run.db` is a file in the working folder, `sqlite:////var/run.db` an absolute path.

    Raises:
        BadRequestError: the string has none of the forms; lists them.
    """
    if isinstance(spec, LightningStore):
        return spec
    if spec == "memory":
        from agentlightning.store.memory import InMemoryLightningStore

        return InMemoryLightningStore()
    if spec.startswith("sqlite:///") and len(spec) > len("sqlite:///"):
        from agentlightning.store.sqlite import SQLiteLightningStore

        return SQLiteLightningStore(spec.removeprefix("sqlite:///"))
    if spec.startswith(("http://", "https://")):
        from agentlightning.store.client import LightningStoreClient

        return LightningStoreClient(spec)
    raise BadRequestError(f"{spec!r} names no store; expected one of: {', '.join(FORMS)}")
