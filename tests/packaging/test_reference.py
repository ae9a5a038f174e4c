"""The reference: every public name is on a page, and name, argument and field have a meaning."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path

import agentlightning as agl
from tests.packaging import arguments, names, pages

NO_DEFINITION = {"__version__", "integrations", "reward"}
"""A text, a package, and a module that is called."""


def test_every_argument_of_every_public_function_has_a_meaning() -> None:
    assert arguments.without_meaning() == {}


def test_the_walk_finds_functions_and_methods_and_constructors() -> None:
    places = {place for place, *_ in arguments.explained_calls()}
    for name in ("trainer.trainer.Trainer", "trainer.trainer.Trainer.fit", "emitter.reward.emit_reward"):
        assert f"agentlightning.{name}" in places
    assert len(places) > 300


def test_the_page_of_arguments_is_up_to_date() -> None:
    assert arguments.PAGE.read_text() == arguments.page(), "run: python -m tests.packaging.arguments"


def test_every_name_of_agl_is_on_a_page() -> None:
    importable = {path for paths in names.public_definitions().values() for path in paths}
    assert {name for name in agl.__all__ if f"agentlightning.{name}" not in importable} == NO_DEFINITION
    assert len(pages.pages_of_names()) > 20
    listed = [place for places in names.pages_of_packages().values() for place in places]
    assert sorted(listed) == sorted(names.public_definitions())


def test_every_public_name_says_what_it_is() -> None:
    assert [place for place, value in arguments.public_objects().items() if not inspect.getdoc(value)] == []
    assert [place for place in names.public_definitions() if not has_docstring(place)] == []


def has_docstring(place: str) -> bool:
    """True for a class or function with a docstring, and for a constant with one below it."""
    module, _, name = place.rpartition(".")
    results: list[bool] = []
    for node, below in pairwise([*names.statements(ast.parse(source_of(module).read_text())), ast.Pass()]):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            results.append(ast.get_docstring(node) is not None)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            results.append(isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
    return any(results)  # of overloads the last one has it


def source_of(module: str) -> Path:
    place = names.ROOT / module.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
