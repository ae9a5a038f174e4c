"""Every field of a public value is explained, where people look: `help()` and the OpenAPI document."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import pydoc
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pydantic import BaseModel
from typing_extensions import get_annotations, is_typeddict

import agentlightning as agl
from agentlightning.base.field_help import Value, explain_fields, field_docstrings
from tests.stubs.processes import ROOT, run_program

PACKAGES = (
    *(
        "adapter",
        "algorithm",
        "emitter",
        "execution",
        "litagent",
        "llm_proxy",
        "runner",
        "semconv",
    ),
    *("store", "tracer", "trainer", "types", "utils.otlp", "utils.server_launcher"),
)


def public_values() -> list[type]:
    """Every pydantic model, dataclass and typed dictionary of ours that a public name gives."""
    modules = [agl, *(importlib.import_module(f"agentlightning.{package}") for package in PACKAGES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names say so when they are imported
        offered = {getattr(module, name) for module in modules for name in _names(module) if _is_type(module, name)}
    ours = [cls for cls in offered if cls.__module__.startswith("agentlightning.")]
    return sorted((cls for cls in ours if _is_value(cls)), key=lambda cls: cls.__qualname__)


def _names(module: Any) -> list[str]:
    return getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]


def _is_type(module: Any, name: str) -> bool:
    return inspect.isclass(getattr(module, name))


def _is_value(cls: type) -> bool:
    return issubclass(cls, BaseModel) or dataclasses.is_dataclass(cls) or is_typeddict(cls)


def _fields(cls: type) -> set[str]:
    if issubclass(cls, BaseModel):
        return set(cls.model_fields)
    if dataclasses.is_dataclass(cls):
        return {field.name for field in dataclasses.fields(cls)}
    return set(get_annotations(cls))


def test_the_walk_finds_the_values() -> None:
    values = public_values()
    assert {agl.Span, agl.RolloutConfig, agl.GatewayLimits, agl.PolicyConfig, agl.FilterField} <= set(values)
    assert sum(len(_fields(cls)) for cls in values) > 250


@pytest.mark.parametrize("cls", public_values(), ids=lambda cls: cls.__qualname__)
def test_every_field_of_a_public_value_has_a_docstring(cls: type) -> None:
    assert _fields(cls) - {name for name, text in field_docstrings(cls).items() if text} == set()


@pytest.mark.parametrize(
    "cls",
    [cls for cls in public_values() if not is_typeddict(cls)],
    ids=lambda cls: cls.__qualname__,
)
def test_help_shows_every_field_with_its_docstring(cls: type) -> None:
    shown = pydoc.plain(pydoc.render_doc(cls))
    for name in _fields(cls):
        assert f" {name}: " in shown
        assert field_docstrings(cls)[name].splitlines()[0] in shown


def test_fields_are_explained_below_them_and_nowhere_else() -> None:
    """No class lists its attributes in its docstring, and no comment stands behind a field."""
    elsewhere: list[str] = []
    for file in Path(agl.__file__).parent.rglob("*.py"):
        lines = file.read_text().splitlines()
        classes = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.ClassDef)]
        elsewhere += [f"{file}: {each.name}" for each in classes if "Attributes:" in (ast.get_docstring(each) or "")]
        for field in (node for each in classes for node in each.body if isinstance(node, ast.AnnAssign)):
            rest = lines[(field.end_lineno or 0) - 1].encode()[field.end_col_offset or 0 :].decode().strip()
            if rest.startswith("#") and not re.match(r"# (pyright|type|noqa): ?", rest):
                elsewhere.append(f"{file}:{field.lineno} {rest}")
    assert elsewhere == []


def test_help_of_a_model_fits_two_screens() -> None:
    shown = pydoc.plain(pydoc.render_doc(agl.RolloutConfig)).splitlines()
    assert len(shown) < 100
    start = shown.index(" |      timeout_seconds: float | None = None")
    assert shown[start + 1] == " |          Longest duration of one attempt in seconds; None for no limit."


def test_a_model_keeps_what_pydantic_gives_it_on_its_values() -> None:
    assert {"model_dump", "model_copy", "timeout_seconds"} <= set(dir(agl.RolloutConfig()))
    assert agl.RolloutConfig.model_validate({"max_attempts": 2}).max_attempts == 2


def test_a_mock_of_a_model_has_what_pydantic_gives_it() -> None:
    mocked = mock.Mock(spec=agl.Span)
    mocked.model_dump.return_value = {"name": "call"}
    assert mocked.model_dump() == {"name": "call"}


class Tool(agl.LLM):
    """A model of a user."""

    cost: float = 0.0
    """Dollars per call."""


@explain_fields
@dataclass
class Point:
    """A point."""

    x: int
    """To the right."""
    y: list[int] = dataclasses.field(default_factory=list)


def test_classes_of_users_explain_their_own_fields_and_those_they_inherit() -> None:
    assert "Dollars per call." in (Tool.__doc__ or "")
    assert "Base URL for the client" in (Tool.__doc__ or "")
    assert Tool.model_json_schema()["properties"]["cost"]["description"] == "Dollars per call."
    assert Tool.model_json_schema()["description"] == "A model of a user."


def test_the_doc_of_a_dataclass_lists_types_defaults_and_meanings() -> None:
    expected = "A point.\n\nFields:\n    x: int\n        To the right.\n    y: list[int] = list()"
    assert Point.__doc__ == Point(1).__doc__ == expected


def test_a_class_without_source_has_its_fields_without_docstrings() -> None:
    made = type(
        "Made", (Value,), {"__annotations__": {"n": int}, "__doc__": "Made at run time.", "__module__": "nowhere"}
    )
    assert made.__doc__ == "Made at run time.\n\nFields:\n    n: int"


def test_openapi_explains_every_field_of_every_model() -> None:
    document = json.loads(Path("docs/reference/openapi.json").read_text())
    schemas: dict[str, Any] = document["components"]["schemas"]
    fields = [
        (model, name, part) for model, schema in schemas.items() for name, part in schema.get("properties", {}).items()
    ]
    assert len(fields) > 150
    assert [(model, name) for model, name, part in fields if not part.get("description")] == []


@pytest.mark.heavy
def test_type_checkers_know_the_fields_as_arguments(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from agentlightning.types import PaginatedResult, RolloutConfig\n"
        "RolloutConfig(max_attempt=2)\n"
        "reveal_type(PaginatedResult(items=[1], limit=1, offset=0, total=1))\n"
    )
    output = run_program("python", "-m", "basedpyright", program, folder=ROOT, code=None).stdout
    assert 'No parameter named "max_attempt"' in output
    assert '"PaginatedResult[int]"' in output
