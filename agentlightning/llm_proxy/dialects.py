"""OpenAI chat completions, as far as the gateway must read them: what it asks for, what it finds, what it takes out.

Never tokenises: token ids and log-probabilities are the model server's own (vLLM's spelling: `prompt_token_ids` beside
the choices, `token_ids` in each choice).
"""

from __future__ import annotations

import json
import math
from collections.abc import Set
from typing import Any, cast

from agentlightning.llm_proxy.calls import CallTokens
from agentlightning.llm_proxy.replies import refuse

EXTRAS = ("return_token_ids", "logprobs")
"""Request fields that the gateway sets to true where the agent did not."""

Json = dict[str, Any]


def read_request(raw: bytes) -> Json:
    """Return the request of an agent.

    Raises:
        CallFailed: 400 that names the field that is wrong.
    """
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise refuse(400, f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(request, dict):
        raise refuse(400, "The body must be a JSON object", code="invalid_json")
    request = cast(Json, request)
    if not isinstance(request.get("model"), str):
        raise refuse(400, "'model' must be a string", param="model", code="invalid_type")
    if not isinstance(request.get("messages"), list):
        raise refuse(400, "'messages' must be a list", param="messages", code="invalid_type")
    if request.get("stream"):
        text = "'stream' is not supported yet by this gateway: send the call without it, or with stream=false"
        raise refuse(400, text, param="stream", code="unsupported_value")
    return request


def added_extras(request: Json, unsupported: Set[str]) -> list[str]:
    """Return which extras the gateway adds to this request."""
    return [name for name in EXTRAS if not request.get(name) and name not in unsupported]


def upstream_request(request: Json, model: str, unsupported: Set[str]) -> bytes:
    """Return the body for the model server: the agent's, with the server's model name and the extras asked for."""
    extras = dict.fromkeys(added_extras(request, unsupported), True)
    return json.dumps({**request, "model": model, **extras}).encode()


def read_reply(raw: bytes) -> Json | None:
    """Return the model server's reply; None if it is no chat completion."""
    try:
        reply = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict):
        return None
    choices = cast(Json, reply).get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(c, dict) for c in cast(list[Any], choices)):
        return None
    return cast(Json, reply)


def tokens_of(reply: Json) -> CallTokens | None:
    """Return the tokens of the first choice; None unless both the prompt's and the completion's are there."""
    choice = cast(Json, reply["choices"][0])
    prompt, completion = _token_ids(reply.get("prompt_token_ids")), _token_ids(choice.get("token_ids"))
    if not prompt or completion is None:
        return None
    return CallTokens(prompt, completion, _logprobs(choice.get("logprobs"), len(completion)))


def visible_reply(reply: Json, request: Json) -> Json:
    """Return the reply as it would have been without the extras that the agent did not ask for."""
    keeps_ids, keeps_logprobs = bool(request.get("return_token_ids")), bool(request.get("logprobs"))
    if keeps_ids and keeps_logprobs:
        return reply
    hidden = () if keeps_ids else ("prompt_token_ids", "token_ids")
    choices = [_visible_choice(choice, hidden, keeps_logprobs) for choice in reply["choices"]]
    return {**{name: value for name, value in reply.items() if name not in hidden}, "choices": choices}


def _visible_choice(choice: Json, hidden: tuple[str, ...], keeps_logprobs: bool) -> Json:
    visible = {name: value for name, value in choice.items() if name not in hidden}
    if not keeps_logprobs and "logprobs" in visible:
        visible["logprobs"] = None
    return visible


def _token_ids(value: Any) -> list[int] | None:
    if not isinstance(value, list):
        return None
    ids = cast(list[Any], value)
    return ids if all(type(token) is int and token >= 0 for token in ids) else None


def _logprobs(value: Any, length: int) -> list[float] | None:
    content = cast(Json, value).get("content") if isinstance(value, dict) else None
    if not isinstance(content, list) or len(cast(list[Any], content)) != length:
        return None
    values: list[float] = []
    for token in cast(list[Any], content):
        logprob = cast(Json, token).get("logprob") if isinstance(token, dict) else None
        if not isinstance(logprob, (int, float)) or not math.isfinite(logprob):
            return None
        values.append(float(logprob))
    return values
