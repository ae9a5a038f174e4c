"""Show the docstrings below the fields of a class in `help()` and in JSON Schema.

The source is read on demand, so defining a class takes no additional time. pydantic's `use_attribute_docstrings`
reads it at every import: 50 ms for the classes of `types`, half of their import time.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticUndefined
from typing_extensions import override

_Class = TypeVar("_Class", bound=type)


def explain_fields(cls: _Class) -> _Class:
    """List the fields of a dataclass and their docstrings in `help()`. Place this decorator above `@dataclass`."""
    cls.__doc__ = _Help(cls.__doc__)  # pyright: ignore[reportAttributeAccessIssue] -- Python calls its `__get__`
    return cls


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases; empty if the source is not available."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base in (object, BaseModel):
            continue
        try:
            module = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # made at run time, or shipped without source
            continue
        definitions = [each for each in module.body if isinstance(each, ast.ClassDef)]
        for field, below in (pair for definition in definitions for pair in pairwise(definition.body)):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
                case _:
                    pass
    return texts


class _Help:
    """The `__doc__` of a dataclass: its docstring, followed by its fields. Built on access."""

    def __init__(self, summary: str | None) -> None:
        self.summary = summary

    def __get__(self, instance: object, owner: type) -> str:
        return _with_fields(owner, self.summary)


def _with_fields(cls: type, summary: str | None) -> str:
    docstrings = field_docstrings(cls)
    lines: list[str] = []
    fields: dict[str, Any] = vars(cls).get("__pydantic_fields__") or getattr(cls, "__dataclass_fields__", {})
    for name, field in fields.items():
        default = ""  # as a signature writes it
        if field.default_factory not in (None, dataclasses.MISSING):
            default = f" = {field.default_factory.__name__}()"
        elif field.default not in (PydanticUndefined, dataclasses.MISSING):
            default = f" = {field.default!r}"
        # the type as it is written in the source
        notation = next(types[name] for base in cls.__mro__ if name in (types := inspect.get_annotations(base)))
        annotation = notation if isinstance(notation, str) else inspect.formatannotation(notation)
        lines.append(f"    {name}: {annotation}{default}")
        lines.extend(f"        {line}" for line in docstrings.get(name, "").splitlines())
    return "\n".join([inspect.cleandoc(summary or ""), *(["", "Fields:", *lines] if lines else [])])


def _summary(cls: type) -> str:
    """Return the docstring in the source of the class. `PaginatedResult[Rollout]` has that of `PaginatedResult`."""
    return next(text for base in cls.__mro__ if (text := vars(base).get("__doc__")))


if TYPE_CHECKING:  # pydantic's metaclass tells type checkers that the fields are constructor arguments
    from pydantic._internal._model_construction import ModelMetaclass as _ValueType
else:

    class _ValueType(type(BaseModel)):
        @property
        def __doc__(cls) -> str:
            """The docstring of the class, followed by its fields. Built on access."""
            return _with_fields(cls, _summary(cls))

        @override
        def __dir__(cls) -> list[str]:
            """Exclude from `help()` the members that every pydantic model has.

            `help()` calls this method through `inspect`. Other callers, such as `Mock(spec=...)`, get all names.
            """
            names = super().__dir__()
            if sys._getframe(1).f_globals.get("__name__") != "inspect":
                return names
            return [name for name in names if not name.startswith("_") and name not in vars(BaseModel)]


class Value(BaseModel, metaclass=_ValueType):
    """Base class of the public pydantic models. Each field has a docstring below it."""

    @classmethod
    @override
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        model["description"] = inspect.cleandoc(_summary(cls))
        for name, text in field_docstrings(cls).items():  # pyright: ignore[reportArgumentType] -- classes can be hashed
            if name in model.get("properties", {}):
                model["properties"][name].setdefault("description", text)
        return schema
