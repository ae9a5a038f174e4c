"""`agl doctor` sees files of another distribution in the package's folder."""

from __future__ import annotations

import base64
import hashlib
import json
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentlightning.cli.doctor import EXTRAS, misplaced
from tests.cli.terminal import on_terminal
from tests.stubs.processes import run_program


def _install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write the files that pip installs, and a RECORD of them."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines: list[str] = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    ours = {"agentlightning/__init__.py": "ours = 1\n", "agentlightning/trainer/trainer.py": "ours = 2\n"}
    _install(tmp_path, "agl-framework", "0.4.0", ours)
    _install(tmp_path, "numbers", "1.0", {"numbers/__init__.py": "", "numbers/agentlightning/__init__.py": ""})
    return tmp_path


def _said(site: Path) -> str:
    return "\n".join(misplaced(site / "agentlightning", distributions(path=[str(site)])))


def test_nothing_is_said_where_all_files_are_our_own(site: Path) -> None:
    assert _said(site) == ""


def test_another_distribution_in_the_same_folder_is_named_with_what_it_has_put_there(site: Path) -> None:
    theirs = {"agentlightning/__init__.py": "theirs = 1\n", "agentlightning/more.py": "theirs = 2\n"}
    _install(site, "agentlightning", "0.3.0", theirs)
    message = _said(site)
    assert "agentlightning 0.3.0 also installed agentlightning/__init__.py, agentlightning/more.py in this" in message
    assert "agentlightning/__init__.py differ from the files of agl-framework 0.4.0" in message


def test_what_an_uninstalled_one_has_left_is_seen(site: Path) -> None:
    (site / "agentlightning" / "left.py").write_text("theirs = 3\n")
    assert "agentlightning/left.py belong to no installed distribution" in _said(site)


def test_a_package_that_hides_the_installed_one_is_seen(site: Path, tmp_path: Path) -> None:
    message = "\n".join(misplaced(tmp_path / "elsewhere" / "agentlightning", distributions(path=[str(site)])))
    assert "is installed elsewhere" in message


def test_a_checkout_has_nothing_to_compare(tmp_path: Path) -> None:
    _install(tmp_path, "agl-framework", "0.4.0", {"_editable_impl_agl_framework.pth": "/checkout\n"})
    assert _said(tmp_path) == ""


MODULES = {
    "dockerfile-parse": "dockerfile_parse",
    "grpcio": "grpc",
    "pyzmq": "zmq",
    "reasoning-gym": "reasoning_gym",
    "transferqueue": "transfer_queue",
}
"""Modules whose names are not those of their distributions."""


def _modules(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """Return the modules of an extra, with those of the extras to which it refers."""
    found: set[str] = set()
    for requirement in map(Requirement, extras[extra]):
        if requirement.name == "agl-framework":
            found |= {module for other in requirement.extras for module in _modules(other, extras)}
        else:
            found.add(MODULES.get(requirement.name.lower(), requirement.name.lower()))
    return found


def test_an_extra_is_absent_while_a_package_of_an_extra_that_it_refers_to_is_missing() -> None:
    code = "import sys; sys.modules['torch'] = None; from agentlightning.cli import main; main(['doctor', '--json'])"
    states = {each["what"]: each for each in json.loads(run_program("python", "-c", code).stdout)}
    assert states["extra demo"]["state"] == "absent"
    assert states["extra demo"]["found"].startswith("torch not installed; install with: pip install 'agl-framework[de")
    assert states["extra tensorboard"]["found"].count("torch") == 0


def test_every_extra_is_asked_for() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    asked = {extra: set(modules) for extra, modules in EXTRAS.items()}
    assert asked == {extra: _modules(extra, extras) for extra in extras.keys() - {"all", "dev"}}
    code, lines = on_terminal("doctor", "--port", "0")
    assert code == 0
    assert not [extra for extra in EXTRAS if not any(f"extra {extra} " in line for line in lines)]
