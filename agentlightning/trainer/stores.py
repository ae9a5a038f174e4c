"""The store of a Trainer: by name, by default, and fit for the strategy."""

from __future__ import annotations

import logging
import os
from typing import Any, cast

from agentlightning.env_var import LightningEnvVar, resolve_int_env_var, resolve_str_env_var
from agentlightning.execution.address import DEFAULT_PORT, LOOPBACK, Address
from agentlightning.execution.base import ExecutionStrategy, check_port
from agentlightning.store.base import LightningStore
from agentlightning.store.spec import is_store_spec, public_form, store_from_spec

logger = logging.getLogger(__name__)

_URL = LightningEnvVar.AGENT_LIGHTNING_STORE_URL.value
_HOST = LightningEnvVar.AGL_SERVER_HOST.value
_PORT = LightningEnvVar.AGL_SERVER_PORT.value


def named_store(text: str) -> LightningStore | None:
    """Return the store that a string such as `sqlite:///run.db` names; None for an import path.

    Raises:
        ValueError: it is neither.
    """
    return store_from_spec(text) if is_store_spec(text) or "." not in text else None


def default_store(strategy: ExecutionStrategy) -> LightningStore:
    """Return a store in memory; for an unmanaged strategy the server that the environment names.

    That is `AGENT_LIGHTNING_STORE_URL`; without it, where processes need a store that they share, the one at
    `AGL_SERVER_HOST` and `AGL_SERVER_PORT`, if one of them is set.

    Raises:
        ValueError: the variable holds no http address.
    """
    from agentlightning.store.memory import InMemoryLightningStore

    url = os.environ.get(_URL)
    managed = getattr(strategy, "managed_store", True)
    if url is None:
        address = None if managed or strategy.runners_share_process else _address_of_environment()
        if address is None:
            return InMemoryLightningStore()
        logger.info("The store of this run is the server at %s (AGL_MANAGED_STORE=0, %s, %s)", address, _HOST, _PORT)
        return store_from_spec(address)
    if managed:
        logger.warning(
            "%s=%s is ignored: the strategy manages its own store (AGL_MANAGED_STORE=0 uses it)", _URL, public_form(url)
        )
        return InMemoryLightningStore()
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{_URL} must be an http address such as http://127.0.0.1:4747; got {public_form(url)!r}")
    return store_from_spec(url)


def _address_of_environment() -> str | None:
    """Return the address of the store server at `AGL_SERVER_HOST` and `AGL_SERVER_PORT`; None without both."""
    port = check_port(_PORT, resolve_int_env_var(_PORT, fallback=DEFAULT_PORT))
    if port == 0 or (_HOST not in os.environ and _PORT not in os.environ):
        return None
    return Address(resolve_str_env_var(_HOST, fallback=LOOPBACK), port).url


def place_of(store: LightningStore) -> str:
    """Return where a store keeps what it is given, in the form that `store=` takes if there is one."""
    path, address = getattr(store, "path", None), getattr(store, "server_address_root", None)
    if isinstance(path, str):
        return f"sqlite:///{path}"
    if isinstance(address, str):
        return address
    durable = store.capabilities.get("persistent", store.capabilities.get("persistence"))
    return type(store).__name__ if durable else "memory, until this program ends"


def check_address_is_used(spec: object, strategy: ExecutionStrategy) -> None:
    """Check that settings of a server were not given to a strategy that serves no store.

    Where only the environment says so (`AGL_MANAGED_STORE=0`), as for a program that runs here and there, it warns.

    Raises:
        ValueError: they were, beside `managed_store=False`; names them.
    """
    if not isinstance(spec, dict) or getattr(strategy, "managed_store", True):
        return
    settings = cast("dict[str, Any]", spec)
    unused = [name for name in ("server_host", "server_port", "connect_host") if settings.get(name) is not None]
    if not unused:
        return
    text = f"{', '.join(unused)} of the strategy would have no effect: with managed_store=False it serves no store"
    if settings.get("managed_store") is False:
        raise ValueError(f"{text}. Leave out one or the other")
    logger.warning("%s (AGL_MANAGED_STORE)", text)


def check_shared(store: LightningStore, strategy: ExecutionStrategy) -> None:
    """Check that a store which is handed to several processes as it is holds the same data in all of them.

    Raises:
        ValueError: it does not.
    """
    if getattr(strategy, "managed_store", True) or strategy.runners_share_process:
        return
    capabilities = store.capabilities
    if not (capabilities.get("zero_copy") or capabilities.get("distributed")):
        raise ValueError(
            f"managed_store=False hands the store to several processes, and each would have a {type(store).__name__} "
            f"of its own. Use store='http://...' (or {_URL}, or {_PORT} for one on this machine) or "
            "store='sqlite:///run.db', or managed_store=True."
        )
