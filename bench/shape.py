"""`python -m bench.shape [folder ...]`: the shape of the package in figures, one column for each checkout.

Without an argument it measures this checkout; each argument is the folder of another one, so that
`python -m bench.shape /path/of/an/older/checkout .` prints before and after side by side. `--json` prints the same
figures as JSON. The docstrings below define each figure; `bench/shape_run.py` has those that run code of the package.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import keyword
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SHARED_LINES = 6
"""Lines that two places must share to count as a pair."""
SMALL_MODULE = 40
"""Lines of the file below which a module counts as small."""

ROWS = {
    "code_lines": ("code lines of the package", "10 % fewer"),
    "modules": ("modules", ""),
    "largest_folder": ("files directly in the largest folder", "16"),
    "median_folder": ("files directly in the median folder", "8"),
    "small_modules": ("modules under 40 lines", "15"),
    "one_call_per_1000": ("private functions with one call, per 1,000 code lines", "8"),
    "one_call": ("  their number", ""),
    "largest_cycle": ("modules in the largest import cycle, type-only imports counted", "1"),
    "broad_except_per_1000": ("broad except that does not re-raise, per 1,000 code lines", "1.0"),
    "broad_except": ("  their number", ""),
    "broad_except_no_reason": ("broad except without a reason on the line", "0"),
    "public_fields": ("fields of public values", ""),
    "public_fields_explained": ("  that help() explains", "all"),
    "openapi_fields": ("fields of openapi.json", ""),
    "openapi_fields_explained": ("  that have a description", "all"),
    "files_of_one_rollout": ("files that the steps of tests/test_one_rollout.py execute", "70"),
    "files_of_one_step": ("files that a GRPO step with two rollouts executes", "130"),
    "file_changes_of_one_step": ("  changes from one file to another in it", "3,000"),
    "calls_to_claim": ("calls between Claims.next and the script that claims", "6"),
    "shared_pairs": ("pairs of places that share six or more lines", "40"),
    "any_names": ("Any in the package", "900"),
}
"""Rows of the table: key, label and the figure to reach."""


@dataclass(frozen=True)
class Source:
    """One module of the package, read and parsed."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def docstring_lines(self) -> set[int]:
        """Return the lines of docstrings, including those of attributes."""
        lines: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return lines

    @property
    def code_tokens(self) -> list[tokenize.TokenInfo]:
        """Return the tokens outside comments and docstrings, without line ends and indentation."""
        layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        apart = self.docstring_lines
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in tokens if token.type not in layout and token.start[0] not in apart]


def read_package(folder: Path) -> list[Source]:
    """Return the modules of the package in a checkout."""
    paths = sorted((folder / "agentlightning").rglob("*.py"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no agentlightning/*.py; name the root folder of a checkout")
    texts = [path.read_text() for path in paths]
    return [Source(path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def count_code_lines(sources: list[Source]) -> int:
    """Count lines that hold code: no blank lines, comments and docstrings."""
    return sum(
        len({line for token in source.code_tokens for line in range(token.start[0], token.end[0] + 1)})
        for source in sources
    )


def measure_folders(sources: list[Source]) -> dict[str, float]:
    """Count the files directly in each folder, and small modules; `__init__.py` is a file but no small module."""
    sizes = Counter(source.path.parent for source in sources).values()
    named = [source for source in sources if source.path.name not in ("__init__.py", "__main__.py")]
    return {
        "modules": len(sources),
        "largest_folder": max(sizes),
        "median_folder": statistics.median(sizes),
        "small_modules": sum(len(source.text.splitlines()) < SMALL_MODULE for source in named),
    }


def count_one_call_functions(sources: list[Source]) -> int:
    """Count private functions and methods whose only use in the package is one call.

    A use belongs to the definition of that name in the same class, else in the same module, else to every definition of
    that name in the package.
    """
    defined: Counter[tuple[Path, str, str]] = Counter()
    uses: list[tuple[Path, str, str, bool]] = []
    for source in sources:
        for node, scope in _with_class(source.tree, ""):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") and not node.name.startswith("__"):
                    defined[source.path, scope, node.name] += 1
            elif isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                uses.append((source.path, scope, name, getattr(node, "is_called", False)))
    in_module: dict[tuple[Path, str], list[tuple[Path, str, str]]] = defaultdict(list)
    in_package: dict[str, list[tuple[Path, str, str]]] = defaultdict(list)
    for place in defined:
        in_module[place[0], place[2]].append(place)
        in_package[place[2]].append(place)
    used: dict[tuple[Path, str, str], list[bool]] = defaultdict(list)
    for path, scope, name, called in uses:
        place = (path, scope, name)
        for owner in [place] if place in defined else in_module.get((path, name)) or in_package.get(name, []):
            used[owner].append(called)
    return sum(used[place] == [True] for place, count in defined.items() if count == 1)


def _with_class(node: ast.AST, scope: str) -> list[tuple[ast.AST, str]]:
    """Return every node below with the name of the innermost class around it; called names are marked."""
    nodes: list[tuple[ast.AST, str]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            child.func.is_called = True  # type: ignore[attr-defined] -- a mark for this count alone
        nodes.append((child, scope))
        nodes += _with_class(child, child.name if isinstance(child, ast.ClassDef) else scope)
    return nodes


def measure_broad_excepts(sources: list[Source]) -> dict[str, int]:
    """Count handlers of `Exception`, `BaseException` or everything that do not raise, and those without a reason.

    The reason is a comment on the line of `except`, also where the handler raises. A comment that only silences a
    checker does not count.
    """
    silent = without_reason = 0
    for source in sources:
        lines = source.text.splitlines()
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler) or not _is_broad(node):
                continue
            silent += not any(isinstance(inner, ast.Raise) for line in node.body for inner in ast.walk(line))
            _, _, comment = lines[node.lineno - 1].partition("#")
            reason = comment.split("--")[-1].strip()
            without_reason += not reason or reason.startswith(("noqa", "type:", "pyright:"))
    return {"broad_except": silent, "broad_except_no_reason": without_reason}


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return not names.isdisjoint({"Exception", "BaseException"})


def count_any_names(sources: list[Source]) -> int:
    """Count the uses of the name `Any` in code, without imports."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for source in sources for node in ast.walk(source.tree))


def count_shared_pairs(sources: list[Source]) -> int:
    """Count pairs of places, in two files, that share six or more successive lines of code.

    Two lines are the same if their tokens are, where every number counts as one number and names may differ as long as
    they differ in the same way on all six lines. Strings and keywords count as written. Imports, comments, docstrings
    and blank lines are excluded. A longer shared stretch is one pair.
    """
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for source in sources:
        lines = _lines_of_tokens(source)
        for start in range(len(lines) - SHARED_LINES + 1):
            places[_shape(lines[start : start + SHARED_LINES])].append((source.path, start))
    pairs = {
        (one, other)
        for same in places.values()
        for one, other in itertools.combinations(sorted(same), 2)
        if one[0] != other[0]
    }
    return sum(((a, i - 1), (b, j - 1)) not in pairs for (a, i), (b, j) in pairs)


def _lines_of_tokens(source: Source) -> list[list[tokenize.TokenInfo]]:
    imports = {
        line
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: dict[int, list[tokenize.TokenInfo]] = defaultdict(list)
    for token in source.code_tokens:
        if token.start[0] not in imports:
            lines[token.start[0]].append(token)
    return [lines[number] for number in sorted(lines)]


def _shape(lines: list[list[tokenize.TokenInfo]]) -> tuple[str, ...]:
    names: dict[str, str] = {}
    shape: list[str] = []
    for line in lines:
        for token in line:
            if token.type == tokenize.NUMBER:
                shape.append("number")
            elif token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                shape.append(names.setdefault(token.string, f"name {len(names)}"))
            else:
                shape.append(token.string)
        shape.append("\n")
    return tuple(shape)


def measure_openapi(folder: Path) -> dict[str, int]:
    """Count the properties of the schemas in `docs/reference/openapi.json`, and those with a description."""
    schemas = json.loads((folder / "docs/reference/openapi.json").read_text())["components"]["schemas"]
    fields = [field for schema in schemas.values() for field in schema.get("properties", {}).values()]
    return {
        "openapi_fields": len(fields),
        "openapi_fields_explained": sum(bool(field.get("description")) for field in fields),
    }


def measure_running(folder: Path) -> dict[str, Any]:
    """Return the figures from an interpreter with this checkout's package in its path: see `bench/shape_run.py`."""
    command = [sys.executable, str(HERE / "bench" / "shape_run.py"), str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path) -> dict[str, Any]:
    """Return every figure of one checkout, by its key in `ROWS`."""
    sources = read_package(folder)
    code_lines = count_code_lines(sources)
    excepts = measure_broad_excepts(sources)
    one_call = count_one_call_functions(sources)
    return {
        "code_lines": code_lines,
        **measure_folders(sources),
        "one_call": one_call,
        "one_call_per_1000": round(1000 * one_call / code_lines, 1),
        **excepts,
        "broad_except_per_1000": round(1000 * excepts["broad_except"] / code_lines, 2),
        "any_names": count_any_names(sources),
        "shared_pairs": count_shared_pairs(sources),
        **measure_openapi(folder),
        **measure_running(folder),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[HERE], help="root folders of checkouts; this one if none"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, by folder")
    options = parser.parse_args()
    columns = {str(folder): measure(folder.resolve()) for folder in options.folders}
    if options.json:
        print(json.dumps(columns, indent=2))
        return 0
    heads = [Path(name).resolve().name for name in columns]
    print(f"{'':66}" + "".join(f"{head[:11]:>12}" for head in heads) + f"{'to reach':>12}")
    for key, (label, target) in ROWS.items():
        values = "".join(f"{figures[key]!s:>12}" for figures in columns.values())
        print(f"{label:66}{values}{target:>12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
