"""Statements of the documents about files, scripts, extras and tools of the repository; rows in `statements/`."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

import agentlightning as agl
from tests.stubs.processes import run_program

ROOT = Path(__file__).parents[2]

WEBSHOP = "contrib/recipes/webshop"
RECIPE = [
    f"{WEBSHOP}/{name}"
    for name in ("README.md", "Dockerfile", "scripts/run_stack.sh", "setup.sh", "agl/setup.sh", "agl/requirements.txt")
]
SCRIPTS = [
    "dev", "build", "preview", "storybook", "build-storybook", "eslint", "stylelint", "prettier", "typecheck", "vitest",
]  # fmt: skip
"""Scripts of dashboard/package.json."""
LIBRARIES = ["react", "@mantine/core", "storybook", "vitest"]

MODULES = {
    "trainer.trainer": "Trainer",
    "trainer.init_utils": "build_component",
    "trainer.registry": "ExecutionStrategyRegistry",
    "execution.base": "ExecutionStrategy",
    "execution.shared_memory": "SharedMemoryExecutionStrategy",
    "execution.client_server": "ClientServerExecutionStrategy",
    "store.base": "LightningStore",
    "store.memory": "InMemoryLightningStore",
    "store.sqlite": "SQLiteLightningStore",
    "store.mongo": "MongoLightningStore",
    "store.threading": "LightningStoreThreaded",
    "store.client_server": "LightningStoreServer",
    "env_var": "LightningEnvVar",
    "utils.env": "resolve_bool_env_var",
    "utils.otel": "make_link_attributes",
    "semconv": "LightningSpanAttributes",
    "runner.base": "Runner",
    "runner.agent": "LitAgentRunner",
    "runner.legacy": "LegacyAgentRunner",
    "tracer.base": "Tracer",
    "emitter.annotation": "operation",
    "types.core": "Rollout",
    "types.tracer": "Span",
}
"""Modules that the documents name as the source of something, and what is in them."""


def project() -> dict[str, dict[str, dict[str, list[str]]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_modules_that_the_documents_name_have_what_they_say() -> None:
    missing = [
        module
        for module, name in MODULES.items()
        if not hasattr(importlib.import_module(f"agentlightning.{module}"), name)
    ]
    assert missing == []


def test_the_classes_of_the_introduction_are_in_the_package() -> None:
    names = "Runner LitAgent Tracer OtelTracer AgentOpsTracer LightningStore LightningStoreClient Triplet"
    assert all(isinstance(getattr(agl, name), type) for name in names.split())


def test_the_folders_and_files_of_the_project() -> None:
    parts = ("algorithm", "cli", "contrib", "runner", "store", "tracer", "types")
    folders = ("contrib/recipes", "dashboard", "docs", "examples", "scripts", "tests")
    paths = [*(f"agentlightning/{name}" for name in parts), *folders, *RECIPE]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_scripts_and_the_technology_of_the_dashboard() -> None:
    package = json.loads((ROOT / "dashboard/package.json").read_text(encoding="utf-8"))
    assert set(SCRIPTS) <= set(package["scripts"])
    assert set(LIBRARIES) <= {*package["dependencies"], *package["devDependencies"]}


def test_the_distribution_and_its_extras() -> None:
    metadata = project()["project"]
    assert metadata["name"] == "agl-framework"
    assert {"apo", "verl", "mongo", "agentops", "vllm", "otlp-grpc"} <= set(metadata["optional-dependencies"])
    assert metadata["requires-python"] == ">=3.11"


def test_the_group_for_development_and_its_tools() -> None:
    assert list(project()["dependency-groups"]) == ["dev"]
    tools = " ".join(project()["project"]["optional-dependencies"]["dev"])
    assert all(tool in tools for tool in ("pytest", "basedpyright", "ruff"))
    assert (ROOT / ".pre-commit-config.yaml").is_file()
    assert (ROOT / "zensical.toml").is_file()


def test_versions_are_pinned_by_constraints() -> None:
    assert not (ROOT / "uv.lock").exists()
    assert re.search(r"^pydantic==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.heavy
@pytest.mark.parametrize("command", ["vllm", "store", "prometheus", "agentops"])
def test_each_command_of_the_manual_has_help(command: str) -> None:
    assert f"agl {command}" in run_program("agl", command, "--help").stdout
