"""Removes secrets from responses: API keys of resources, and values with names that indicate secrets.

All responses, events and command outputs are redacted, except operations declared `whole`: an agent gets its task and
resources as published, an algorithm gets its tasks by id, and a publisher gets the published data. Ids and names of
records are unchanged, because later requests use them. `state` and `prompt` records are complete, because an algorithm
continues from them. The text between agents and models is complete, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from pydantic import BaseModel

from agentlightning.types import LLM, RunRecord
from agentlightning.utils.masking import without_secrets

_NO_TEXTS = frozenset((type(None), bool, int, float))
_WHOLE_RECORDS = frozenset(("state", "prompt"))
_KEPT: dict[str, tuple[str, ...]] = {"RunRecord": ("name",), "Part": ("text",), "ToolCall": ("arguments",)}
"""Fields that are not redacted: ids, and the text of agents and models."""


def hidden(value: object) -> Any:
    """Return a value or a collection of values without secrets; the same object if it contains none."""
    if isinstance(value, str) and ":" not in value and "=" not in value:
        return value
    if isinstance(value, BaseModel):
        return _hidden_model(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], BaseModel):
        items = cast("list[BaseModel]", value)
        results = [_hidden_model(item) for item in items]
        return results if any(new is not old for new, old in zip(results, items, strict=True)) else items
    if isinstance(value, Mapping):
        values = cast("Mapping[str, object]", value)
        if isinstance(next(iter(values.values()), None), BaseModel):
            return {name: hidden(item) for name, item in values.items()}
        return without_secrets(values) or values
    named = without_secrets({"": cast("object", value)})
    return cast("object", value) if named is None else named[""]


def _hidden_model(value: BaseModel) -> BaseModel:
    fields, changes = value.__dict__, dict[str, Any]()
    if not (isinstance(value, RunRecord) and value.kind in _WHOLE_RECORDS):
        for name in _texts_of(type(value)):
            old = fields[name]
            if old.__class__ not in _NO_TEXTS and (new := hidden(old)) is not old:
                changes[name] = new
    if isinstance(value, LLM) and value.api_key is not None:
        changes["api_key"] = None
    if (extra := value.__pydantic_extra__) and (new := without_secrets(extra)) is not None:
        changes |= new
    return value.model_copy(update=changes) if changes else value


@cache
def _texts_of(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of a model that can contain a secret."""
    exceptions = _KEPT.get(kind.__name__, ())
    return tuple(
        name
        for name in kind.model_fields
        if not (name in exceptions or name == "id" or name == "cursor" or name.endswith(("_id", "_ids")))
    )
