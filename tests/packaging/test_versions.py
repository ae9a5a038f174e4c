"""The site of every release: its versions, the target of the front page, and one real build from a tag."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging import versions

ROOT = Path(__file__).parents[2]


def test_the_newest_patch_of_each_minor_version_has_a_site_and_the_newest_is_first() -> None:
    tags = ["v0.4.0", "v0.10.0", "v0.4.2", "v0.4.1", "v1.0.0rc1", "vault", "0.9.0", "v0.3.0-beta"]
    assert versions.releases(tags) == ["0.10.0", "0.4.2"]


def test_the_front_page_leads_to_the_newest_release_and_without_one_to_the_present_pages() -> None:
    assert 'url=0.10.0/index.html"' in versions.front_page(["0.10.0", "0.4.2"])
    assert 'url=dev/index.html"' in versions.front_page([])


def test_the_menu_names_each_version_once_and_calls_the_newest_the_latest() -> None:
    rows = versions.listed(["0.10.0", "0.4.2"])
    assert [row["version"] for row in rows] == ["0.10.0", "0.4.2", "dev"]
    assert [row["aliases"] for row in rows] == [["latest"], [], []]
    assert versions.listed([])[0]["aliases"] == ["latest"]


@pytest.mark.heavy  # asks the package index, and builds the site twice
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout: the versions are its tags")
def test_a_tag_is_built_from_its_own_pages_beside_the_present_ones(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run([*git, "tag", "v99.0.0"], cwd=clone, check=True)
    with (clone / "docs/quickstart.md").open("a") as page:
        page.write("\nWritten after the release.\n")
    subprocess.run([*git, "commit", "--quiet", "--all", "--message", "Write"], cwd=clone, check=True)
    (clone / "build").mkdir()
    built = versions.build(tmp_path / "site", clone)
    assert built[0] == "99.0.0"
    assert "Written after" not in (tmp_path / "site/99.0.0/quickstart.html").read_text()
    assert "Written after" in (tmp_path / "site/dev/quickstart.html").read_text()
    assert re.search(r'"provider": ?"mike"', (tmp_path / "site/dev/index.html").read_text())
    assert json.loads((tmp_path / "site/versions.json").read_text())[0]["version"] == "99.0.0"
    process = subprocess.run(["git", "worktree", "list"], cwd=clone, capture_output=True, text=True, check=True)
    assert len(process.stdout.splitlines()) == 1, "a checkout was left behind"
