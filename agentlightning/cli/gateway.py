"""`agl gateway`: the gateway without a Trainer. It records the model calls of any program in a store."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agentlightning.cli.export import MODEL, trained_at
from agentlightning.cli.output import HOST, LOG_JSON, PORT, log_to_stderr, say

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.types import LLM

_EXAMPLE = "agl gateway --upstream http://127.0.0.1:8000/v1 --model my-model"


def gateway(
    upstream: str | None = typer.Option(None, help="Base URL of a model server, such as http://127.0.0.1:8000/v1"),
    model: str | None = typer.Option(None, help="Name of the model, on the server and for agents"),
    api_key: str | None = typer.Option(None, help="Name of the environment variable that holds the server's API key"),
    config: Path | None = typer.Option(
        None,
        help="YAML or JSON file of LLMProxy arguments: model_list, fallbacks, aliases, policies, limits, health, ...",
    ),
    store: str = typer.Option(
        "sqlite:///agl.db", help="Store for the calls: a file, or an address such as postgresql://host/db"
    ),
    host: str = HOST,
    port: int = PORT,
    record: Path | None = typer.Option(None, help="File to which to write calls with a reply, for --replay"),
    replay: Path | None = typer.Option(
        None, help="File of recorded calls that provides the replies, instead of a model server"
    ),
    journal: Path | None = typer.Option(
        None,
        help="File that holds the calls in progress; after kill -9, the next start reads it and records the "
        "interrupted calls. By default next to the store file",
    ),
    log_level: str = typer.Option("WARNING", help="DEBUG, INFO, WARNING or ERROR"),
    log_json: bool = LOG_JSON,
) -> None:
    """Record the model calls of any program, without a Trainer.

    Prints the base URLs for the program (OPENAI_BASE_URL, and ANTHROPIC_BASE_URL without /v1). All calls belong to one
    attempt, which ends as succeeded when the gateway stops. Press Ctrl+C to stop.

    Example: agl gateway --upstream http://127.0.0.1:8000/v1 --model my-model
    """
    log_to_stderr(log_level, json_lines=log_json)
    options = {} if config is None else _read(config)
    if (upstream is None) != (model is None):
        raise ValueError(f"--upstream and --model must be used together. Example: {_EXAMPLE}")
    if upstream is not None:
        if options.get("model_list"):
            raise ValueError("The models are set twice. Use either --upstream or model_list in --config")
        parameters = {"model": model, "api_base": upstream}
        if api_key is not None:
            parameters["api_key"] = f"os.environ/{api_key}"
        options["model_list"] = [{"model_name": model, "litellm_params": parameters}]
    elif api_key is not None:
        raise ValueError("--api-key requires --upstream. In a --config file, set litellm_params.api_key")
    if record is not None:
        options["record"] = record
    if replay is not None:
        options["replay"] = replay
    if not (options.get("model_list") or options.get("litellm_config")) and "replay" not in options:
        raise ValueError(
            f"No model is set. Use --upstream URL --model NAME, --config FILE, or --replay FILE. Example: {_EXAMPLE}"
        )
    options["journal"] = journal or journal_beside(store, port)
    asyncio.run(serve_gateway(store, {"host": host, "port": port or None, **options}, "agl gateway"))


_KEYS = (
    *("model_list", "policies", "limits", "health", "keep", "num_retries", "record", "replay", "replay_match"),
    *("fallbacks", "aliases", "litellm_config"),
)


def _read(path: Path) -> dict[str, Any]:
    """Return the arguments of `LLMProxy` from a file."""
    from agentlightning.cli.plan import read_mapping
    from agentlightning.llm_proxy import GatewayLimits, HealthChecks

    options = read_mapping("--config", path, expected="a mapping with model_list")
    if unknown := [key for key in options if key not in _KEYS]:
        raise ValueError(f"--config {path}: unknown keys {', '.join(unknown)}. Expected: {', '.join(_KEYS)}")
    for key, settings in (("limits", GatewayLimits), ("health", HealthChecks)):
        if key in options:
            try:
                options[key] = settings(**options[key])
            except TypeError as error:
                raise ValueError(f"--config {path}: {key}: {error}") from None
    return options


def journal_beside(spec: str, port: int) -> str | None:
    """Return a file next to the store's file, the same for each start on this port; None if the store is not a file."""
    from agentlightning.store.spec import spec_of

    store = spec_of(spec).partition("?")[0]
    path = store.removeprefix("sqlite:///")
    return None if path == store else f"{path}.{port}.calls" if port else f"{path}.calls"


async def serve_gateway(spec: str, options: dict[str, Any], program: str, *, plain: bool = False) -> None:
    """Serve until a signal. Calls are recorded for one attempt, which has the `program` in its input.

    With `plain`, calls whose URL names no attempt belong to this attempt too.
    """
    from agentlightning.cli.serving import end_of_process
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.store.spec import spec_of, store_from_spec

    proxy = LLMProxy(**options)
    is_kept = spec.partition("?")[0] != "memory"
    store = store_from_spec(spec_of(spec))
    try:
        proxy.set_store(store)
        end = end_of_process()
        await proxy.start()
        attempt = await store.start_rollout(input={"program": program}, metadata={"models": _names(proxy)})
        ids = attempt.rollout_id, attempt.attempt.attempt_id
        try:
            llm = proxy.as_resource(*ids, model=(_names(proxy) or ["recorded"])[0])
            if plain:
                proxy.default_attempt = ids
                llm.endpoint = proxy.server_launcher.access_endpoint
            say(f"OPENAI_BASE_URL={llm.endpoint}/v1")
            say(f"ANTHROPIC_BASE_URL={llm.endpoint}")
            for role in proxy.roles:
                own = proxy.as_resource(*ids, model=llm.model, role=role)
                say(f"role {role}: OPENAI_BASE_URL={own.endpoint}/v1")
            say(f"api key: {llm.api_key or 'any'}")
            say(
                f"recording calls for rollout {ids[0]}"
                if is_kept
                else "calls are not recorded; to record: --store FILE"
            )
            if plain:
                say(f"model: {llm.model}")
                say(f"example: {_example(llm)}")
            await end
        finally:
            await proxy.stop()
            await store.update_attempt(*ids, status="succeeded")
            say(json.dumps({**({"rollout": ids[0]} if is_kept else {}), **proxy.stats()}))
    finally:
        await store.close()


def _example(llm: LLM) -> str:
    """Return a command that calls the model."""
    key = f" -H 'Authorization: Bearer {llm.api_key}'" if llm.api_key else ""
    body = json.dumps({"model": llm.model, "messages": [{"role": "user", "content": "Hello"}]})
    return f"curl {llm.endpoint}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def _names(proxy: LLMProxy) -> list[str]:
    return [entry["model_name"] for entry in proxy.model_list]


def serve(
    model: str = MODEL,
    store: str | None = typer.Option(
        None, help="Store that records the calls and contains the run; by default, calls are not recorded"
    ),
    name: str = typer.Option("policy", help="Name of the model for clients"),
    host: str = HOST,
    port: int = PORT,
    max_batch: int = typer.Option(32, min=1, help="Maximum number of calls that the model processes in one batch"),
    log_level: str = typer.Option("WARNING", help="DEBUG, INFO, WARNING or ERROR"),
    log_json: bool = LOG_JSON,
) -> None:
    """Serve the model of a checkpoint as an OpenAI-style endpoint, through the gateway.

    Prints the base URL for clients, such as http://127.0.0.1:8000/v1, the name of the model, and an example. All calls
    belong to one attempt, which ends as succeeded when the server stops. Press Ctrl+C to stop.

    Example: agl serve runs/20260101-120000 --store agl.db
    """
    log_to_stderr(log_level, json_lines=log_json)
    from agentlightning.utils.http.auth import check_bind, server_token

    check_bind(host, server_token())  # before a model is loaded
    checkpoint = trained_at(model, store or "agl.db")
    from agentlightning.engine.engine import InferenceEngine

    engine = InferenceEngine(checkpoint.load(), model_name=name, max_batch=max_batch)
    engine.start()
    try:
        say(f"serving {checkpoint.path} as {name}")
        parameters = {"model": name, "api_base": engine.base_url, "engine": "agentlightning"}
        options: dict[str, Any] = {"model_list": [{"model_name": name, "litellm_params": parameters}]}
        if store is None:
            options["keep"] = "counts"  # the memory store cannot evict the spans of a running attempt
        else:
            options["journal"] = journal_beside(store, port)
        options |= {"host": host, "port": port or None}
        asyncio.run(serve_gateway(store or "memory", options, "agl serve", plain=True))
    finally:
        engine.stop()
