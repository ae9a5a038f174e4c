"""The environment variables that the package reads or sets, with their meaning.

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
    """Name of each variable; the value is the name."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    """bool: log every emitted span, operations too, at DEBUG (on stderr without any logging set up), and the tracer
    provider's configuration."""
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    """bool, default true: the strategy wraps the store in its server and clients, or in the thread wrapper."""
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    """`algorithm`, `runner` or `both` (default): the side of client-server that this process runs."""
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    """str, default 127.0.0.1: address that the store server binds and runners connect to. With `AGL_MANAGED_STORE=0`,
    this and the port are the address of an existing store server."""
    AGL_SERVER_PORT = "AGL_SERVER_PORT"
    """int, default 4747: the port of that address; 0 chooses a free one."""
    AGL_TOKEN = "AGL_TOKEN"
    """str: the bearer token of store server and gateway; required beyond loopback. Reading it removes the variable."""
    AGL_TOKEN_FILE = "AGL_TOKEN_FILE"
    """Path of a file with the token, readable by its owner alone, or of a pipe; instead of `AGL_TOKEN`."""
    AGL_INSECURE = "AGL_INSECURE"
    """bool: allow a server beyond loopback without a token."""
    AGL_ALLOWED_HOSTS = "AGL_ALLOWED_HOSTS"
    """Comma separated names, beside those of this machine, under which clients may address a server; `*` is any."""
    AGL_RUN_ID = "AGL_RUN_ID"
    """str: the run that this process belongs to, for roles on several machines."""
    AGENT_LIGHTNING_STORE_URL = "AGENT_LIGHTNING_STORE_URL"
    """str: address of a store server that an unmanaged strategy uses when no store is given; overrides host and
    port. Commands read it as the default of `--store`."""
    AGENT_LIGHTNING_OTLP_ENDPOINT = "AGENT_LIGHTNING_OTLP_ENDPOINT"
    """str: address of an OpenTelemetry collector that gets a copy of every span: `http://host:4318` for HTTP,
    `http://host:4317` for gRPC."""
    AGL_DEBUG = "AGL_DEBUG"
    """bool: commands show the traceback of an error, as `agl --debug` does."""
    AGL_LOG_JSON = "AGL_LOG_JSON"
    """bool: commands log one JSON object per line, as `--log-json` does."""


PROGRAM_VARIABLES: Final[dict[str, str]] = {
    "OPENAI_BASE_URL": "address of the model, as clients of OpenAI read it",
    "OPENAI_API_BASE": "the same address, for older clients",
    "OPENAI_API_KEY": "key of the model; of a model behind the gateway one that is good for this attempt alone",
    "OPENAI_MODEL": "name of the model",
    "ANTHROPIC_BASE_URL": "address of the model without `/v1`, as clients of Anthropic read it",
    "ANTHROPIC_API_KEY": "the same key",
    "ANTHROPIC_MODEL": "name of the model",
    "AGL_MODEL": "name of the model",
    "AGL_ROLLOUT_ID": "id of the rollout",
    "AGL_ATTEMPT_ID": "id of the attempt",
    "AGL_MODE": "`train`, `val` or `test`; empty if the rollout has none",
    "AGL_TASK_FILE": "path of a file with the task as JSON",
    "AGL_RESOURCES_FILE": "path of a file with the resources as JSON, keys included",
    "AGL_REWARD_FILE": "path of the file into which the program may write its reward as JSON",
    "TMPDIR": "the attempt's own folder, which is removed after it",
}
"""Variables that are set for a program that runs as an agent (`agl.CommandAgent`); those of a model if the resources
have one."""

FOREIGN_VARIABLES: Final[dict[str, str]] = {
    "OPENAI_BASE_URL": "the model that `agl.Chat`, a judge or a search over prompts asks when the program names none; "
    "the address of an entry `openai/<name>` of the gateway that has none",
    "OPENAI_API_BASE": "the same address of an entry, unless the other one is set",
    "OPENAI_API_KEY": "the key of that model, or of such an entry (`GROQ_API_KEY` and the like for other providers); "
    "leaves the environment of a process that keeps a provider's key",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "for the collector: `grpc`, or http/protobuf; goes before what the port says",
    "OTEL_EXPORTER_OTLP_HEADERS": "headers for the collector: `api-key=secret,tenant=a`",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "the same as the one without `TRACES`; goes before it",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "the same as the one without `TRACES`; goes before it",
    "PROMETHEUS_MULTIPROC_DIR": "folder through which processes share their metrics with `agl prometheus`",
    "VLLM_API_KEY": "key of a vLLM server that an engine of GRPO is told to use",
    "TINKER_API_KEY": "key of the Tinker service, for `agl.Tinker`",
    "TINKER_BASE_URL": "another address of the Tinker service, which its client reads",
    "RAY_ADDRESS": "the Ray cluster that the strategy `ray` connects to",
    "NO_COLOR": "no colours in anything that a command prints",
    "DISPLAY": "`agl dashboard` opens a browser only where there is a screen",
    "WAYLAND_DISPLAY": "the same",
    "HTTP_PROXY": "`agl doctor` names the proxies that are set; calls to our servers use none",
    "HTTPS_PROXY": "the same",
    "NO_PROXY": "for the command of the Claude Agent SDK the addresses of this machine are added to it",
    "OTEL_SDK_DISABLED": "`true`: OpenTelemetry records nothing, and a link to a span that is not there is no error",
    "CUBLAS_WORKSPACE_CONFIG": "set to `:4096:8`, unless it is set, for training that is deterministic on a GPU",
    "TRL_EXPERIMENTAL_SILENCE": "set to `1` while `agl.TRL` trains, and then as it was",
    "LITELLM_LOCAL_MODEL_COST_MAP": "set to `True`, unless it is set, so that importing LiteLLM fetches nothing",
}
"""Variables defined by others that we read, or set if they are not set."""
