"""The environment variables that the package reads or sets, with their descriptions.

`docs/reference/settings.md` is generated from them.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from agentlightning.utils.env import (
    resolve_bool_env_var as resolve_bool_env_var,
)
from agentlightning.utils.env import (
    resolve_int_env_var as resolve_int_env_var,
)
from agentlightning.utils.env import (
    resolve_str_env_var as resolve_str_env_var,
)


class LightningEnvVar(Enum):
    """Names of the environment variables of this package."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    """bool: log every emitted span, including operations, and the configuration of the tracer provider, at level DEBUG.
    If logging is not set up, they are written to stderr."""
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    """bool, default true: the strategy serves the store to runners in other processes, or makes it safe for runners in
    threads. False: the strategy uses the store as it is."""
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    """`algorithm`, `runner` or `both` (default): role of this process in the client-server strategy."""
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    """str, default 127.0.0.1: address that the store server listens on and runners connect to. With
    `AGL_MANAGED_STORE=0`, address of an existing store server."""
    AGL_SERVER_PORT = "AGL_SERVER_PORT"
    """int, default 4747: port of the store server; 0 selects a free port."""
    AGL_TOKEN = "AGL_TOKEN"
    """str: bearer token of store server and gateway; required beyond loopback. It is removed from the
    environment when it is read."""
    AGL_TOKEN_FILE = "AGL_TOKEN_FILE"
    """Path of a pipe, or of a file that only its owner can read, with the token; alternative to `AGL_TOKEN`."""
    AGL_INSECURE = "AGL_INSECURE"
    """bool: allow a server without a token to listen beyond loopback."""
    AGL_ALLOWED_HOSTS = "AGL_ALLOWED_HOSTS"
    """Comma-separated host names, in addition to those of this machine, that clients may use for a server; `*` allows
    any name."""
    AGL_RUN_ID = "AGL_RUN_ID"
    """str: id of the run that this process belongs to, for runs on several machines."""
    AGENT_LIGHTNING_STORE_URL = "AGENT_LIGHTNING_STORE_URL"
    """str: address of the store server to use with `AGL_MANAGED_STORE=0` if the Trainer has no `store`; takes
    precedence over `AGL_SERVER_HOST` and `AGL_SERVER_PORT`. Also the default of `--store` in commands."""
    AGENT_LIGHTNING_OTLP_ENDPOINT = "AGENT_LIGHTNING_OTLP_ENDPOINT"
    """str: address of an OpenTelemetry collector that receives a copy of every span: `http://host:4318` for HTTP,
    `http://host:4317` for gRPC."""
    AGL_DEBUG = "AGL_DEBUG"
    """bool: commands show the traceback of an error, as `agl --debug` does."""
    AGL_LOG_JSON = "AGL_LOG_JSON"
    """bool: commands log one JSON object per line, as `--log-json` does."""


PROGRAM_VARIABLES: Final[dict[str, str]] = {
    "OPENAI_BASE_URL": "base URL of the model for OpenAI clients",
    "OPENAI_API_BASE": "same value, for older OpenAI clients",
    "OPENAI_API_KEY": "API key of the model; behind the gateway, a key that is valid only for this attempt",
    "OPENAI_MODEL": "name of the model",
    "ANTHROPIC_BASE_URL": "base URL of the model, without `/v1`, for Anthropic clients",
    "ANTHROPIC_API_KEY": "same value as `OPENAI_API_KEY`",
    "ANTHROPIC_MODEL": "name of the model",
    "AGL_MODEL": "name of the model",
    "AGL_ROLLOUT_ID": "id of the rollout",
    "AGL_ATTEMPT_ID": "id of the attempt",
    "AGL_MODE": "`train`, `val` or `test`; empty if the rollout has none",
    "AGL_TASK_FILE": "path of a JSON file with the task",
    "AGL_RESOURCES_FILE": "path of a JSON file with the resources, including API keys",
    "AGL_REWARD_FILE": "path of the file to which the program may write its reward as JSON",
    "TMPDIR": "temporary folder of the attempt, removed when the attempt ends",
}
"""Variables set for a program that runs as an agent (`agl.CommandAgent`). Variables of a model are set only if the
resources have one."""

FOREIGN_VARIABLES: Final[dict[str, str]] = {
    "OPENAI_BASE_URL": "base URL of the model that `agl.Chat`, a judge or a prompt search uses by default; also the "
    "default address of a gateway entry `openai/<name>`",
    "OPENAI_API_BASE": "default address of a gateway entry `openai/<name>` if `OPENAI_BASE_URL` is not set",
    "OPENAI_API_KEY": "API key for `OPENAI_BASE_URL` or for a gateway entry `openai/<name>` (for other providers: "
    "`GROQ_API_KEY` etc.); removed from the environment if the `api_key` of a gateway entry names it",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "protocol of the collector, `grpc` or http/protobuf; overrides the port's default",
    "OTEL_EXPORTER_OTLP_HEADERS": "headers for the collector, such as `api-key=secret,tenant=a`",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "overrides `OTEL_EXPORTER_OTLP_PROTOCOL`",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "overrides `OTEL_EXPORTER_OTLP_HEADERS`",
    "PROMETHEUS_MULTIPROC_DIR": "folder through which processes share their metrics with `agl prometheus`",
    "VLLM_API_KEY": "API key of an existing vLLM server that GRPO uses as its engine",
    "TINKER_API_KEY": "API key of the Tinker service, for `agl.Tinker`",
    "TINKER_BASE_URL": "alternative address of the Tinker service, read by its client",
    "RAY_ADDRESS": "Ray cluster that the strategy `ray` connects to",
    "NO_COLOR": "disables colours in the output of commands",
    "DISPLAY": "`agl dashboard` opens a browser only if a display is available",
    "WAYLAND_DISPLAY": "same as `DISPLAY`",
    "HTTP_PROXY": "reported by `agl doctor`; calls to the store and the gateway never use a proxy",
    "HTTPS_PROXY": "same as `HTTP_PROXY`",
    "NO_PROXY": "the addresses of this machine are added to it for the program that the Claude Agent SDK starts",
    "OTEL_SDK_DISABLED": "if `true`, OpenTelemetry records nothing, and a link to a missing span is not an error",
    "CUBLAS_WORKSPACE_CONFIG": "set to `:4096:8` for deterministic training on a GPU, unless it is already set",
    "TRL_EXPERIMENTAL_SILENCE": "set to `1` while `agl.TRL` trains, then restored",
    "LITELLM_LOCAL_MODEL_COST_MAP": "set to `True` to import LiteLLM without a download, unless it is already set",
}
"""Variables defined by other projects that this package reads, or sets if they are not set."""
