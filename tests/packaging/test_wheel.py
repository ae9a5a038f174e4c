"""The wheel: its files, its metadata, and that the same sources give the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from agentlightning.utils.version import VERSION
from tests.packaging import bill
from tests.pages import ROOT, blocks
from tests.stubs.processes import run_program

pytestmark = pytest.mark.slow
OWN = f"agl_framework-{VERSION}.dist-info/"


def tracked(folder: str = "") -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", folder or "."], cwd=ROOT, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def build(folder: Path) -> Path:
    """Build the wheel from a copy of the sources that git knows, made in `folder`."""
    for name in tracked():
        if name.startswith(("agentlightning/", "release/")) or "/" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    clean = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    options = ("--wheel", "--no-isolation", "--outdir", folder / "dist")
    run_program("python", "-m", "build", *options, folder, environment=clean)
    [wheel] = (folder / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def text(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{OWN}METADATA").decode()


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(OWN)}
        beside = {name.removeprefix(OWN) for name in archive.namelist() if name.startswith(OWN)}
    assert names == set(tracked("agentlightning"))
    assert beside == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
        "licenses/release/LICENSES-OF-THE-PAGE.txt",
        "sboms/agl-framework.cdx.json",
    }


def test_the_metadata_is_valid_and_says_who_what_and_for_which_python(text: str) -> None:
    Metadata.from_email(text, validate=True)
    metadata = Parser().parsestr(text)
    assert (metadata["Name"], metadata["Version"]) == ("agl-framework", VERSION)
    assert (metadata["License-Expression"], metadata["Author"]) == ("MIT", "The agentlightning authors")
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_the_same_sources_give_the_same_bytes_whenever_and_by_whomever_built(wheel: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        again = build(tmp_path)
    finally:
        os.umask(before)
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_bill_of_materials_is_that_of_the_lock_file_and_the_requirements() -> None:
    written = json.loads(bill.BILL.read_text())
    assert written == bill.bill(), "run: python -m tests.packaging.bill"
    scripts = {one["name"] for one in written["components"] if one["purl"].startswith("pkg:npm/")}
    assert {"react", "react-dom", "uplot", "@mantine/core"} <= scripts
    assert not scripts & {"vite", "typescript"}
    assert all(one["licenses"] for one in written["components"] if one["name"] in scripts)


def test_each_script_of_the_page_has_its_licence_text() -> None:
    text = bill.TEXTS.read_text()
    missing = [f"{name} {one['version']}" for name, one in bill.scripts().items()]
    assert [name for name in missing if name not in text] == [], "run: make dashboard, python -m tests.packaging.bill"
    if (bill.PAGE / "node_modules").is_dir():
        assert text == bill.texts(bill.PAGE / "node_modules")


@pytest.mark.heavy  # asks the package index
@pytest.mark.timeout(300)
def test_the_wheel_installs_into_an_environment_of_its_own_and_runs_the_program_of_the_readme(
    wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    bin_ = tmp_path / "venv/bin"
    subprocess.run([bin_ / "python", "-m", "pip", "install", "--quiet", wheel], check=True)
    (tmp_path / "program.py").write_text(blocks(ROOT / "README.md")[0])
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "PYTHON"))}
    done = run_program(bin_ / "python", "-W", "error", "program.py", folder=tmp_path, environment=clean)
    assert done.stdout == "2 rollouts (2 scored), mean reward 1.000\n", done.stderr
    version = run_program(bin_ / "agl", "--version", folder=tmp_path, environment=clean).stdout
    assert version == f"agentlightning {VERSION}\n"
    run_program(bin_ / "python", "-m", "pip", "check")
