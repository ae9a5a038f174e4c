"""The models as agents list them: one form that the clients of OpenAI's and of Anthropic's API both read."""

from __future__ import annotations

from typing import Any

from agentlightning.llm_proxy.models import ModelTable


def model_listing(models: ModelTable, name: str | None = None) -> dict[str, Any]:
    """Return the list of models, or one of them.

    Raises:
        CallFailed: 404, there is no model of this name; says what it may have meant.
    """
    if name is not None:
        models.endpoints(name, "")
        return _entry(name)
    names = models.names
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return {"object": "list", "data": [_entry(name) for name in names], "has_more": False, **ends}


def _entry(name: str) -> dict[str, Any]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
