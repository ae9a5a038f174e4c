"""The site: every page is in it, links between pages hold, and nothing is fetched from another address."""

from __future__ import annotations

import re
import subprocess
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.packaging import pages

ROOT = Path(__file__).parents[2]


def test_links_between_the_root_and_the_documents_name_the_places_of_the_site() -> None:
    index = pages.with_links_of_the_site(ROOT / "docs/index.md")
    assert "](project/CONTRIBUTING.md)" in index
    assert "](how-to/security.md)" in index
    assert "](../reference/versions.md)" in pages.with_links_of_the_site(ROOT / "SECURITY.md")
    assert "](https://" in pages.with_links_of_the_site(ROOT / "CODE_OF_CONDUCT.md")


def test_each_page_is_laid_out_and_each_of_its_links_to_a_page_holds(tmp_path: Path) -> None:
    pages.lay_out(tmp_path / "docs")
    laid = {path.relative_to(tmp_path / "docs") for path in (tmp_path / "docs").rglob("*.md")}
    assert laid == {*(pages.place_of(page) for page in pages.PAGES), *pages.pages_of_names()}
    broken: list[str] = []
    for page in laid:
        text = re.sub(r"^```.*?^```", "", (tmp_path / "docs" / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        links = re.findall(r"\]\(([^)#:\s]+\.md)(?:#[^)]*)?\)", text)
        broken += [f"{page}: {link}" for link in links if not (tmp_path / "docs" / page.parent / link).is_file()]
    assert broken == []


def test_the_site_asks_for_no_font_and_reads_from_a_folder() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    assert project["theme"]["font"] is False
    assert project["use_directory_urls"] is False
    assert {one["scheme"] for one in project["theme"]["palette"]} == {"default", "slate"}


def pages_in(menu: list[Any]) -> list[str]:
    """Return the pages of a menu of the site, at all levels, in order."""
    entries = [entry for item in menu for entry in (item.values() if isinstance(item, dict) else (item,))]
    return [page for entry in entries for page in ([entry] if isinstance(entry, str) else pages_in(entry))]


def test_the_menu_has_each_page_once_and_the_concepts_last() -> None:
    menu = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    laid_out = [*(pages.place_of(page) for page in pages.PAGES), *pages.pages_of_names()]
    assert sorted(pages_in(menu)) == sorted(path.as_posix() for path in laid_out)
    top = ["Home", "Tutorials", "How-to", "Examples", "Algorithms", "Reference", "Concepts"]
    assert [next(iter(entry)) for entry in menu] == top


def test_the_python_api_is_in_the_order_of_use_in_the_menu_and_on_its_first_page() -> None:
    menu = pages_in(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    in_menu = [page for page in menu if page.startswith("reference/api/") and page != "reference/api/index.md"]
    assert in_menu == [f"reference/api/{package}.md" for package in pages.ORDER]
    rows = re.findall(r"^\| \[(\w+)\]", pages.pages_of_names()[pages.API / "index.md"], re.MULTILINE)
    assert rows == list(pages.ORDER)


def test_the_site_has_no_badges_and_links_the_python_api_from_its_front_page(tmp_path: Path) -> None:
    pages.lay_out(tmp_path / "docs")
    assert "img.shields.io" in (ROOT / "README.md").read_text()
    assert "img.shields.io" not in (tmp_path / "docs/project/README.md").read_text()
    assert (tmp_path / "docs/index.md").read_text().count("](reference/api/index.md)") == 1


def test_each_diagram_is_on_the_site_as_an_image_with_the_same_words(tmp_path: Path) -> None:
    pages.lay_out(tmp_path / "docs")
    sources = [page for page in pages.PAGES if "```mermaid" in page.read_text()]
    assert sources
    for page in sources:
        laid_out = (tmp_path / "docs" / pages.place_of(page)).read_text()
        assert "```mermaid" not in laid_out
        assert f"![Diagram](../images/{page.stem}.svg)" in laid_out
        [diagram] = re.findall(r"^```mermaid\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        drawn = re.sub(r"<[^>]+>", " ", (ROOT / f"docs/images/{page.stem}.svg").read_text())
        labels = re.findall(r": (.+)$", diagram, re.MULTILINE)
        assert [word for label in labels for word in label.split() if word not in drawn.split()] == []


def test_the_site_has_the_error_messages_with_three_dots_for_values() -> None:
    page = pages.page_of_errors()
    assert "- `No best prompt found: call Trainer.fit first" in page
    assert "`Trainer has no setting ...: ...` (TypeError)" in page


@pytest.mark.heavy  # asks the package index
@pytest.mark.timeout(300)
def test_the_strict_build_makes_every_page_and_refuses_a_link_to_none(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    requirements = ROOT / "tests/packaging/requirements-docs.txt"
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
    pages.lay_out(tmp_path / "build/docs")
    (tmp_path / "agentlightning").symlink_to(ROOT / "agentlightning")
    (tmp_path / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    command = [tmp_path / "venv/bin/zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = [path.read_text() for path in (tmp_path / "build/site").rglob("*.html")]
    assert len(built) > len(pages.PAGES)
    trainer = (tmp_path / "build/site/reference/api/trainer.html").read_text()
    assert 'id="agentlightning.trainer.trainer.Trainer.fit"' in trainer
    assert "attempts, time limits and retries of every rollout" in trainer, "the meaning of an argument"
    fetched = re.compile(r"<(?:script|img|iframe)[^>]+src=\"https?:|<link[^>]+rel=\"stylesheet\"[^>]+href=\"https?:")
    assert [text[:80] for text in built if fetched.search(text)] == []
    with open(tmp_path / "build/docs/quickstart.md", "a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode != 0
