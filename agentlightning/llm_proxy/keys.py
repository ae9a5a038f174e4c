"""Which keys open an attempt's URL: its own attempt key, the server's token, and on loopback any placeholder."""

from __future__ import annotations

from agentlightning.llm_proxy.addresses import CallAddress
from agentlightning.llm_proxy.replies import refuse
from agentlightning.types.attempt_key import judge_key
from agentlightning.utils.auth import Scope, bearer_token, same_token


def check_key(scope: Scope, address: CallAddress, token: str | None) -> None:
    """Let the call pass or raise. `token` is the server's; without one a placeholder key, or none, will do.

    Raises:
        CallFailed: 401 without a usable key, 403 with the key of another attempt or a forged one.
    """
    key = presented_key(scope)
    verdict = judge_key(key, address.rollout_id, address.attempt_id, token)
    if verdict == "ok" or (token and same_token(key, token)):
        return
    if verdict == "other_attempt":
        raise refuse(403, "This key belongs to another attempt", code="wrong_attempt_key")
    if verdict == "forged":
        raise refuse(403, "The signature of this attempt key is wrong", code="invalid_api_key")
    if token:
        text = (
            "An attempt key is needed here: use the api_key of the LLM resource that the agent was given "
            "(ProxyLLM.with_attempted_rollout fills it in)"
        )
        raise refuse(401, text, code="invalid_api_key")


def presented_key(scope: Scope) -> str | None:
    """Return the bearer token, else the `x-api-key` header; None without either."""
    key = bearer_token(scope)
    if key is not None:
        return key
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-api-key"), None)
