"""What an agent is given to reach the gateway: the model to ask for, and the URL that says whose calls they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentlightning.llm_proxy.policies import CallPolicy
from agentlightning.types import LLM, ProxyLLM
from agentlightning.types.attempt_key import attempt_key
from agentlightning.utils.http.auth import server_token


def model_for(served: Sequence[str], policy: CallPolicy | None, asked: str | None) -> str:
    """Return the model that an agent asks for: the one asked for here, else its policy's, else the only one served.

    Raises:
        ValueError: there is not exactly one, or the policy is served by others.
    """
    named = () if policy is None else policy.models
    if asked is not None and named and asked not in named:
        assert policy is not None
        raise ValueError(f"The policy {policy.name!r} is served by {', '.join(named)}, not by {asked!r}")
    names = [asked] if asked else list(named or served)
    if not names:
        raise ValueError("No models found in model_list. Please specify the model.")
    if len(names) > 1:
        where = f"the policy {policy.name!r}" if policy is not None and named else "model_list"
        raise ValueError(f"Multiple models found in {where}: {', '.join(names)}. Please specify the model.")
    return names[0]


def llm_at(
    gateway: str,
    model: str,
    sampling_parameters: Mapping[str, object] | None,
    role: str | None,
    rollout_id: str | None,
    attempt_id: str | None,
) -> LLM:
    """Return the LLM of one attempt, with its key if a token is set; without ids a `ProxyLLM`.

    Raises:
        ValueError: only one of the ids is given.
    """
    if (rollout_id is None) != (attempt_id is None):
        raise ValueError("Either rollout_id and attempt_id must be provided, or neither.")
    endpoint = gateway if role is None else f"{gateway}/role/{role}"
    sampling = dict(sampling_parameters or {})
    if rollout_id is None or attempt_id is None:
        return ProxyLLM(endpoint=endpoint, model=model, sampling_parameters=sampling)
    url = f"{endpoint}/rollout/{rollout_id}/attempt/{attempt_id}"
    token = server_token()
    key = attempt_key(rollout_id, attempt_id, token) if token else None
    return LLM(endpoint=url, model=model, api_key=key, sampling_parameters=sampling)
