"""Lay the pages out for the site: `python -m tests.packaging.pages FOLDER`.

The site takes its pages from one folder. `docs/` goes there as it is, the pages of the root (README, CONTRIBUTING and
others) into `project/`, those of `contrib/` and `examples/` into folders of the same names; links between them are
written anew. `reference/api/` gets a page for each package, on which mkdocstrings puts what the docstrings of its
public names say.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

from tests.packaging.names import PACKAGE, pages_of_packages, public_definitions, tree_of

ROOT = Path(__file__).parents[2]
OF_THE_ROOT = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT", "AGENTS")
_ALL = {
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / f"{name}.md" for name in OF_THE_ROOT),
    *(path for folder in ("contrib", "examples") for path in (ROOT / folder).rglob("README.md")),
}
PAGES = {page for page in _ALL if "node_modules" not in page.parts}
_BADGES = re.compile(r"^<!-- badges.*?^<!-- end of the badges -->\n+", re.DOTALL | re.MULTILINE)
_DIAGRAM = re.compile(r"^```mermaid\n.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def place_of(page: Path) -> Path:
    """Return where a page of the repository is in the folder of the site."""
    inside = page.relative_to(ROOT)
    if inside.parts[0] == "docs":
        return inside.relative_to("docs")
    return inside if len(inside.parts) > 1 else Path("project") / inside


def with_links_of_the_site(page: Path) -> str:
    """Return the text of a page with links to the places in the site, and without what is loaded from elsewhere.

    Badges are removed. A diagram, for which the site would load Mermaid, becomes the image of its page in
    `docs/images`, which `mmdc -i PAGE.md -o docs/images/PAGE.svg` of the npm package `@mermaid-js/mermaid-cli` draws.
    """

    def rewrite(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / link[1]))
        inside = target.is_relative_to(ROOT / "docs") or target in PAGES
        return os.path.relpath(place_of(target), place_of(page).parent) if inside else link[1]

    text = _DIAGRAM.sub(f"![Diagram](../images/{page.stem}.svg)", _BADGES.sub("", page.read_text()))
    return _LINK.sub(rewrite, text)


API = Path("reference/api")
"""Folder of the packages' pages, in the folder of the site."""


def pages_of_names() -> dict[Path, str]:
    """Return the text of each page that is made for the site, by its place in the folder of the site."""
    importable = public_definitions()
    lists: list[str] = []
    pages: dict[Path, str] = {}
    definitions = pages_of_packages()
    for package in sorted(definitions, key=ORDER.index):
        places = definitions[package]
        docstring = ast.get_docstring(tree_of(f"{PACKAGE}.{package}")[1]) or _docstring_beside_the_stub(package)
        head = f"# {package}\n\n{docstring}\n"
        blocks = [f"::: {place}\n\nTo import: {_paths(importable[place])}\n" for place in places]
        pages[API / f"{package}.md"] = "\n".join([head, *blocks])
        names = ", ".join(f"[{place.rsplit('.', 1)[1]}]({package}.md#{place})" for place in places)
        lists.append(f"| [{package}]({package}.md) | {names} |")
    table = "\n".join(["| package | names |", "| --- | --- |", *lists])
    pages[API / "index.md"] = f"{INDEX}\n{table}\n"
    pages[ERRORS] = page_of_errors()
    return pages


ORDER = (
    *("litagent", "trainer", "types", "emitter", "algorithm", "training", "prompt_search", "evaluation"),
    *("store", "runner", "execution", "tracer", "adapter", "llm_proxy", "chat", "trackers", "integrations"),
    *("environments", "errors", "exit_codes", "logging", "config", "env_var", "semconv", "utils", "legacy"),
)
"""The packages in the order in which a program needs them."""
ERRORS = API.parent / "errors.md"
"""Page of the error messages, so that the search of the site finds them."""
ERRORS_HEAD = """# Error messages

The messages of the package's errors, so that you can search for one. `...` is a value. Each message says what was
wrong and what to do. [errors](api/errors.md) describes the classes.
"""


def message_of(node: ast.expr) -> str:
    """Return the text of an expression, with `...` for each value that is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(message_of(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return message_of(left) + message_of(right)
        case _:
            return "..."


def page_of_errors() -> str:
    """Return the page of the error messages that the package raises, by package."""
    by_package: dict[str, set[str]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = " ".join(message_of(node.exc.args[0]).replace("`", "'").split())
                if len(message.replace("...", "").split()) >= 3:
                    package = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
                    by_package.setdefault(package, set()).add(f"- `{message}` ({ast.unparse(node.exc.func)})")
    sections = (f"## {package}\n\n" + "\n".join(sorted(lines)) for package, lines in sorted(by_package.items()))
    return "\n\n".join([ERRORS_HEAD, *sections]) + "\n"


INDEX = """# Every public name

Public is what `agl.` and the packages give. Each page is made of the docstrings of its package. Arguments that have the
same meaning everywhere are explained in [Arguments](../arguments.md).
"""


def _paths(importable: set[str]) -> str:
    """Return under which names a program finds it, the one of `agl` first."""
    written = sorted((path.replace(f"{PACKAGE}.", "agl.", 1) for path in importable), key=lambda path: path.count("."))
    return ", ".join(f"`{path}`" for path in written)


def _docstring_beside_the_stub(package: str) -> str:
    init = ROOT / PACKAGE / package / "__init__.py"
    return (ast.get_docstring(ast.parse(init.read_text())) or "") if init.is_file() else ""


ENTRY = "| [Commands](reference/cli.md)"
API_ENTRY = """| [Python API](reference/api/index.md) | each public name, from the docstrings |
| [Error messages](reference/errors.md) | to find one with the search |"""
"""Rows of the front page that are in the site alone, and the row that follows them."""


def lay_out(folder: Path) -> None:
    """Put every page into `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for page in PAGES:
        (folder / place_of(page)).parent.mkdir(parents=True, exist_ok=True)
        (folder / place_of(page)).write_text(with_links_of_the_site(page))
    for place, text in pages_of_names().items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    index = folder / "index.md"
    index.write_text(index.read_text().replace(ENTRY, f"{API_ENTRY}\n{ENTRY}", 1))


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
