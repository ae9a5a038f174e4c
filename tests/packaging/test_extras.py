"""The extras: their names, and those that a resolver can install together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.frameworks.environments import index_settings

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
APART = {"all", "dev", "harbor", "verl", "vllm"}
"""Extras that the extra `all` does not name."""


def of_itself(requirements: list[str]) -> set[str]:
    """Return the extras of this distribution that requirements name."""
    return {
        name
        for one in requirements
        if (own := re.fullmatch(r"agl-framework\[(.*)\]", one))
        for name in own[1].split(",")
    }


def resolve(extras: str, python: str = "3.12", *, lowest: bool = False) -> tuple[dict[str, str], str]:
    """Return the versions that a resolver chooses for Linux, and its output where there are none."""
    command = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "-q", "--index-strategy", "unsafe-best-match"]
    command += ["--python-version", python, "--python-platform", "linux", "pyproject.toml"]
    command += [part for extra in extras.split(",") for part in ("--extra", extra)]
    command += ["--resolution", "lowest-direct"] if lowest else []
    pip = [sys.executable, "-m", "pip", "config", "list"]
    indexes = index_settings(subprocess.run(pip, capture_output=True, text=True, check=True).stdout)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **indexes}, capture_output=True, text=True, check=False)
    chosen = dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", done.stdout, re.MULTILINE))
    return (chosen if done.returncode == 0 else {}), done.stderr


def test_all_names_each_extra_but_those_that_do_not_fit_together() -> None:
    assert of_itself(EXTRAS["all"]) == set(EXTRAS) - APART


WITH_VERL, WITH_HARBOR = (",".join(sorted(set(EXTRAS) - APART - {"agentops"} | {one})) for one in ("verl", "harbor"))
CONFLICTS = {
    ("verl", "vllm"): "transformers",
    ("verl", "agentops"): "packaging",
    ("harbor", "vllm"): "fastapi",
    ("harbor", "agentops"): "packaging",
}
"""Extras that do not fit together, and the distribution that they want in different versions."""


def test_uv_is_told_of_the_extras_that_do_not_fit_together() -> None:
    conflicts = [{one["extra"] for one in pair} for pair in PYPROJECT["tool"]["uv"]["conflicts"]]
    expected = [{*pair} for pair in (*CONFLICTS, ("verl", "all"), ("harbor", "all"))]
    assert sorted(map(sorted, conflicts)) == sorted(map(sorted, expected))


def test_every_extra_that_another_names_is_there() -> None:
    groups = PYPROJECT["dependency-groups"].values()
    assert {name for texts in (*EXTRAS.values(), *groups) for name in of_itself(texts)} <= set(EXTRAS)
    assert of_itself(PYPROJECT["dependency-groups"]["dev"]) >= {"dev"}


asks_the_index = pytest.mark.skipif(
    "RESOLVE" not in os.environ, reason="what the package index has today decides: make test-extras"
)


@asks_the_index
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "extras",
    ["all", WITH_VERL, WITH_HARBOR, "all,vllm", "demo,dev"],
    ids=["all", "verl", "harbor", "vllm", "dev"],
)
def test_these_extras_can_be_installed_together(extras: str) -> None:
    chosen, output = resolve(extras)
    assert chosen, output
    assert set(extras.split(",")) & {"harbor", "verl", "vllm"} <= set(chosen)
    assert len(chosen) > 40, json.dumps(chosen)


@asks_the_index
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pair", CONFLICTS, ids="-".join)
def test_these_extras_cannot_be_installed_together_as_the_guide_says(pair: tuple[str, str]) -> None:
    chosen, output = resolve(",".join(pair))
    assert chosen == {}
    assert CONFLICTS[pair] in output


@asks_the_index
@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_all_can_be_installed_on_each_python(python: str) -> None:
    chosen, output = resolve("all", python)
    assert chosen, output
