"""The files around the package: workflows, forms, policies. They are valid, and agree with the package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from agentlightning.utils.version import VERSION
from scripts import prose
from scripts.address import FILES, PLACEHOLDER, addresses, replace
from tests.stubs.processes import run_program

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agentlightning"
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
POLICY = ROOT / "docs/reference/versions.md"

each_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)


def steps(workflow: Path) -> list[dict[str, object]]:
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_each_file_is_valid_by_its_published_schema(schema: str, pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files
    run_program(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def test_zizmor_finds_nothing_in_the_workflows() -> None:
    run_program(BIN / "zizmor", "--offline", "--persona", "pedantic", ".github", folder=ROOT)


def test_each_action_is_pinned_to_one_commit_with_its_version() -> None:
    pins: dict[str, set[str]] = {}
    for workflow in WORKFLOWS:
        for line in re.findall(r"uses: (.*)", workflow.read_text()):
            pinned = re.fullmatch(r"([\w.-]+/[\w./-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)", line)
            assert pinned, f"{workflow.name}: {line}"
            pins.setdefault(pinned[1], set()).add(pinned[2])
    assert {action: versions for action, versions in pins.items() if len(versions) > 1} == {}
    assert len(pins) >= 5


@each_workflow
def test_what_a_workflow_runs_is_there(workflow: Path) -> None:
    commands = "\n".join(str(step.get("run", "")) for step in steps(workflow))
    targets = re.findall(r"\bmake ([a-z][\w-]*)", commands)
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        targets += job.get("strategy", {}).get("matrix", {}).get("target", [])
    makefile = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(targets) <= makefile
    files = re.findall(r"\b(?:agentlightning|tests|docs|constraints)[\w./-]*\.(?:py|txt|md)\b", commands)
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert targets or files


@each_workflow
def test_each_job_of_a_workflow_has_an_end_and_no_more_than_it_needs(workflow: Path) -> None:
    read = yaml.safe_load(workflow.read_text())
    assert read["permissions"] == {}
    assert [name for name, job in read["jobs"].items() if not job.get("timeout-minutes")] == []
    checkouts = [step for step in steps(workflow) if str(step.get("uses", "")).startswith("actions/checkout@")]
    assert [step for step in checkouts if step["with"].get("persist-credentials") is not False] == []


def test_one_list_of_pythons_in_the_metadata_the_workflow_and_the_policy() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"].values()
    matrices = [job["strategy"]["matrix"]["python"] for job in jobs if "strategy" in job]
    assert matrices
    assert all(matrix == classifiers for matrix in matrices)
    assert PROJECT["requires-python"] == f">={classifiers[0]}"
    assert re.findall(r"^\| (3\.\d+) \| \w+ 20\d\d \|$", POLICY.read_text(), re.MULTILINE) == classifiers


def test_the_citation_and_the_changelog_have_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["license"]
    assert [one["name"] for one in citation["authors"]] == [one["name"] for one in PROJECT["authors"]]
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == VERSION


def _warns_of_deprecation(module: Path) -> bool:
    """True if a call of `warnings.warn` in `module` gives a DeprecationWarning."""
    calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    warns = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "warn"]
    return any(isinstance(one, ast.Name) and one.id == "DeprecationWarning" for call in warns for one in call.args)


def test_the_policy_lists_every_module_that_warns_of_a_deprecation_and_since_when() -> None:
    section = POLICY.read_text().split("\n## Deprecation\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    listed = {file for row in rows for file in re.findall(r"`([\w/]+\.py)`", row.split("|")[4])}
    warning = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if _warns_of_deprecation(path)}
    assert listed == warning
    versions = {row.split("|")[3].strip() for row in rows if ".py`" in row}
    matches = set(re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert versions <= matches


def test_each_tool_of_the_hooks_before_a_commit_is_in_the_development_environment() -> None:
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = [hook["entry"].split()[0] for hook in local["hooks"]]
    assert tools
    assert [tool for tool in tools if not (BIN / tool.removeprefix(".venv/bin/")).is_file()] == []


def test_every_page_on_vulnerabilities_refers_to_private_reports() -> None:
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text()
    assert "SECURITY.md" in (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    assert "SECURITY.md" in (ROOT / "docs/how-to/security.md").read_text()


def test_the_address_of_the_project_is_set_in_one_place_and_replaced_in_every_file(tmp_path: Path) -> None:
    address, (repository, site) = "https://github.com/Someone/agents", addresses()
    tracked = run_program("git", "grep", "-lF", repository, folder=ROOT).stdout.split()
    assert {*tracked} - {"scripts/address.py"} == {*FILES}, "each file with the address is in FILES"
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert replace(address, tmp_path) == list(FILES)
    assert addresses(tmp_path) == (address, "https://someone.github.io/agents")
    assert [name for name in FILES if repository in (tmp_path / name).read_text()] == []
    assert replace(repository, tmp_path) == list(FILES)
    if repository == PLACEHOLDER:
        assert {name: (tmp_path / name).read_text() for name in FILES} == {
            name: (ROOT / name).read_text() for name in FILES
        }
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["repository-code"], citation["url"]) == (repository, site)


def test_a_release_is_refused_while_the_address_is_the_placeholder() -> None:
    release = "\n".join(str(step.get("run", "")) for step in steps(ROOT / ".github/workflows/release.yml"))
    assert "scripts/address.py --published" in release
    refused = run_program(sys.executable, "scripts/address.py", "--published", folder=ROOT, code=None)
    assert (refused.returncode == 1) is (addresses()[0] == PLACEHOLDER)
    wrong = run_program(sys.executable, "scripts/address.py", "github.com/me/", folder=ROOT, code=1)
    assert "without a final slash; got github.com/me/" in wrong.stderr


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", "It is told\nhere, `told` there.\n```\ntold\n```\n[page](told.md)\n", ["page.md:1"]),
        ("module.py", '"""Return what\n\nthe agent told."""\ntold = "told"\n', ["module.py:3"]),
        ("view.tsx", "// as we are told\n<p>It was told</p>\n", ["view.tsx:2"]),
    ],
)
def test_words_that_are_not_plain_english_are_found_outside_of_code(
    tmp_path: Path, name: str, text: str, found: list[str]
) -> None:
    (tmp_path / name).write_text(text)
    messages = prose.matches(tmp_path / name, prose.word_list(), tmp_path)
    assert [message.split(": ")[0] for message in messages] == found
