"""The reference: every public name is on a page, and name, argument and field have a meaning."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import agentlightning as agl
from tests.packaging import names, pages

COMMON = re.findall(r"^\| `(\w+)` \| \S", (names.ROOT / "docs/reference/arguments.md").read_text(), re.MULTILINE)
"""Arguments that mean the same wherever they are; the page says what."""
OWN = re.compile(r"self|cls|args|kwargs|_.*")
NO_DEFINITION = {"__version__", "environments", "integrations", "reward"}
"""A text, two packages, and a module that is called."""


def public_objects() -> dict[str, Any]:
    """Return every public class and function of ours by the path of its definition."""
    objects: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names say so when they are imported
        for place, importable in names.public_definitions().items():
            module, _, name = min(importable).rpartition(".")
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value) or inspect.isfunction(value):
                objects[place] = value
    return objects


def explained_calls() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield path, function and all that is said of it: its docstring, those that it overrides, its class's."""
    for place, value in public_objects().items():
        if not inspect.isclass(value):
            yield place, value, inspect.getdoc(value) or ""
            continue
        docstring = inspect.getdoc(value) or ""
        is_value = issubclass(value, (BaseModel, BaseException)) or dataclasses.is_dataclass(value)
        if "__init__" in vars(value) and not is_value:
            yield place, value.__init__, f"{docstring} {value.__init__.__doc__ or ''}"
        for name, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if name.startswith("_") or not inspect.isfunction(function) or function.__module__ != value.__module__:
                continue
            bases = [base for base in value.__mro__ if name in vars(base)]
            others = [f"{base.__doc__} {inspect.getdoc(getattr(base, name)) or ''}" for base in bases]
            yield f"{place}.{name}", function, " ".join([docstring, *others])


def without_meaning() -> dict[str, list[str]]:
    """Return the arguments that no docstring names and that are not on the page, by the path of their function."""
    missing: dict[str, list[str]] = {}
    for place, function, docstring in explained_calls():
        arguments = [name for name in inspect.signature(function).parameters if not OWN.fullmatch(name)]
        undocumented = [name for name in arguments if name not in COMMON and not re.search(rf"\b{name}\b", docstring)]
        if undocumented:
            missing[place] = undocumented
    return missing


def test_every_argument_of_every_public_function_has_a_meaning() -> None:
    assert without_meaning() == {}


def test_the_walk_finds_functions_and_methods_and_constructors() -> None:
    places = {place for place, *_ in explained_calls()}
    for name in ("trainer.trainer.Trainer", "trainer.trainer.Trainer.fit", "emitter.reward.emit_reward"):
        assert f"agentlightning.{name}" in places
    assert len(places) > 300


def test_the_page_of_arguments_has_each_once_and_in_order() -> None:
    assert len(COMMON) > 100
    assert sorted(set(COMMON)) == COMMON


def test_every_name_of_agl_is_on_a_page() -> None:
    importable = {path for paths in names.public_definitions().values() for path in paths}
    assert {name for name in agl.__all__ if f"agentlightning.{name}" not in importable} == NO_DEFINITION
    assert len(pages.pages_of_names()) > 20
    listed = [place for places in names.pages_of_packages().values() for place in places]
    assert sorted(listed) == sorted(names.public_definitions())


def test_every_public_name_says_what_it_is() -> None:
    assert [place for place, value in public_objects().items() if not inspect.getdoc(value)] == []
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
