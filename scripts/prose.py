"""Find words that are not plain English: `python scripts/prose.py [FILE...]`, part of `make lint`.

The word list is `scripts/prose.toml`. The script checks the pages without their code, the strings of at least three
words in the Python of the package and the examples, docstrings included, and the texts of the dashboard. Vale
would be the usual tool, but its package on PyPI downloads the program from elsewhere when it runs.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUOTING = ("docs/reference/documents.md", "contrib/recipes/webshop/", "tests/", "bench/")
"""Files that quote the words of others or need a word of the list for their subject, and files that no user reads."""
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
_TEXT_OF_ELEMENT = re.compile(r'"[^"]* [^"]*"|`[^`]* [^`]*`|>[^<>{}]* [^<>{}]*<|^\s*[A-Z][\w ,.\'-]+$')
_TEXTS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def word_list(path: Path = ROOT / "scripts/prose.toml") -> list[tuple[re.Pattern[str], str]]:
    """Return each pattern, which matches complete words in any case, and the words to use in its place."""
    words = tomllib.loads(path.read_text())["words"]
    return [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead) for pattern, instead in words.items()]


def lines_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown page with their numbers, without code and the targets of links."""
    blank = _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    yield from enumerate(blank.splitlines(), start=1)


def lines_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of the strings of a Python module with their numbers."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _TEXTS and len(token.string.split()) >= 3:
            for offset, line in enumerate(re.sub(r"`[^`]*`", "", token.string).split("\n")):
                yield token.start[0] + offset, line


def lines_of_dashboard(text: str) -> Iterator[tuple[int, str]]:
    """Yield the strings and the texts of elements of a TypeScript module with the numbers of their lines."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.lstrip().startswith(("//", "*", "/*")):
            yield from ((number, found) for found in _TEXT_OF_ELEMENT.findall(line))


LINES = {".md": lines_of_page, ".py": lines_of_module, ".ts": lines_of_dashboard, ".tsx": lines_of_dashboard}


def matches(path: Path, words: list[tuple[re.Pattern[str], str]], root: Path = ROOT) -> Iterator[str]:
    """Yield a message for each match of the word list in a file."""
    for number, line in LINES[path.suffix](path.read_text()):
        for pattern, instead in words:
            for match in pattern.finditer(line):
                yield f"{path.relative_to(root)}:{number}: '{match[0]}': {instead}"


def files() -> list[Path]:
    """Return the files of the repository whose text a user reads."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    listed = [name for name in listed if not name.startswith(QUOTING)]
    names = [name for name in listed if name.endswith(".md")]
    names += [name for name in listed if re.match(r"(agentlightning|examples|contrib)/.*\.py$", name)]
    names += [name for name in listed if re.match(r"dashboard/src/(?!.*\.(d|test|stories)\.).*\.tsx?$", name)]
    return [ROOT / name for name in names]


if __name__ == "__main__":
    named = [Path(name).resolve() for name in sys.argv[1:]] or files()
    messages = [message for path in named for message in matches(path, word_list())]
    print("\n".join(messages) or f"plain English: {len(named)} files checked")
    sys.exit(1 if messages else 0)
