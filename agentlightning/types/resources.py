"""Resources: what the algorithm publishes and the agent receives. Language models and prompt templates."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from pydantic import Field
from typing_extensions import override

from agentlightning.field_help import Value
from agentlightning.process_secrets import server_token
from agentlightning.types.attempt_key import attempt_key
from agentlightning.types.core import AttemptedRollout
from agentlightning.types.templates.fstring import fill

logger = logging.getLogger(__name__)


class Resource(Value):
    """Base class of everything that can be published under a name."""

    resource_type: Any
    """The tag by which a stored resource is read back as its class."""


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """The tag by which it is read back."""
    endpoint: str
    """Base URL for the client; usually ends in /v1."""
    model: str
    """The name to be sent with each request."""
    api_key: str | None = None
    """Comes back only from get-by-id and latest, with a runner's token; null elsewhere."""
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the request, such as `temperature`, for the agent to pass on."""

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """Return the endpoint; arguments are accepted so that LLM and ProxyLLM are called alike."""
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the gateway; each attempt calls it under a URL of its own."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """The tag by which it is read back."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            if name == "endpoint":
                asking = str(sys._getframe(1).f_globals.get("__name__", ""))
                if not asking.startswith("pydantic"):  # copying, dumping and comparing do not warn
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
        key = attempt_key(rollout_id, attempt_id) if server_token() or not self.api_key else self.api_key
        return LLM(
            endpoint=self.get_base_url(rollout_id, attempt_id),
            model=self.model,
            api_key=key,
            sampling_parameters=dict(self.sampling_parameters),
        )

    def keyed_for(self, rollout: AttemptedRollout) -> ProxyLLM:
        """Return a copy that gives this attempt its key also where the server's token is not known."""
        if not server_token():
            return self
        return self.model_copy(update={"api_key": attempt_key(rollout.rollout_id, rollout.attempt.attempt_id)})


class PromptTemplate(Resource):
    """A prompt with named gaps."""

    resource_type: Literal["prompt_template"] = "prompt_template"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """The tag by which it is read back."""
    template: str
    """The text with its gaps: `{name}` for f-string, `{{ name }}` for jinja."""
    engine: Literal["jinja", "f-string", "poml"]
    """How the gaps are filled; `format` does not know poml."""

    def format(self, **kwargs: Any) -> str:
        """Fill the gaps: named gaps for f-string (see `templates/fstring.py`), a bounded sandbox for jinja
        (`templates/jinja.py`). Templates come from whoever can publish resources: neither reads more of the process
        than the values given here, and neither makes more than 16 Mi characters.

        Raises:
            KeyError: an f-string template names a gap that was not given.
            jinja2.UndefinedError: a jinja template names a gap that was not given.
            ValueError: the template asks for attributes, widths or work beyond the bounds; names the gap.
            NotImplementedError: the engine is poml.
        """
        if self.engine == "f-string":
            return fill(self.template, kwargs)
        if self.engine == "jinja":
            from agentlightning.types.templates.jinja import render  # Jinja is loaded where it is used

            return render(self.template, kwargs)
        raise NotImplementedError(f"Rendering with engine {self.engine!r} is not supported; use f-string or jinja")


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]
"""Resources by the name under which the agent asks for them."""


class ResourcesUpdate(Value):
    """One version of a set of resources."""

    resources_id: str
    """The name of the set."""
    create_time: float
    """When its first version was stored, in seconds since the epoch."""
    update_time: float
    """When this version was stored, in seconds since the epoch."""
    version: int
    """1 for the first; each update adds one."""
    resources: NamedResources
    """The resources by name."""
    run_id: str | None = None
    """The run that published it; None is none."""
