"""Resources: what the algorithm publishes and the agent receives. Language models and prompt templates."""

from __future__ import annotations

import inspect
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field
from typing_extensions import override

from agentlightning.types.attempt_key import attempt_key
from agentlightning.types.core import AttemptedRollout

logger = logging.getLogger(__name__)


class Resource(BaseModel):
    """Base class of everything that can be published under a name."""

    resource_type: Any


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    endpoint: str
    """Base URL for the client; usually ends in /v1."""
    model: str
    api_key: str | None = None
    """Comes back only from get-by-id and latest, with a runner's token; null elsewhere."""
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """Return the endpoint; arguments are accepted so that LLM and ProxyLLM are called alike."""
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the gateway; each attempt calls it under a URL of its own."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            if name == "endpoint" and _asked_from_outside():
                logger.warning(
                    "Accessing 'endpoint' directly on ProxyLLM is discouraged: "
                    "use get_base_url(rollout_id, attempt_id), so that the calls are attributed to the attempt"
                )
            return super().__getattribute__(name)

    @override
    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride] -- the public form
        """Return the URL of one attempt, its ids escaped, or the bare endpoint when both ids are None.

        Raises:
            ValueError: one id is None, or an id is no string or empty.
        """
        endpoint = self.__dict__["endpoint"]
        if rollout_id is None and attempt_id is None:
            return endpoint
        if not (isinstance(rollout_id, str) and isinstance(attempt_id, str)):
            raise ValueError("rollout_id and attempt_id must be strings or all be empty")
        if not (rollout_id and attempt_id):
            raise ValueError(
                "rollout_id and attempt_id must be strings or all be empty (None): "
                f"got {rollout_id!r} and {attempt_id!r}, and no URL can hold the empty text"
            )
        root = endpoint.removesuffix("/")
        tail = "/v1" if root.endswith("/v1") else ""
        rollout, attempt = quote(rollout_id, safe=""), quote(attempt_id, safe="")
        return f"{root.removesuffix('/v1')}/rollout/{rollout}/attempt/{attempt}{tail}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Return the plain `LLM` of this attempt: its URL and, when a token is set, its key."""
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        key = attempt_key(rollout_id, attempt_id) if os.environ.get("AGL_TOKEN") or not self.api_key else self.api_key
        return LLM(
            endpoint=self.get_base_url(rollout_id, attempt_id),
            model=self.model,
            api_key=key,
            sampling_parameters=dict(self.sampling_parameters),
        )


def _asked_from_outside() -> bool:
    """True when the attribute is read by code outside of pydantic (copying, dumping and comparing do not warn)."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame and frame.f_back else None
    module = str(caller.f_globals.get("__name__", "")) if caller else ""
    return not module.startswith("pydantic")


class PromptTemplate(Resource):
    """A prompt with named gaps."""

    resource_type: Literal["prompt_template"] = "prompt_template"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    template: str
    engine: Literal["jinja", "f-string", "poml"]

    def format(self, **kwargs: Any) -> str:
        """Fill the gaps: `str.format` for f-string, a sandboxed Jinja environment for jinja.

        Raises:
            KeyError: an f-string template names a gap that was not given.
            jinja2.UndefinedError: a jinja template names a gap that was not given.
            NotImplementedError: the engine is poml.
        """
        if self.engine == "f-string":
            return self.template.format(**kwargs)
        if self.engine == "jinja":
            from jinja2 import StrictUndefined
            from jinja2.sandbox import SandboxedEnvironment

            return SandboxedEnvironment(undefined=StrictUndefined).from_string(self.template).render(**kwargs)
        raise NotImplementedError(f"Rendering with engine {self.engine!r} is not supported; use f-string or jinja")


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]
"""Resources by the name under which the agent asks for them."""


class ResourcesUpdate(BaseModel):
    """One version of a set of resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int
    resources: NamedResources
    run_id: str | None = None
