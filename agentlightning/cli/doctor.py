"""`agl doctor`: check this machine for missing packages and wrong settings before a run fails.

Each check is a function that yields results and changes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import Distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import JSON, say, show_json, show_table
from agentlightning.env_var import PROGRAM_VARIABLES, LightningEnvVar
from agentlightning.errors import closest_name
from agentlightning.utils.version import VERSION

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore, LightningStoreStatistics

DISTRIBUTION = "agl-framework"
PACKAGE = "agentlightning"
_SHOWN = 3
_REPAIR = f"uninstall both, then reinstall {DISTRIBUTION}"
_MIB = 1024**2
_SPARE_MIB = 500
"""Free disk space in MiB below which a run is likely to fill the disk."""
_GRPO = ("torch", "transformers", "peft", "llguidance", "matplotlib")
EXTRAS = {
    "grpo": _GRPO,
    "tinker": (*_GRPO, "tinker"),
    "trl": (*_GRPO, "trl", "jmespath"),
    "verl": (*_GRPO, "verl", "transfer_queue", "cachetools", "fastapi", "msgspec", "zmq"),
    "vllm": (*_GRPO, "vllm"),
    "demo": (*_GRPO, "openai"),
    "apo": ("openai", "gepa"),
    "gguf": (*_GRPO, "gguf"),
    "mongo": ("pymongo",),
    "otlp-grpc": ("grpc",),
    "postgres": ("psycopg",),
    "agentops": ("agentops",),
    "weave": ("weave",),
    "harbor": ("harbor", "dockerfile_parse"),
    "reasoning-gym": ("reasoning_gym",),
    "ray": ("ray",),
    "litellm": ("litellm",),
    "mlflow": ("mlflow",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Modules that each extra of the package installs, with those of the extras to which it refers."""
_SECRET = frozenset(("AGL_TOKEN",))
VARIABLES = frozenset(
    (
        *(variable.value for variable in LightningEnvVar),
        *(name for name in PROGRAM_VARIABLES if name.startswith("AGL_")),
    )
)
"""Our environment variables."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `absent` items are optional."""

    state: Literal["ok", "absent", "wrong"]
    what: str
    found: str


def doctor(
    store: str | None = typer.Option(
        None, envvar="AGENT_LIGHTNING_STORE_URL", help="Also check this store: a file or http://host:4747"
    ),
    port: int = typer.Option(4747, help="Port for a store server on this machine"),
    as_json: bool = JSON,
) -> int:
    """Check this machine: Python, packages and extras, ports, folder, token, variables, GPUs, and a store.

    The command changes nothing. Exit code 1 if an item is wrong. Absent items are not errors.

    Example: agl doctor --store http://10.0.0.5:4747
    """
    results = run_checks(store, port)
    if as_json:
        show_json([asdict(result) for result in results])
    else:
        show_table(("", "what", "found"), [(each.state, each.what, each.found) for each in results])
    wrong = [result for result in results if result.state == "wrong"]
    if not as_json:
        say(f"problems found: {len(wrong)}" if wrong else "no problems found")
    return 1 if wrong else 0


def run_checks(store: str | None, port: int) -> list[CheckResult]:
    """Run every check, in the order in which problems should be fixed."""
    checks = (
        *(_python, _extras, _folder, partial(_port, port), _token, _variables, _proxies, _gpus),
        *(() if store is None else (partial(_store, store),)),
    )
    return [result for check in checks for result in check()]


def _python() -> Iterator[CheckResult]:
    package = Path(__file__).parents[1]
    yield CheckResult("ok", "agentlightning", f"{VERSION}, {package}")
    for problem in misplaced(package, importlib.metadata.distributions()):
        yield CheckResult("wrong", "agentlightning", problem)
    new_enough = sys.version_info >= (3, 11)
    yield CheckResult("ok" if new_enough else "wrong", "python", f"{platform.python_version()}, {sys.executable}")
    yield CheckResult("ok", "machine", f"{platform.platform()}, {counted(os.cpu_count() or 1, 'core')}")
    upsert = sqlite3.sqlite_version_info >= (3, 35)
    yield CheckResult("ok" if upsert else "wrong", "sqlite", f"{sqlite3.sqlite_version}; 3.35 or newer is required")


def _extras() -> Iterator[CheckResult]:
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            text = f"{', '.join(missing)} not installed; install with: pip install 'agl-framework[{extra}]'"
            yield CheckResult("absent", f"extra {extra}", text)
        else:
            homes = importlib.metadata.packages_distributions()
            versions = [f"{package} {importlib.metadata.version(homes[package][0])}" for package in packages]
            yield CheckResult("ok", f"extra {extra}", ", ".join(versions))


def _folder() -> Iterator[CheckResult]:
    here = Path.cwd()
    writable = os.access(here, os.W_OK)
    text = f"{here}; stores and runs are written here" if writable else f"{here} is not writable"
    yield CheckResult("ok" if writable else "wrong", "folder", text)
    spare = shutil.disk_usage(here).free // _MIB
    yield CheckResult("ok" if spare > _SPARE_MIB else "wrong", "disk", f"{spare} MiB free")


def _port(port: int) -> Iterator[CheckResult]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield CheckResult("absent", f"port {port}", f"{error.strerror}; choose another port with --port")
        else:
            yield CheckResult("ok", f"port {port}", "free on 127.0.0.1")


def _token() -> Iterator[CheckResult]:
    from agentlightning.utils.http.auth import server_token

    if server_token():
        yield CheckResult("ok", "AGL_TOKEN", "set")
    else:
        yield CheckResult("absent", "AGL_TOKEN", "not set; required for servers that listen beyond 127.0.0.1")


def _variables() -> Iterator[CheckResult]:
    from agentlightning.store.spec import public_form

    for name in sorted(os.environ):
        if name in VARIABLES and name not in _SECRET:
            value = os.environ[name]
            yield CheckResult("ok", name, public_form(value) if "://" in value else value)
        elif name not in VARIABLES and name.startswith(("AGL_", "AGENT_LIGHTNING_")) and "_TEST_" not in name:
            near = closest_name(name, VARIABLES)
            hint = f"; did you mean {near}?" if near else ""
            yield CheckResult("wrong", name, f"unknown variable{hint}")


def _proxies() -> Iterator[CheckResult]:
    names = [name for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY") if os.environ.get(name)]
    if names:
        yield CheckResult("ok", "proxy", f"{', '.join(names)}; not used for traffic within this machine")


def _gpus() -> Iterator[CheckResult]:
    from agentlightning.utils.system_snapshot import system_snapshot

    gpus = cast("list[dict[str, Any]]", system_snapshot(include_gpu=True).get("gpus") or [])
    for gpu in gpus:
        yield CheckResult("ok", "gpu", f"{gpu['gpu']}, {gpu['mem_total_mb']:.0f} MB")
    if not gpus:
        yield CheckResult("absent", "gpu", "none; small models can be trained without a GPU")


def _store(location: str) -> Iterator[CheckResult]:
    from agentlightning.cli.output import with_store
    from agentlightning.store.spec import public_form

    async def ask(connection: LightningStore) -> LightningStoreStatistics:
        return await connection.statistics()

    try:
        statistics = with_store(location, ask)
    except Exception as error:  # the boundary: any error of the store is the result
        yield CheckResult("wrong", f"store {public_form(location)}", str(error))
    else:
        kind, count = statistics.get("name"), statistics.get("total_rollouts", 0)
        yield CheckResult("ok", f"store {public_form(location)}", f"{kind}, {counted(count, 'rollout')}")


def misplaced(package: Path, distributions: Iterable[Distribution]) -> Iterator[str]:
    """Yield a problem for each group of files in the package's folder that its distribution did not install.

    `package` is the imported folder. A checkout is not listed by a distribution, so it has no files to compare.
    """
    own: list[Distribution] = []
    for distribution in distributions:
        name = distribution.metadata["Name"] or ""
        if name.lower().replace("_", "-") == DISTRIBUTION:
            own.append(distribution)
        elif files := [
            str(file)
            for file in distribution.files or ()
            if file.parts[:1] == (PACKAGE,) and package in Path(str(distribution.locate_file(file))).parents
        ]:
            repair = f"{_REPAIR}: pip uninstall {name} {DISTRIBUTION}"
            yield f"{name} {distribution.version} also installed {_some(files)} in this folder; {repair}"
    for distribution in own[:1]:
        yield from _foreign_files(package, distribution)


def _foreign_files(package: Path, distribution: Distribution) -> Iterator[str]:
    files = {Path(str(distribution.locate_file(file))): file for file in distribution.files or ()}
    files = {path: file for path, file in files.items() if path.suffix == ".py" and PACKAGE in path.parts}
    if not files:
        return
    if package / "__init__.py" not in files:
        yield f"{package} is imported, but {DISTRIBUTION} {distribution.version} is installed elsewhere"
        return
    here = sorted(package.rglob("*.py"))
    strangers = [str(path.relative_to(package.parent)) for path in here if path not in files]
    if strangers:
        yield f"{_some(strangers)} belong to no installed distribution; {_REPAIR}"
    differing: list[str] = []
    for path in here:
        record = files[path].hash if path in files else None
        if record is not None and record.mode == "sha256":
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            if digest != record.value:
                differing.append(str(path.relative_to(package.parent)))
    if differing:
        yield f"{_some(differing)} differ from the files of {DISTRIBUTION} {distribution.version}; {_REPAIR}"


def _some(files: list[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return f"{', '.join(files[:_SHOWN])}{more}"
