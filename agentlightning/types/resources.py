"""Resources, which the algorithm publishes and the agent receives, such as language models and prompt templates."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast
from urllib.parse import quote

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from typing_extensions import override

from agentlightning.base.field_help import Value
from agentlightning.base.process_secrets import server_token
from agentlightning.errors import BadRequestError
from agentlightning.types.attempt_key import attempt_key
from agentlightning.types.core import COUNT, MOMENT, AttemptedRollout
from agentlightning.types.templates.fstring import fill

logger = logging.getLogger(__name__)


ONLY_GATEWAY = frozenset({"top_k", "min_p", "repetition_penalty"})
"""Sampling parameters that the clients of OpenAI's API do not accept as arguments."""
_own_classes: dict[str, dict[str, type[Resource]]] = {}
"""Your resource classes, by stored kind and then by qualified name."""


class Resource(Value):
    """Base class of all resources, including your own classes.

    Your class is stored as a `CustomResource`, with its `resource_type` (by default the class name) as the kind. A
    function agent gets it as the class in its annotation. Other agents get it as your class if exactly one class of
    the kind is imported. A class that derives from `LLM` or another of our classes is stored like its base class.
    """

    resource_type: Any = None
    """Tag that selects the class when a stored resource is loaded; defaults to the name of the class."""

    @classmethod
    @override
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__module__ == __name__:
            return
        field = cls.model_fields["resource_type"]
        if issubclass(cls, _STORED) and field.default in _TAGS:
            return
        if field.is_required() or field.default is None or field.default in {base.__name__ for base in cls.__mro__[1:]}:
            field.default = cls.__name__
            cls.model_rebuild(force=True)
        if isinstance(field.default, str):
            _own_classes.setdefault(field.default, {})[f"{cls.__module__}.{cls.__qualname__}"] = cls


class SamplingParameters(Resource):
    """Parameters of model calls, with any names. Use `client.chat.completions.create(..., **parameters)`."""

    model_config = ConfigDict(extra="allow")

    resource_type: Literal["sampling_parameters"] = "sampling_parameters"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """Tag of the class in stored data."""
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Sampling temperature; None uses the server's default."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """Probability mass from which tokens are sampled, 0 to 1; None uses the server's default."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of a response; None uses the server's default."""

    def keys(self) -> Sequence[str]:
        """Return the names of the parameters that are set."""
        values = {**self.__dict__, **(self.__pydantic_extra__ or {})}
        return [name for name, value in values.items() if value is not None and name != "resource_type"]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def _as_dict(parameters: object) -> object:
    return dict(parameters) if isinstance(parameters, SamplingParameters) else parameters


class LLM(Resource):
    """A model behind an OpenAI-compatible endpoint."""

    resource_type: Literal["llm"] = "llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """Tag of the class in stored data."""
    endpoint: str
    """Base URL for the client; usually ends in /v1."""
    model: str
    """Model name for the requests."""
    api_key: str | None = Field(default=None, repr=False)
    """API key for the endpoint. Lists of resources return null instead, and `repr` omits it."""
    sampling_parameters: Annotated[dict[str, Any], BeforeValidator(_as_dict)] = Field(default_factory=dict)
    """Parameters that the agent passes with its requests, such as `temperature`: a dict or `SamplingParameters`."""

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """Return the endpoint. Arguments are ignored; they exist because `ProxyLLM` needs them."""
        return self.endpoint


class ProxyLLM(LLM):
    """A model behind the gateway. Each attempt calls it at its own URL."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """Tag of the class in stored data."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            if name == "endpoint":
                caller = str(sys._getframe(1).f_globals.get("__name__", ""))
                if not caller.startswith("pydantic"):  # copying, dumping and comparing do not warn
                    logger.warning(
                        "Accessing 'endpoint' directly on ProxyLLM is discouraged: its calls belong to no attempt. "
                        "Use get_base_url(rollout_id, attempt_id)."
                    )
            return super().__getattribute__(name)

    @override
    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride] -- the public form
        """Return the URL of one attempt with escaped ids, or the endpoint itself if both ids are None.

        Raises:
            ValueError: only one id is None, or an id is empty or not a string.
        """
        endpoint = self.__dict__["endpoint"]
        if rollout_id is None and attempt_id is None:
            return endpoint
        if not (isinstance(rollout_id, str) and isinstance(attempt_id, str)):
            raise ValueError("rollout_id and attempt_id must be strings or all be empty")
        if not (rollout_id and attempt_id):
            raise ValueError(
                "rollout_id and attempt_id must be strings or all be empty (None), and not the empty string; "
                f"got {rollout_id!r} and {attempt_id!r}"
            )
        root = endpoint.removesuffix("/")
        tail = "/v1" if root.endswith("/v1") else ""
        rollout, attempt = quote(rollout_id, safe=""), quote(attempt_id, safe="")
        return f"{root.removesuffix('/v1')}/rollout/{rollout}/attempt/{attempt}{tail}"

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Return an `LLM` for this attempt, with its URL and, if the server has a token, its key.

        The gateway sets the sampling parameters in requests that do not have them; the agent may also pass them.
        """
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        key = attempt_key(rollout_id, attempt_id) if server_token() or not self.api_key else self.api_key
        return LLM(
            endpoint=self.get_base_url(rollout_id, attempt_id),
            model=self.model,
            api_key=key,
            sampling_parameters=dict(self.sampling_parameters),
        )

    def keyed_for(self, rollout: AttemptedRollout) -> ProxyLLM:
        """Return a copy with the key of this attempt, for a process that does not have the server's token."""
        if not server_token():
            return self
        return self.model_copy(update={"api_key": attempt_key(rollout.rollout_id, rollout.attempt.attempt_id)})


def _engine(name: str) -> str:
    return "jinja" if name == "jinja2" else name


class PromptTemplate(Resource):
    """A prompt with placeholders."""

    resource_type: Literal["prompt_template"] = "prompt_template"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """Tag of the class in stored data."""
    template: str
    """Text with placeholders: `{name}` for f-string, `{{ name }}` for jinja."""
    engine: Annotated[Literal["jinja", "jinja2", "f-string", "poml"], AfterValidator(_engine)]
    """Template engine; `jinja2` is an alias of jinja. `format` does not support poml."""

    def format(self, **kwargs: Any) -> str:
        """Return the text with the placeholders filled.

        A template can read only the values that you pass, and produces at most 16 Mi characters. The engines are in
        `templates/fstring.py` and `templates/jinja.py`.

        Raises:
            KeyError: the value of a placeholder of an f-string template is missing.
            jinja2.UndefinedError: the value of a placeholder of a jinja template is missing.
            ValueError: a placeholder is not allowed, or the template exceeds a limit on its output or work.
            NotImplementedError: the engine is poml.
        """
        if self.engine == "f-string":
            return fill(self.template, kwargs)
        if self.engine == "jinja":
            from agentlightning.types.templates.jinja import render  # Jinja is loaded where it is used

            return render(self.template, kwargs)
        raise NotImplementedError(f"Rendering with engine {self.engine!r} is not supported; use f-string or jinja")


class SystemPrompt(PromptTemplate):
    """A prompt template for a system message. A prompt search can improve it."""

    resource_type: Literal["system_prompt"] = "system_prompt"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """Tag of the class in stored data."""
    engine: Annotated[Literal["jinja", "jinja2", "f-string", "poml"], AfterValidator(_engine)] = "f-string"
    """Template engine."""


class CustomResource(Resource):
    """Your own settings: a dictionary or the fields of your class. Read a value with `resource["top_k"]`."""

    resource_type: Literal["custom"] = "custom"  # pyright: ignore[reportIncompatibleVariableOverride] -- narrowed tag
    """Tag of the class in stored data."""
    kind: str | None = None
    """Kind of your class; None for a plain dictionary."""
    values: dict[str, Any]
    """Settings by name; any JSON values."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def keys(self) -> Iterable[str]:
        """Return the names of the values."""
        return self.values.keys()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value with this name, or `default` if it does not exist."""
        return self.values.get(name, default)


ResourceUnion = Annotated[
    LLM | ProxyLLM | SamplingParameters | PromptTemplate | SystemPrompt | CustomResource,
    Field(discriminator="resource_type"),
]
"""Type of a resource in a set."""
NamedResources = dict[str, ResourceUnion]
"""Resources by the name under which the agent reads them."""

_STORED = (LLM, SamplingParameters, PromptTemplate, CustomResource)
_TAGS = ("llm", "proxy_llm", "sampling_parameters", "prompt_template", "system_prompt", "custom")


def stored_form(name: str, resource: object) -> object:
    """Return a resource in its stored form: your own classes and dictionaries become a `CustomResource`.

    Raises:
        BadRequestError: a dictionary has the fields of `LLM` or `PromptTemplate` but no `resource_type`.
    """
    if isinstance(resource, Resource):
        if isinstance(resource, _STORED) and resource.resource_type in _TAGS:
            return resource
        values = resource.model_dump(exclude={"resource_type"})
        return CustomResource(kind=str(resource.resource_type), values=values)
    values = dict(cast("Mapping[str, Any]", resource)) if isinstance(resource, Mapping) else {}
    if not isinstance(resource, Mapping) or "resource_type" in values:
        return cast("object", resource)
    for kind in (LLM, PromptTemplate):
        required = {field for field, info in kind.model_fields.items() if info.is_required()}
        if required <= values.keys():
            tag = kind.model_fields["resource_type"].default
            raise BadRequestError(
                f"Resource {name!r} has the fields of agl.{kind.__name__} but no resource_type. Use "
                f"agl.{kind.__name__}(...), or add 'resource_type': {tag!r}."
            )
    return CustomResource(values=values)


def stored_forms(resources: Mapping[str, object]) -> dict[str, object]:
    """Return resources by name in their stored form."""
    return {name: stored_form(name, resource) for name, resource in resources.items()}


def agents_form(resource: Resource, wanted: type[Resource] | None = None) -> Resource:
    """Return a stored resource as an agent gets it: as your class if it is `wanted` or the only class of its kind, and
    a `ProxyLLM` without the sampling parameters that only the gateway sets.

    Raises:
        ValueError: the values do not match the fields of the class.
    """
    if isinstance(resource, ProxyLLM) and not ONLY_GATEWAY.isdisjoint(resource.sampling_parameters):
        own = {name: value for name, value in resource.sampling_parameters.items() if name not in ONLY_GATEWAY}
        return resource.model_copy(update={"sampling_parameters": own})
    if not isinstance(resource, CustomResource):
        return resource
    classes = _own_classes.get(resource.kind or "", {})
    if wanted is not None:
        own = wanted if wanted in classes.values() else None
    else:
        own = next(iter(classes.values())) if len(classes) == 1 else None
    return resource if own is None else own.model_validate(resource.values)


class ResourcesUpdate(Value):
    """One version of a set of resources."""

    resources_id: str
    """Id of the set."""
    create_time: float = Field(**MOMENT)
    """Time at which the first version was stored, in Unix seconds."""
    update_time: float = Field(**MOMENT)
    """Time at which this version was stored, in Unix seconds."""
    version: int = Field(**COUNT)
    """Version number, starting at 1."""
    resources: NamedResources
    """Resources by name."""
    run_id: str | None = None
    """Run that published the set; None if it was published without a run."""
