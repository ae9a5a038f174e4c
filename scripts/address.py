"""Set or check the address of the project: `python scripts/address.py [ADDRESS | --published]`.

The address of the repository is set once, in `[project.urls]` of pyproject.toml. Files that cannot read it from there
repeat it: README, CITATION, the settings of the site, and pages that clone the repository. With an ADDRESS, such as
https://github.com/me/agentlightning, it is replaced in all of them. With `--published`, which the release workflow
runs, the placeholder is an error. Without an argument the current address is printed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "https://example.org/agentlightning"
FILES = (
    "pyproject.toml",
    "README.md",
    "CITATION.cff",
    "zensical.toml",
    "docs/how-to/install.md",
    ".github/ISSUE_TEMPLATE/config.yml",
)
"""Files that contain the address. A test finds those that are missing here."""


def addresses(root: Path = ROOT) -> tuple[str, str]:
    """Return the addresses of the repository and of the site."""
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    return urls["Repository"], urls["Documentation"]


def site_of(repository: str) -> str:
    """Return the address at which the pages of a repository are published: GitHub Pages, or `/docs` elsewhere."""
    on_github = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+)", repository)
    return f"https://{on_github[1].lower()}.github.io/{on_github[2]}" if on_github else f"{repository}/docs"


def replace(address: str, root: Path = ROOT) -> list[str]:
    """Write `address` into every file of FILES; return the files that changed."""
    repository, site = addresses(root)
    changed: list[str] = []
    for name in FILES:
        text = (root / name).read_text()
        # The site first: the placeholder's begins with the repository's.
        new = text.replace(site, "\0").replace(repository, address).replace("\0", site_of(address))
        if new != text:
            (root / name).write_text(new)
            changed.append(name)
    return changed


def main(arguments: list[str]) -> str | None:
    """Run the command; return an error message, or None."""
    if arguments == ["--published"]:
        if addresses()[0] != PLACEHOLDER:
            return None
        return f"The address of the project is the placeholder {PLACEHOLDER}. Set it: python scripts/address.py ADDRESS"
    if not arguments:
        print(*addresses(), sep="\n")
        return None
    if len(arguments) > 1 or not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", arguments[0]):
        got = " ".join(arguments)
        return f"ADDRESS must be like https://github.com/me/agentlightning, without a final slash; got {got}"
    print("changed:", ", ".join(replace(arguments[0])) or "nothing")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
