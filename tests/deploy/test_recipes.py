"""The commands, options, variables and ports that `deploy/` names exist, and no secret is written in its recipes."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, cast

import pytest
import typer.main

from agentlightning.cli.main import app
from agentlightning.env_var import LightningEnvVar
from agentlightning.utils.version import VERSION
from tests.deploy.recipes import (
    CLUSTER,
    COMPOSE,
    DEPLOY,
    MANIFESTS,
    PROGRAM,
    ROOT,
    SBATCH,
    Part,
    compose,
    compose_parts,
    documents,
    kubernetes_parts,
    workloads,
)

PARTS = [("compose", part) for part in compose_parts()] + [("kubernetes", part) for part in kubernetes_parts()]
each_part = pytest.mark.parametrize("part", [part for _, part in PARTS], ids=[f"{kind}-{p.name}" for kind, p in PARTS])


def sbatch_commands() -> list[list[str]]:
    """Return each command of `agl` in the job script, its variables replaced by a number."""
    text = SBATCH.read_text().replace("\\\n", " ")
    lines = re.findall(r"^[^#\n]*\b(agl (?:store|gateway|runner|rollouts)\b[^\n&|]*)", text, re.MULTILINE)
    return [re.sub(r'"[^"]*\$[^"]*"|\$\w+', "1", line).split() for line in lines]


def check_command(words: list[str]) -> None:
    """Parse a command line as `agl` would, and do nothing."""
    name, command, rest, context = words[0], cast("Any", typer.main.get_command(app)), list(words[1:]), None
    assert name == "agl"
    while command is not None:
        context = command.make_context(name, rest, parent=context)
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest) if rest else ("", None, [])


@each_part
def test_every_command_and_option_exists(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in part.environment.items():
        monkeypatch.setenv(name, value)
    if part.command[0] == "python":
        assert (PROGRAM.parent / part.command[1]).is_file()
    else:
        check_command(part.command)


def test_every_command_and_option_of_the_job_script_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LIGHTNING_STORE_URL", "http://127.0.0.1:4747")
    commands = sbatch_commands()
    assert {words[1] for words in commands} == {"store", "gateway", "runner"}
    for words in commands:
        check_command(words)


def test_an_option_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(Exception, match="--prot"):
        check_command(["agl", "store", "--prot", "4747"])


def variables_that_are_read() -> set[str]:
    """Return the variables that the package or the example program reads."""
    ours = {variable.value for variable in LightningEnvVar}
    for path in (ROOT / "agentlightning").rglob("*.py"):
        ours |= set(re.findall(r"\"(AGL_[A-Z_]+|AGENT_LIGHTNING_[A-Z_]+)\"", path.read_text()))
    return ours | set(re.findall(r"os\.environ\[\"(\w+)\"\]", PROGRAM.read_text()))


def named_in_commands(path: Path) -> set[str]:
    """Return the variables that a command line of a recipe uses itself, or gives by name to `--api-key`."""
    text = path.read_text()
    return set(re.findall(r"\$\(?\{?(\w+)", text)) | set(re.findall(r"--api-key[= ](\w+)", text))


def test_every_variable_that_a_recipe_sets_is_read_by_somebody() -> None:
    read = variables_that_are_read()
    for path, parts in ((COMPOSE, compose_parts()), (DEPLOY / "kubernetes/gateway.yaml", kubernetes_parts())):
        set_there = {name for part in parts for name in part.environment}
        assert set_there - read - named_in_commands(path) == set()
    exported = set(re.findall(r"export (\w+)", SBATCH.read_text()))
    assert exported - read == set()
    assert "AGL_TOKEN" in exported


def test_every_role_is_one_that_exists() -> None:
    roles = {part.environment.get("AGL_CURRENT_ROLE", "both") for _, part in PARTS}
    assert roles == {"algorithm", "both"}
    assert "AGL_CURRENT_ROLE=algorithm" in SBATCH.read_text()


def port_of(part: Part) -> int:
    words = " ".join(part.command).replace("=", " ").split()
    return int(words[words.index("--port") + 1])


@pytest.mark.parametrize("parts", [compose_parts(), kubernetes_parts()], ids=["compose", "kubernetes"])
def test_every_address_names_a_part_and_the_port_that_it_listens_on(parts: list[Part]) -> None:
    listening = {part.name: port_of(part) for part in parts if part.name in ("store", "gateway")}
    assert listening == {"store": 4747, "gateway": 8000}
    named: set[tuple[str, int]] = set()
    for part in parts:
        text = " ".join([*part.command, *part.environment.values()])
        named |= {(host, int(port)) for host, port in re.findall(r"http://(?:agl-)?(store|gateway):(\d+)", text)}
    assert named == set(listening.items())


def test_services_probes_and_containers_agree_on_the_port() -> None:
    services = [document for document in documents() if document["kind"] == "Service"]
    ports = {service["metadata"]["name"]: service["spec"]["ports"] for service in services}
    assert {name: entry["port"] for name, [entry] in ports.items()} == {"agl-store": 4747, "agl-gateway": 8000}
    for workload in workloads():
        [container] = workload["spec"]["template"]["spec"]["containers"]
        names = {entry["name"]: entry["containerPort"] for entry in container.get("ports", [])}
        probes = [value["httpGet"] for key, value in container.items() if key.endswith("Probe")]
        assert all(probe == {"path": "/health", "port": "http"} for probe in probes)
        service = workload["metadata"]["name"]
        assert bool(probes) == bool(names) == (service in ports)
        if names:
            assert names == {"http": ports[service][0]["port"]}
            assert ports[service][0]["targetPort"] == "http"


def test_labels_of_a_workload_are_those_that_its_selector_and_its_service_look_for() -> None:
    labels = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in workloads()}
    for document in documents():
        selector = document["spec"].get("selector", {}) if "spec" in document else {}
        match_labels = selector.get("matchLabels", selector)
        if document["kind"] in ("Service", "Deployment", "StatefulSet"):
            assert match_labels
            assert match_labels.items() <= labels[document["metadata"]["name"]].items()


IMAGE = f"agentlightning:{VERSION}"
OF_CLUSTER = [CLUSTER / "kubernetes.yaml"]
WORKLOADS = [(each, IMAGE) for each in workloads()] + [(each, f"{IMAGE}-demo") for each in workloads(OF_CLUSTER)]
SERVICES = [(each, IMAGE) for each in compose()["services"].values()]
SERVICES += [(each, f"{IMAGE}-demo") for each in compose(CLUSTER / "compose.yaml")["services"].values()]


@pytest.mark.parametrize(("workload", "image"), WORKLOADS)
def test_a_pod_has_no_more_rights_than_it_needs_and_a_bound_on_what_it_uses(
    workload: dict[str, Any], image: str
) -> None:
    pod = workload["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["image"] == image
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for bound in ("requests", "limits"):
            assert set(container["resources"][bound]) == {"cpu", "memory"}


@pytest.mark.parametrize(("service", "image"), SERVICES)
def test_a_container_has_no_more_rights_than_it_needs(service: dict[str, Any], image: str) -> None:
    assert (service["read_only"], service["cap_drop"], service["image"]) == (True, ["ALL"], image)


def test_no_recipe_holds_a_secret() -> None:
    for workload, _ in WORKLOADS:
        for container in workload["spec"]["template"]["spec"]["containers"]:
            secret = [entry for entry in container["env"] if re.search("TOKEN|KEY", entry["name"])]
            assert secret
            assert all("secretKeyRef" in entry["valueFrom"] for entry in secret)
    for settings, _ in SERVICES:
        secret = {name: value for name, value in settings["environment"].items() if re.search("TOKEN|KEY", name)}
        assert all(value.startswith("${") for value in secret.values())
    assert not [document for document in documents([*MANIFESTS, *OF_CLUSTER]) if document["kind"] == "Secret"]
    for job in (SBATCH, CLUSTER / "job.sbatch"):
        assert not re.search(r"--token[= ]|--api-key[= ]\"?\$", job.read_text()), "a command line is read by everybody"


def test_the_key_of_the_model_server_is_the_gateways_alone() -> None:
    assert {part.name for _, part in PARTS if "UPSTREAM_API_KEY" in part.environment} == {"gateway"}


def test_the_example_program_offers_what_the_recipes_start() -> None:
    defined = {node.name for node in ast.parse(PROGRAM.read_text()).body if isinstance(node, ast.FunctionDef)}
    targets = {word for _, part in PARTS for word in part.command if ".py:" in word}
    assert targets == {"train.py:agent"}
    assert {"agent", "main"} <= defined
    assert MANIFESTS


@pytest.mark.parametrize("page", ["containers", "kubernetes", "slurm", "ray"])
def test_every_command_of_ours_that_a_page_shows_exists(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LIGHTNING_STORE_URL", "http://127.0.0.1:4747")
    text = (ROOT / f"docs/how-to/{page}.md").read_text()
    for line in re.findall(r"\bagl (?:store|gateway|runner|rollouts)\b[^`\n]*--[^`\n]*", text):
        check_command(line.split())


def test_a_page_tells_the_ports_and_commands_of_its_recipe() -> None:
    page = (ROOT / "docs/how-to/containers.md").read_text()
    shown = {part.name: " ".join(part.command) for part in compose_parts() if part.name in ("store", "runner")}
    assert all(f"`{command}`" in page for command in shown.values())
