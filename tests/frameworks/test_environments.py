"""The environments of the frameworks: the content of their files, those that a commit runs, the sources of packages."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.examples.environments import examples
from tests.frameworks.environments import Group, groups, homes, in_turn, index_settings, main

ROOT = Path(__file__).parents[2]


def lines_of(group: Group, file: str) -> list[str]:
    return [line for line in (group.folder / file).read_text().splitlines() if not line.startswith("#")]


def names_in(lines: list[str]) -> set[str]:
    name_matches = [re.match(r"[\w.-]+", line) for line in lines]
    return {name[0].lower().replace("_", "-").replace(".", "-") for name in name_matches if name}


@pytest.mark.parametrize("group", [*groups(), *examples().values()], ids=lambda group: group.name)
def test_what_is_asked_for_is_pinned_to_one_version_that_any_machine_is_offered(group: Group) -> None:
    pinned = lines_of(group, "constraints.txt")
    assert [line for line in pinned if not re.fullmatch(r"[\w.-]+==[\w.]+( ;.*)?", line)] == []
    assert names_in(lines_of(group, "requirements.txt")) - names_in(pinned) == set()


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.name)
def test_a_group_has_frameworks_and_no_torch_and_for_node_a_lock_file(group: Group) -> None:
    assert group.frameworks
    pinned = names_in(lines_of(group, "constraints.txt"))
    assert [name for name in pinned if name == "torch" or name.startswith("nvidia-")] == []
    assert (group.folder / "package.json").exists() == (group.folder / "package-lock.json").exists()


def test_an_example_with_constraints_has_an_environment() -> None:
    files = [*ROOT.glob("examples/*/constraints.txt"), *ROOT.glob("contrib/recipes/*/agl/constraints.txt")]
    assert {group.folder for group in examples().values()} == {path.parent for path in files}
    assert "own_store" not in examples(), "it needs nothing that the main environment lacks"


def test_every_framework_has_a_guide() -> None:
    guides = {path.stem for path in (ROOT / "docs/how-to/frameworks").glob("*.md")}
    assert sorted(set(homes()) - guides) == []


def test_commits_take_all_frameworks_and_the_same_commit_always_the_same() -> None:
    names = [f"framework-{number}" for number in range(15)]
    commits = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(100)]
    turns = [in_turn(names, 3, commit) for commit in commits]
    assert {name for turn in turns for name in turn} == set(names)
    assert {len(set(turn)) for turn in turns} == {3}
    assert turns == [in_turn(names, 3, commit) for commit in commits]
    assert in_turn(names, 3, "") == names[:3]
    assert in_turn(names[:2], 3, commits[0]) != []


def test_uv_is_told_what_pip_was_told() -> None:
    pip_output = """
global.extra-index-url='https://more.example/simple file:///srv/wheels/simple'
global.index-url='https://files.example/simple'
global.cert='/srv/old.crt'
global.trusted-host='files.example more.example'
:env:.cert='/srv/certificates.crt'
:env:.find-links='/srv/a /srv/b'
:env:.default-timeout='180'
"""
    assert index_settings(pip_output.strip()) == {
        "UV_DEFAULT_INDEX": "https://files.example/simple",
        "UV_INDEX": "https://more.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "files.example more.example",
        "UV_FIND_LINKS": "/srv/a,/srv/b",
        "SSL_CERT_FILE": "/srv/certificates.crt",
    }
    assert index_settings("") == {}


def test_an_unknown_framework_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-framework"])
    errors = capsys.readouterr().err
    assert "no framework no-such-framework; there are " in errors
    assert all(name in errors for name in homes())


def test_what_needs_node_says_so_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["node"]) == 1
    assert "node                  NOT RUN, not installed: node, npm" in capsys.readouterr().out
