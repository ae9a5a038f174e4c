"""The secrets that answers hide: API keys of resources, and values and texts that look secret by their names.

Every answer, event and line of a command passes through here, except operations declared `whole`: an agent gets its
task and its resources as published, an algorithm gets its tasks by their ids, a publisher gets what it published. Ids
and the names of records stay unchanged, since they are used in later requests. An algorithm continues from a `state`
record and uses the text of a `prompt` record, so these are complete, and so is the text between agents and models.
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
"""Fields that stay unchanged: parts of an identity, and the text of agent and model."""


def hidden(value: object) -> Any:
    """Return a value, or a collection of values, without its secrets; the same object if there is nothing to hide."""
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
    """Return the fields of a model that may hold a secret."""
    exceptions = _KEPT.get(kind.__name__, ())
    return tuple(
        name
        for name in kind.model_fields
        if not (name in exceptions or name == "id" or name == "cursor" or name.endswith(("_id", "_ids")))
    )
