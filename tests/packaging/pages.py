"""Lay the pages out for the site: `python -m tests.packaging.pages FOLDER`.

The site takes its pages from one folder. `docs/` goes there as it is, the pages of the root (README, CONTRIBUTING and
others) into `project/`, those of `examples/` into `examples/`; links between them are written anew.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_THE_ROOT = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT", "AGENTS")
PAGES = {
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / f"{name}.md" for name in OF_THE_ROOT),
    *(ROOT / "examples").glob("**/README.md"),
}
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def place_of(page: Path) -> Path:
    """Return where a page of the repository is in the folder of the site."""
    inside = page.relative_to(ROOT)
    if inside.parts[0] == "docs":
        return inside.relative_to("docs")
    return inside if len(inside.parts) > 1 else Path("project") / inside


def with_links_of_the_site(page: Path) -> str:
    """Return the text of a page, whose links to pages that move name the new place."""

    def rewrite(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / link[1]))
        inside = target.is_relative_to(ROOT / "docs") or target in PAGES
        return os.path.relpath(place_of(target), place_of(page).parent) if inside else link[1]

    return _LINK.sub(rewrite, page.read_text())


def lay_out(folder: Path) -> None:
    """Put every page into `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for page in PAGES:
        (folder / place_of(page)).parent.mkdir(parents=True, exist_ok=True)
        (folder / place_of(page)).write_text(with_links_of_the_site(page))


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
