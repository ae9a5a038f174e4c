"""The environment variables that the package reads, one enum with their meaning."""

from __future__ import annotations

from enum import Enum

from agentlightning.utils.env import resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var

__all__ = ["LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var"]


class LightningEnvVar(Enum):
    """Name of each variable; the value is the name."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    """bool: log every emitted span, operations too, at DEBUG (on stderr without any logging set up), and the tracer
    provider's configuration."""
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    """bool, default true: the strategy wraps the store in its server and clients, or in the thread wrapper."""
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    """`algorithm`, `runner` or `both` (default): which side of client-server this process is."""
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    """str, default 127.0.0.1: where the store server binds, and where runners connect. With `AGL_MANAGED_STORE=0`, this
    and the port say where the store server of somebody else is."""
    AGL_SERVER_PORT = "AGL_SERVER_PORT"
    """int, default 4747."""
    AGL_TOKEN = "AGL_TOKEN"
    """str: the bearer token of store server and gateway; needed beyond loopback. Leaves the environment when read."""
    AGL_TOKEN_FILE = "AGL_TOKEN_FILE"
    """Path of a file with the token, readable by its owner alone, or of a pipe; instead of `AGL_TOKEN`."""
    AGL_INSECURE = "AGL_INSECURE"
    """bool: allow a server beyond loopback without a token."""
    AGL_ALLOWED_HOSTS = "AGL_ALLOWED_HOSTS"
    """Comma separated names, beside those of this machine, under which clients may address a server; `*` is any."""
    AGL_RUN_ID = "AGL_RUN_ID"
    """str: the run that this process belongs to, for roles on several machines."""
    AGENT_LIGHTNING_STORE_URL = "AGENT_LIGHTNING_STORE_URL"
    """str: address of a store server that an unmanaged strategy uses when no store is given; goes before host and
    port."""
