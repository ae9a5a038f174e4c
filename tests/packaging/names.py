"""The public names and the module that defines each: read from the sources, without importing the package.

Public is what `agl.` and the packages give: the names that an `__init__.pyi`, or else an `__init__.py`, imports. The
site has one page per package, made of these by `pages.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "agentlightning"
PUBLIC = (
    "adapter",
    "algorithm",
    "algorithm.apo",
    "emitter",
    "environments",
    "execution",
    "integrations",
    "legacy",
    "litagent",
    "llm_proxy",
    "runner",
    "store",
    "tracer",
    "trackers",
    "trainer",
    "types",
    "utils.metrics",
    "utils.otlp",
)
"""Packages whose names are public beside those of `agl`."""
MODULES = ("env_var", "errors", "exit_codes", "logging", "semconv")
"""Modules whose own names are public."""


@cache
def tree_of(module: str) -> tuple[Path, ast.Module]:
    """Return the file of a module or package, its stub where it has one, and what is written in it."""
    place = ROOT / module.replace(".", "/")
    for path in (place / "__init__.pyi", place / "__init__.py", place.with_suffix(".py")):
        if path.is_file():
            return path, ast.parse(path.read_text())
    raise FileNotFoundError(f"no source of {module} at {place}")


def given_by(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield each name that a package imports from another module of ours, that module, and its name there."""
    for node in tree_of(module)[1].body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                yield alias.asname or alias.name, str(node.module), alias.name


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements at the top of a module, or there below an `if`."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else (node,)


def own_names(module: str) -> Iterator[str]:
    """Yield the classes, functions and constants that a module defines at its top."""
    for node in statements(tree_of(module)[1]):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def definition(module: str, name: str) -> str | None:
    """Return the dotted path at which a name is defined; None if it is a module, or not of ours."""
    if name in own_names(module):
        return f"{module}.{name}"
    for public_name, source, there in given_by(module):
        if public_name == name and source != module:
            return definition(source, there)
    return None


def public_definitions() -> dict[str, set[str]]:
    """Return, for each path at which a public name is defined, the paths under which programs import it."""
    definitions: dict[str, set[str]] = {}
    for package in (PACKAGE, *(f"{PACKAGE}.{name}" for name in PUBLIC)):
        for name, source, there in given_by(package):
            place = None if name.startswith("_") else definition(source, there)
            if place is not None:
                definitions.setdefault(place, set()).add(f"{package}.{name}")
    for module in MODULES:
        for name in own_names(f"{PACKAGE}.{module}"):
            if not name.startswith("_"):
                place = f"{PACKAGE}.{module}.{name}"
                definitions.setdefault(place, set()).add(place)
    return definitions


FIRST = (
    *("rollout", "LitAgent", "Trainer", "Rollout", "emit_reward", "Algorithm", "GRPO", "GRPOSettings"),
    *("EvaluationResult", "LightningStore", "LitAgentRunner", "Tracer", "TraceAdapter", "LLMProxy", "Chat"),
)
"""The main names, which come first on their page. Then come the other names of `agl`, then those of packages."""


def pages_of_packages() -> dict[str, list[str]]:
    """Return the definitions for each page, which is a top-level package or module, in order."""
    pages: dict[str, list[str]] = {}
    definitions = public_definitions()

    def order(place: str) -> tuple[str, int, bool, str]:
        _, package, *_, name = place.split(".")
        rank = FIRST.index(name) if name in FIRST else len(FIRST)
        return package, rank, f"{PACKAGE}.{name}" not in definitions[place], name.lower()

    for place in sorted(definitions, key=order):
        pages.setdefault(place.split(".")[1], []).append(place)
    return pages
