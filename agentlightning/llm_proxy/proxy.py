"""`LLMProxy`, the public class of the gateway: start and stop, models, URLs for agents, weight changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from agentlightning.errors import BadRequestError
from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.llm_proxy.batch import ask_batch, read_entry
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.endpoints.balancer import HealthChecks
from agentlightning.llm_proxy.endpoints.models import ModelConfig
from agentlightning.llm_proxy.endpoints.table import (
    Fallbacks,
    LiteLLMSettings,
    ModelTable,
    read_aliases,
    read_fallbacks,
    read_litellm_config,
)
from agentlightning.llm_proxy.gateway import Gateway
from agentlightning.llm_proxy.policies import CallPolicy, PolicyConfig, PolicyTable, read_policies
from agentlightning.llm_proxy.recording.journal import Journal
from agentlightning.llm_proxy.recording.recorder import Kept, Privacy, Redact
from agentlightning.llm_proxy.recording.replay import CallFile, Match
from agentlightning.llm_proxy.upstream.http import Upstream
from agentlightning.llm_proxy.weights import WeightChanges, WeightGate
from agentlightning.store.base import LightningStore
from agentlightning.store.wrappers import complete
from agentlightning.tracer.mirror import close_mirror, open_mirror
from agentlightning.types import LLM, NamedResources, ProxyLLM
from agentlightning.types.attempt_key import attempt_key
from agentlightning.utils.backoff import OUTAGE_SECONDS
from agentlightning.utils.http.allowed_hosts import AllowedHosts, HostDoor
from agentlightning.utils.http.auth import Receive, Scope, Send, check_bind, server_token
from agentlightning.utils.server_launcher import LaunchMode, PythonServerLauncher, PythonServerLauncherArgs

logger = logging.getLogger(__name__)


class LLMProxy(WeightChanges):
    """An OpenAI-compatible server between agents and model servers that records each call with its tokens.

    Owned by one process; `start` serves from a separate thread (`launch_mode="thread"`) or from the running loop
    (`"asyncio"`). The other methods may be awaited from any loop. The store is called in this process, on the serving
    loop.

    Args:
        port: None selects a free port, which then stays the same.
        model_list: one entry per endpoint; see `ModelConfig`. May be empty at first.
        store: records the calls; may be set later with `set_store`.
        host: None is 127.0.0.1. A non-loopback address requires `AGL_TOKEN` (or `AGL_INSECURE=1`).
        num_retries: number of retries after a 500 of a model server. Calls to unreachable servers, and 429, 502, 503
            and 504, are always retried `max(num_retries, 3)` times.
        launcher_args: replaces port, host and launch_mode.
        litellm_config: a configuration of LiteLLM with `model_list`, and in `router_settings` or `litellm_settings`
            with `fallbacks`, `default_fallbacks`, `model_group_alias` and `num_retries`. Other settings are refused
            with an error that names a replacement; so are `middlewares`, `callbacks` and several `num_workers`.
        limits: all limits of the gateway.
        keep: the parts of a call that are recorded: `all`, `tokens` (no text) or `counts` (neither text nor token ids).
        redact: a function that converts each span of a call before it leaves the process. If it fails, the agent gets
            an error and no span is sent.
        record: a file to which every call with a reply is appended in full.
        replay: a file made by `record`, with the replies to calls; no model server is called. If `record` is the same
            file, missing calls are made and added.
        replay_match: `strict` replays only identical requests, `nearest` the most similar one.
        journal: a file of the calls in progress. The next gateway with it records the calls that `kill -9` interrupted.
        policies: the policies that calls belong to, by name; see `PolicyConfig`. None: calls belong to no policy.
        health: when one of several endpoints of a model is taken out, and how it is brought back.
        fallbacks: by model, the models that are called in turn if its servers fail; `"*"` is every model without an
            entry. Calls that a fallback served are not trained, unless the fallback is the model of a policy.
        aliases: other names of models, as in `{"gpt-4o": "policy"}`.

    Raises:
        ValueError: an argument has no effect here, or contradicts another; names it.
    """

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[ModelConfig] | None = None,
        store: LightningStore | None = None,
        host: str | None = None,
        litellm_config: Mapping[str, object] | None = None,
        num_retries: int = 0,
        num_workers: int = 1,
        launch_mode: LaunchMode = "thread",
        launcher_args: PythonServerLauncherArgs | None = None,
        middlewares: Sequence[object] | None = None,
        callbacks: Sequence[object] | None = None,
        *,
        limits: GatewayLimits | None = None,
        keep: Kept = "all",
        redact: Redact | None = None,
        record: str | Path | None = None,
        replay: str | Path | None = None,
        replay_match: Match = "strict",
        journal: str | Path | None = None,
        policies: Mapping[str, PolicyConfig] | None = None,
        health: HealthChecks | None = None,
        fallbacks: Fallbacks | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        config = read_litellm_config(litellm_config) if litellm_config else LiteLLMSettings()
        both = ((model_list, config.model_list), (fallbacks, config.fallbacks), (aliases, config.aliases))
        for name, (argument, setting) in zip(("model_list", "fallbacks", "aliases"), both, strict=True):
            if argument and setting:
                raise ValueError(f"{name} is set twice, as an argument and in litellm_config. Remove one of them")
        model_list = model_list or config.model_list
        num_retries = num_retries if config.num_retries is None else config.num_retries
        if middlewares:
            raise ValueError(
                "middlewares is not supported: the gateway always attributes calls by their URL. Remove the argument"
            )
        if callbacks:
            raise ValueError(
                "callbacks is not supported: token ids, log-probabilities and spans of each call are always recorded. "
                "Remove the argument"
            )
        if num_workers != 1:
            raise ValueError(f"num_workers must be 1: the gateway runs one event loop; got {num_workers}")
        if launcher_args is not None and (port, host, launch_mode) != (None, None, "thread"):
            raise ValueError("port, host, launch_mode, and num_workers cannot be set when launcher_args is provided.")
        if type(num_retries) is not int or num_retries < 0:
            raise ValueError(f"num_retries must be a whole number of 0 or more; got {num_retries!r}")
        self.store = store
        self._whole: tuple[LightningStore, LightningStore] | None = None
        self.default_attempt: tuple[str, str] | None = None
        """Rollout id and attempt id of calls whose URL names no attempt, such as `/v1/models`; None refuses them."""
        self.limits = limits or GatewayLimits()
        self.store_unreachable_timeout = OUTAGE_SECONDS
        """Seconds for which the store may be unreachable if the limits set none; a Trainer sets its runner's value."""
        self._health = health or HealthChecks()
        self._privacy = Privacy(keep, redact)
        self._call_file = None if record is None and replay is None else CallFile(record, replay, replay_match)
        self._journal = None if journal is None else Journal(journal)
        self._cut_short: list[GatewayCall] = []
        self._mirrors = False
        self.server_launcher_args = launcher_args or PythonServerLauncherArgs(
            port=port, host=host, launch_mode=launch_mode, healthcheck_url="/health"
        )
        self.server_launcher = PythonServerLauncher(self._serve, self.server_launcher_args, self._on_serving_loop)
        self._model_list: list[ModelConfig] = []
        self._fallbacks = read_fallbacks("fallbacks", fallbacks or config.fallbacks)
        self._aliases = read_aliases("aliases", aliases or config.aliases)
        self._table = ModelTable([])
        self._policies = PolicyTable(read_policies(policies))
        super().__init__(WeightGate(self.limits.waiting_calls))
        self._num_retries = num_retries
        self._gateway: Gateway | None = None
        self._door: HostDoor | None = None
        self._upstream: Upstream | None = None
        self.update_model_list(model_list or [])
        if model_list:
            self._policies.missing_models(self._table.names)
            self._check_names()

    # --- models, policies and resources ----------------------------------------------------------------------------

    @property
    def model_list(self) -> list[ModelConfig]:
        """The served entries; `update_model_list` changes them."""
        return list(self._model_list)

    def update_model_list(self, model_list: Sequence[ModelConfig]) -> None:
        """Serve these models from the next call on. May be called while running; calls in progress continue.

        Raises:
            ValueError: an entry is malformed; then nothing changes.
        """
        table = ModelTable(model_list, self._fallbacks, self._aliases)
        self._table, self._model_list = table, list(model_list)

    def get_store(self) -> LightningStore | None:
        """Return the store in which calls are recorded."""
        return self.store

    def set_store(self, store: LightningStore) -> None:
        """Record in this store from the next call on.

        Raises:
            RuntimeError: the gateway runs and the store cannot be called from its loop; then nothing changes.
        """
        if self.is_running():
            check_capability(store, self.server_launcher_args.launch_mode)
        self.store = store

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: dict[str, Any] | None = None,
        *,
        role: str | None = None,
    ) -> LLM:
        """Return the LLM of one attempt, or without ids a `ProxyLLM` from which each attempt gets its LLM.

        May be called before `start`; this binds the port. If `AGL_TOKEN` is set, the LLM of an attempt has its key.
        Calls through the LLM of a `role` belong to the policy that lists it.

        Raises:
            ValueError: only one of the ids is given; the model is missing and there is not exactly one; no policy lists
                the role; or the role's policy has other models.
        """
        policy = None if role is None else self._policies.of_role(role)
        model_name = model_for(self._table.names, policy, None if model is None else self._table.resolved(model))
        gateway = self.server_launcher.access_endpoint
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("Either rollout_id and attempt_id must be provided, or neither.")
        endpoint = gateway if role is None else f"{gateway}/role/{role}"
        sampling = dict(sampling_parameters or {})
        if rollout_id is None or attempt_id is None:
            return ProxyLLM(endpoint=endpoint, model=model_name, sampling_parameters=sampling)
        url = f"{endpoint}/rollout/{rollout_id}/attempt/{attempt_id}"
        token = server_token()
        key = attempt_key(rollout_id, attempt_id, token) if token else None
        return LLM(endpoint=url, model=model_name, api_key=key, sampling_parameters=sampling)

    @property
    def policies(self) -> list[CallPolicy]:
        """Policies that calls belong to."""
        return self._policies.all

    @property
    def roles(self) -> list[str]:
        """Roles of the policies."""
        return list(self._policies.roles)

    def as_resources(self, sampling_parameters: dict[str, Any] | None = None) -> NamedResources:
        """Return one `ProxyLLM` per role, by the role's name: the resources of an agent with several roles.

        Raises:
            ValueError: no policy has a role, or a role does not have exactly one model.
        """
        if not self._policies.roles:
            raise ValueError(
                "No policy has a role: add LLMProxy(policies={'main': {'kind': 'trained', 'roles': [...]}})"
            )
        return cast(
            NamedResources,
            {role: self.as_resource(None, None, None, sampling_parameters, role=role) for role in self.roles},
        )

    async def batch_query(
        self, batch: Sequence[Any], *, model: str | None = None, timeout: float = 600.0
    ) -> list[dict[str, Any]]:
        """Call the model for each entry of a batch, up to 64 concurrently, and return its chat completions in order.

        An entry is a text, a list of messages, or the dict of a request with `messages`. Each call is made in its own
        rollout and recorded like any other; the rollout ends `unscored`. `model` is required if several are served;
        `timeout` is the limit of one call, in seconds. If the gateway is not running, it is started for the batch.

        To run the agent on a batch, enqueue rollouts: `get_store().enqueue_rollout(task)`.

        Raises:
            BadRequestError: an entry is invalid; names it. No call was made.
            ValueError: there is no store, or there is not exactly one possible model.
            RuntimeError: calls failed; raised after all have ended, with their number and the first error.
            TimeoutError: all failed calls took too long.
        """
        requests = [read_entry(index, entry) for index, entry in enumerate(batch)]
        if self.store is None:
            raise ValueError("The gateway has no store in which to record calls. Call set_store(store) first")
        if not timeout > 0:
            raise BadRequestError(f"timeout must be above 0 seconds; got {timeout}")
        starts = not self.is_running()
        if starts:
            await self.start()
        try:
            return await ask_batch(self.store, self.as_resource, batch, requests, model, timeout)
        finally:
            if starts:
                await self.stop()

    # --- start and stop --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start serving; return when calls are accepted.

        Raises:
            ValueError: there is no store, or a policy, an alias or a fallback names a model that is not served.
            ValueError, MissingExtraError: `AGENT_LIGHTNING_OTLP_ENDPOINT` is invalid, or its exporter is not installed.
            RuntimeError: already running, the store cannot be called from the serving loop, the port is taken, or the
                address is not loopback and there is no token.
        """
        if self.store is None:
            raise ValueError("Store is not set. Please set the store before starting the LLMProxy.")
        check_capability(self.store, self.server_launcher_args.launch_mode)
        token = server_token()
        check_bind(self.server_launcher.host, token)
        if self.is_running():
            raise RuntimeError(f"The gateway at {self.server_launcher.endpoint} is already running; stop it first")
        replays = self._call_file is not None and self._call_file.replays
        if not replays and (missing := self._policies.missing_models(self._table.names)):
            logger.warning("%s. Calls to it are refused until update_model_list adds it", missing)
        if not replays:
            self._check_names()
        upstream = Upstream(
            num_retries=self._num_retries,
            body_bytes=self.limits.body_bytes,
            calls=self.limits.calls,
            health=self._health,
        )
        self._upstream = upstream
        self._gateway = Gateway(
            store=self._bound_store,
            models=lambda: self._table,
            policies=self._policies,
            default_attempt=lambda: self.default_attempt,
            token=token,
            limits=self.limits,
            store_seconds=self.limits.store_seconds or self.store_unreachable_timeout,
            gate=self._gate,
            upstream=upstream,
            privacy=self._privacy,
            call_file=self._call_file,
            journal=self._journal,
        )
        hosts = AllowedHosts.of(self.server_launcher.host, self.server_launcher_args.told_host, None)
        self._door = HostDoor(self._gateway, hosts, same_origin=token is None)
        if self._journal is not None:
            self._cut_short = self._journal.open()
        self._mirrors = self._mirrors or open_mirror()
        await self.server_launcher.start()

    async def stop(self) -> None:
        """Stop serving. Calls in progress get the launcher's `shutdown_timeout`. Logs a warning if nothing runs."""
        if not self.is_running():
            logger.warning("LLMProxy.stop: the gateway is not running")
        await self.server_launcher.stop()
        if self._call_file is not None:
            self._call_file.close()
        if self._journal is not None:
            self._journal.close()
        mirrors, self._mirrors = self._mirrors, False
        if mirrors:
            await asyncio.to_thread(close_mirror)

    async def restart(self) -> None:
        """Stop if running, then start again on the same port."""
        if self.is_running():
            await self.stop()
        await self.start()

    def is_running(self) -> bool:
        """True while calls are served; false after the server has died."""
        return self.server_launcher.is_running()

    def stats(self) -> dict[str, Any]:
        """Return counters since the last start: `calls` by state, calls `lost` and `rejected` (without spans), calls
        `in_flight` at model servers, calls `waiting` for a weight change, all calls in progress (`in_hand`), the
        `weight_version`, and the state of each of the `endpoints`: `serving`, `failing` or `out`."""
        ended = dict(self._gateway.ended) if self._gateway else {}
        return {
            "lost": ended.pop("lost", 0),
            "rejected": ended.pop("rejected", 0),
            "calls": ended,
            "in_flight": self._gate.in_flight,
            "waiting": self._gate.waiting,
            "in_hand": self._gateway.in_hand if self._gateway else 0,
            "weight_version": self._gate.version,
            "endpoints": self._upstream.states(self._table.all_endpoints) if self._upstream else {},
        }

    def calls_in_hand(self, *, outside: Collection[str] = ()) -> int:
        """Return the number of calls in progress, without those of the rollouts in `outside`."""
        return self._gateway.in_hand_outside(outside) if self._gateway else 0

    # --- private ---------------------------------------------------------------------------------------------------

    def _check_names(self) -> None:
        """Refuse aliases and fallbacks of models that are not served, except models that an algorithm adds later."""
        later = [model for policy in self._policies.all if policy.kind == "trained" for model in policy.models]
        if missing := self._table.missing(later):
            raise ValueError(missing)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._door is not None
        await self._door(scope, receive, send)

    @asynccontextmanager
    async def _on_serving_loop(self) -> AsyncGenerator[None, None]:
        assert self._upstream is not None
        async with self._upstream.opened(lambda: self._table.all_endpoints):
            self._loop = asyncio.get_running_loop()
            try:
                if self._gateway is not None and self._cut_short:
                    await self._gateway.record_cut_short(self._cut_short)
                    self._cut_short = []
                yield
            finally:
                self._loop = None

    def _bound_store(self) -> LightningStore:
        """Return the store with all operations; it may be replaced at any time."""
        assert self.store is not None
        if self._whole is None or self._whole[0] is not self.store:
            self._whole = self.store, complete(self.store)
        return self._whole[1]


def check_capability(store: LightningStore, launch_mode: LaunchMode) -> None:
    """Check that a store can be called from the serving loop.

    Raises:
        RuntimeError: it cannot; names a solution.
    """
    capabilities, name = store.capabilities, type(store).__name__
    if launch_mode == "thread" and not capabilities.get("thread_safe"):
        raise RuntimeError(
            f"The store {name} is not thread-safe, so the gateway's thread cannot call it. "
            "Wrap the store in LightningStoreThreaded, or use launch_mode='asyncio'"
        )
    if launch_mode == "asyncio" and not capabilities.get("async_safe"):
        raise RuntimeError(f"The store {name} is not async-safe, so the gateway's loop cannot call it")


def model_for(served: Sequence[str], policy: CallPolicy | None, asked: str | None) -> str:
    """Return the model for an agent: the requested one, else its policy's, else the only one served.

    Raises:
        ValueError: there is not exactly one, or the policy has other models.
    """
    policy_models = () if policy is None else policy.models
    if asked is not None and policy_models and asked not in policy_models:
        assert policy is not None
        raise ValueError(f"The policy {policy.name!r} has the models {', '.join(policy_models)}, not {asked!r}")
    names = [asked] if asked else list(policy_models or served)
    if not names:
        raise ValueError("No models found in model_list. Please specify the model.")
    if len(names) > 1:
        where = f"the policy {policy.name!r}" if policy is not None and policy_models else "model_list"
        raise ValueError(f"Multiple models found in {where}: {', '.join(names)}. Please specify the model.")
    return names[0]
