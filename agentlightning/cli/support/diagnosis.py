"""What `agl doctor` looks at: each look is a function that gives findings and changes nothing."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentlightning.env_var import LightningEnvVar
from agentlightning.utils.version import VERSION

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore, LightningStoreStatistics

State = Literal["ok", "absent", "wrong"]

_MIB = 1024**2
_SPARE_MIB = 500
"""Free space below which a run is likely to end with a full disk."""
EXTRAS = {
    "grpo": ("torch", "transformers", "peft"),
    "demo": ("openai",),
    "mongo": ("pymongo",),
    "postgres": ("psycopg",),
    "agentops": ("agentops",),
    "weave": ("weave",),
    "ray": ("ray",),
    "litellm": ("litellm",),
}
"""What each extra of the package brings."""
_SECRET = frozenset(("AGL_TOKEN",))
_OF_COMMANDS = ("AGL_DEBUG", "AGL_LOG_JSON", "AGENT_LIGHTNING_OTLP_ENDPOINT")
_OF_PROGRAMS = ("ATTEMPT_ID", "MODE", "MODEL", "RESOURCES_FILE", "REWARD_FILE", "ROLLOUT_ID", "TASK_FILE")
"""What a program that runs as an agent is told, with `AGL_` before it."""
VARIABLES = frozenset(
    (*(variable.value for variable in LightningEnvVar), *_OF_COMMANDS, *(f"AGL_{name}" for name in _OF_PROGRAMS))
)
"""Every variable of ours that somebody reads."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `absent` is something that a run may do without."""

    state: State
    what: str
    found: str


def all_findings(store: str | None, port: int) -> list[Finding]:
    """Return everything, in the order in which one mends it."""
    looks = (_python(), _extras(), _folder(), _port(port), _token(), _variables(), _proxies(), _gpus(), _store(store))
    return [finding for look in looks for finding in look]


def _python() -> Iterator[Finding]:
    from agentlightning.cli.support.package_place import misplaced

    package = Path(__file__).parents[2]
    yield Finding("ok", "agentlightning", f"{VERSION}, {package}")
    for found in misplaced(package, importlib.metadata.distributions()):
        yield Finding("wrong", "agentlightning", found)
    new_enough = sys.version_info >= (3, 11)
    yield Finding("ok" if new_enough else "wrong", "python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("ok", "machine", f"{platform.platform()}, {os.cpu_count()} cores")
    upsert = sqlite3.sqlite_version_info >= (3, 35)
    yield Finding("ok" if upsert else "wrong", "sqlite", f"{sqlite3.sqlite_version}; at least 3.35 is needed")


def _extras() -> Iterator[Finding]:
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            text = f"{', '.join(missing)} not installed: pip install 'agl-framework[{extra}]'"
            yield Finding("absent", f"extra {extra}", text)
        else:
            versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
            yield Finding("ok", f"extra {extra}", ", ".join(versions))


def _folder() -> Iterator[Finding]:
    here = Path.cwd()
    writable = os.access(here, os.W_OK)
    text = f"{here}; stores and runs are written here" if writable else f"{here} cannot be written to"
    yield Finding("ok" if writable else "wrong", "folder", text)
    spare = shutil.disk_usage(here).free // _MIB
    yield Finding("ok" if spare > _SPARE_MIB else "wrong", "disk", f"{spare} MiB are free")


def _port(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield Finding("absent", f"port {port}", f"{error.strerror}; choose another with --port")
        else:
            yield Finding("ok", f"port {port}", "free on 127.0.0.1")


def _token() -> Iterator[Finding]:
    from agentlightning.utils.http.auth import server_token

    if server_token():
        yield Finding("ok", "AGL_TOKEN", "set")
    else:
        yield Finding("absent", "AGL_TOKEN", "not set; servers beyond 127.0.0.1 need it")


def _variables() -> Iterator[Finding]:
    from agentlightning.store.spec import public_form

    for name in sorted(os.environ):
        if name in VARIABLES and name not in _SECRET:
            value = os.environ[name]
            yield Finding("ok", name, public_form(value) if "://" in value else value)
        elif name not in VARIABLES and name.startswith(("AGL_", "AGENT_LIGHTNING_")) and "_TEST_" not in name:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield Finding("wrong", name, f"nobody reads this variable{hint}")


def _proxies() -> Iterator[Finding]:
    set_ones = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if os.environ.get(name)]
    if set_ones:
        yield Finding("ok", "proxy", f"{', '.join(set_ones)}; traffic within this machine does not use it")


def _gpus() -> Iterator[Finding]:
    from agentlightning.utils.system_snapshot import system_snapshot

    gpus: list[dict[str, Any]] = system_snapshot(include_gpu=True).get("gpus") or []
    for gpu in gpus:
        yield Finding("ok", "gpu", f"{gpu['gpu']}, {gpu['mem_total_mb']:.0f} MB")
    if not gpus:
        yield Finding("absent", "gpu", "none; small models train without")


def _store(place: str | None) -> Iterator[Finding]:
    if place is None:
        return
    from agentlightning.cli.support.store_access import with_store
    from agentlightning.store.spec import public_form

    async def ask(opened: LightningStore) -> LightningStoreStatistics:
        return await opened.statistics()

    try:
        statistics = with_store(place, ask)
    except Exception as error:  # the boundary: whatever keeps the store from answering is the finding
        yield Finding("wrong", f"store {public_form(place)}", str(error))
    else:
        kind, count = statistics.get("name"), statistics.get("total_rollouts", 0)
        yield Finding("ok", f"store {public_form(place)}", f"{kind}, {count} rollouts")
