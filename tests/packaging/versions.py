"""Build the site of every release beside that of the present pages: `python -m tests.packaging.versions FOLDER`.

Each version has a folder of its own: `dev` for the pages as they are committed, and one for the newest patch of each
minor version that has a tag (`v0.4.1` in `0.4.1`). The front page leads to the newest release; the menu of versions in
each site's header reads `versions.json`. A release is built from its tag, so that nothing built has to be kept.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEV = "dev"
MENU = '\n[project.extra.version]\nprovider = "mike"\ndefault = "latest"\n'
"""Settings with which the theme shows the menu: it reads `../versions.json`, a format that mike introduced."""


def releases(tags: Iterable[str]) -> list[str]:
    """Return the newest patch of each minor version among `tags`, the newest first; other tags do not count."""
    newest: dict[tuple[int, int], int] = {}
    for tag in tags:
        if match := re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", tag):
            major, minor, patch = (int(part) for part in match.groups())
            newest[major, minor] = max(patch, newest.get((major, minor), 0))
    return [f"{major}.{minor}.{patch}" for (major, minor), patch in sorted(newest.items(), reverse=True)]


def listed(versions: list[str]) -> list[dict[str, object]]:
    """Return what `versions.json` holds: the releases, the newest with the alias `latest`, and `dev` at the end."""
    rows: list[dict[str, object]] = [{"version": one, "title": one, "aliases": []} for one in versions]
    rows.append({"version": DEV, "title": "development", "aliases": []})
    rows[0]["aliases"] = ["latest"]
    return rows


def front_page(versions: list[str]) -> str:
    """Return a page that leads to the newest release and, read from a folder, links to each version."""
    places = [*versions, DEV]
    links = "\n".join(f'<li><a href="{one}/index.html">{one}</a></li>' for one in places)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="0; url={places[0]}/index.html">
<title>agentlightning</title>
<h1>agentlightning</h1>
<p>The pages of each version:</p>
<ul>
{links}
</ul>
</html>
"""


def build(folder: Path, root: Path = ROOT) -> list[str]:
    """Build every version of the repository `root` into `folder`, which is made anew; return the releases.

    Raises:
        subprocess.CalledProcessError: A version does not build. `folder` is as it was.
    """
    versions = releases(_git(root, "tag", "--list", "v*").split())
    having = [one for one in versions if _git(root, "ls-tree", f"v{one}", "zensical.toml")]
    with tempfile.TemporaryDirectory(prefix="site-", dir=root / "build") as made:
        for version in [*having, DEV]:
            _build_one(root, "HEAD" if version == DEV else f"v{version}", Path(made) / version)
        (Path(made) / "versions.json").write_text(json.dumps(listed(having), indent=1))
        (Path(made) / "index.html").write_text(front_page(having))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
    return having


def _build_one(root: Path, commit: str, target: Path) -> None:
    """Check `commit` out beside, build its site by its own `make docs`, and put it at `target`."""
    checkout = target.parent / f"{target.name}.checkout"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", checkout, commit], cwd=root, check=True)
    try:
        with (checkout / "zensical.toml").open("a") as settings:
            settings.write(MENU)
        subprocess.run(["make", "--silent", "docs"], cwd=checkout, check=True)
        shutil.move(checkout / "build/site", target)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", checkout], cwd=root, check=True)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    (ROOT / "build").mkdir(exist_ok=True)
    print("built:", ", ".join([*build(Path(sys.argv[1])), DEV]))
