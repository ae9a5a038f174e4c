"""The recipes of `deploy/` as data: their parts, and the command and variables of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "docker/compose.yaml"
DOCKERFILE = DEPLOY / "docker/Dockerfile"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SBATCH = DEPLOY / "slurm/run.sbatch"
PROGRAM = DEPLOY / "program/train.py"
CLUSTER = ROOT / "examples/cluster"
"""An example whose recipes keep the same rules."""
ENTRYPOINT = ["agl"]
"""Entry point of the image."""

VALUES = {"AGL_TOKEN": "a-token-for-all-parts", "UPSTREAM_URL": "http://127.0.0.1:1/v1", "MODEL": "m"}
"""Values that a user sets: in the shell, a Secret, or the ConfigMap."""
SECRETS = {"token": VALUES["AGL_TOKEN"], "upstream-api-key": "a-key"}


@dataclass(frozen=True)
class Part:
    """One container."""

    name: str
    command: list[str]
    """The command as it is executed."""
    environment: dict[str, str]


def compose(file: Path = COMPOSE) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def documents(files: Iterable[Path] = MANIFESTS) -> Iterator[dict[str, Any]]:
    """Yield every Kubernetes object."""
    for path in files:
        yield from yaml.safe_load_all(path.read_text())


def workloads(files: Iterable[Path] = MANIFESTS) -> list[dict[str, Any]]:
    return [document for document in documents(files) if "template" in document.get("spec", {})]


def interpolated(text: str, values: Mapping[str, str]) -> str:
    """Fill `${NAME}`, `${NAME:-default}` and `${NAME:?message}` as compose does."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda match: values.get(match[1], match[2] or ""), text)


def compose_parts(values: Mapping[str, str] = VALUES, file: Path = COMPOSE) -> list[Part]:
    return [
        Part(
            name,
            [interpolated(word, values) for word in (*service.get("entrypoint", ENTRYPOINT), *service["command"])],
            {key: interpolated(value, values) for key, value in service["environment"].items()},
        )
        for name, service in compose(file)["services"].items()
    ]


def kubernetes_parts(values: Mapping[str, str] = VALUES, files: Sequence[Path] = MANIFESTS) -> list[Part]:
    [settings] = [document["data"] for document in documents(files) if document["kind"] == "ConfigMap"]
    settings = {**settings, **{name: value for name, value in values.items() if name in settings}}
    return [
        _part(container, settings)
        for workload in workloads(files)
        for container in workload["spec"]["template"]["spec"]["containers"]
    ]


def _part(container: dict[str, Any], settings: dict[str, str]) -> Part:
    environment = dict(settings) if "envFrom" in container else {}
    for entry in container["env"]:
        reference = entry.get("valueFrom")
        environment[entry["name"]] = SECRETS[reference["secretKeyRef"]["key"]] if reference else entry["value"]
    words = [*container.get("command", ENTRYPOINT), *container.get("args", [])]
    filled = [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word) for word in words]
    return Part(container["name"], filled, environment)
