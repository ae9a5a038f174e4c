"""Versions that may be installed: none has a published vulnerability, and those of the tests are among them."""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HOLES = {
    "aiohttp": ("3.12.14", "3.13.2"),  # CVE-2025-53643 and CVE-2025-69223 to 69230: smuggling, bodies without bound
    "grpcio": ("1.60.0", "1.66.1"),  # CVE-2024-7246: poisoned header tables
    "h11": ("0.14.0",),  # CVE-2025-43859: request smuggling by chunked bodies
    "jinja2": ("3.1.4", "3.1.5"),  # CVE-2025-27516: a way out of the sandbox
    "litellm": ("1.70.0", "1.82.7", "1.82.8"),  # releases that stole credentials; injection before
    "protobuf": ("5.29.5", "6.31.1", "6.33.4"),  # CVE-2025-4565, CVE-2026-0994: recursion without bound
    "pymongo": ("4.6.2",),  # CVE-2024-5629: reads past the end of a buffer
    "pytest": ("8.4.0", "9.0.2"),  # CVE-2025-71176: a folder that others can guess
    "ray": ("2.9.0", "2.51.1"),  # CVE-2025-62593: code from a web page
    "starlette": ("0.47.1", "0.49.0"),  # CVE-2025-54121, CVE-2025-62727: ranges that take quadratic time
    "torch": ("2.5.1", "2.9.1"),  # CVE-2025-32434, CVE-2026-24747: `weights_only` runs code, writes past buffers
    "transformers": ("4.49.0", "4.52.4"),  # CVE-2025-3777, 3933, 5197, 6638, ...: patterns that take for ever
}
"""Versions that must not be admitted."""


def _requirements(texts: list[str]) -> dict[str, Requirement]:
    requirements = [Requirement(text) for text in texts]
    return {canonicalize_name(one.name): one for one in requirements}


EXTRAS = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
ALL = _requirements([*PROJECT["dependencies"], *EXTRAS])


@pytest.mark.parametrize("name", HOLES)
def test_no_version_with_a_published_hole_may_be_installed(name: str) -> None:
    admitted = [version for version in HOLES[name] if ALL[name].specifier.contains(version)]
    assert admitted == []


CONSTRAINTS = ("constraints.txt", "constraints-frameworks.txt", "constraints-vendors.txt")
OF_GROUPS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/frameworks/*/constraints.txt"))


@pytest.mark.parametrize("file", [*CONSTRAINTS, *OF_GROUPS])
def test_what_the_tests_ran_with_may_be_installed(file: str) -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    pinned = dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)
    refused = {
        name: version
        for name, version in pinned.items()
        if (requirement := ALL.get(canonicalize_name(name))) is not None
        and not requirement.specifier.contains(version, prereleases=True)
    }
    assert refused == {}


def test_the_oldest_versions_that_are_tested_are_the_lower_bounds() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines[1:])}
    extras = PROJECT["optional-dependencies"]
    tested = [*PROJECT["dependencies"], *extras["mongo"], *extras["otlp-grpc"], *extras["postgres"]]
    bounds = {
        name: next(spec.version for spec in one.specifier if spec.operator == ">=")
        for name, one in _requirements(tested).items()
    }
    assert set(oldest) == set(bounds)
    above = {  # a bound such as 3.2 stands for the first version of that line that was published
        name: version
        for name, version in oldest.items()
        if not f"{version}.".startswith(f"{bounds[name]}.") or not set(version.removeprefix(bounds[name])) <= set(".01")
    }
    assert above == {}


def test_the_core_says_of_each_dependency_from_which_version_on() -> None:
    core = _requirements(PROJECT["dependencies"])
    assert [name for name, one in core.items() if not any(spec.operator == ">=" for spec in one.specifier)] == []


def test_the_distribution_and_its_extras_have_one_name() -> None:
    extras = [Requirement(text) for text in EXTRAS]
    own = {one.name for one in extras if one.extras and "agl" in one.name.lower()}
    assert own == {PROJECT["name"]} == {"agl-framework"}
    assert distribution("agl-framework").version
