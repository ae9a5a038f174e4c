"""`ray`: the algorithm with its store server in this process, every runner as an actor of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import pickle
import signal
import socket
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from typing_extensions import override

from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var
from agentlightning.errors import MissingExtraError, RunnerDiedError
from agentlightning.execution.address import DEFAULT_PORT, LOOPBACK, Address
from agentlightning.execution.base import (
    AlgorithmBundle,
    ExecutionStrategy,
    RunnerBundle,
)
from agentlightning.execution.children import ChildTask
from agentlightning.execution.ray.team import AskingEvent, RayActors
from agentlightning.execution.roles import AlgorithmRole, RunnerTask
from agentlightning.execution.stall import DEFAULT_SECONDS, OnStall, StallPolicy
from agentlightning.execution.supervisor import Patience, Supervision
from agentlightning.execution.team import ProcessTeam, part_not_pickled
from agentlightning.store.base import LightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import run
from agentlightning.utils.http.auth import server_token
from agentlightning.utils.setting_checks import check_amount, check_choice, check_count, check_port, check_seconds

if TYPE_CHECKING:
    from agentlightning.store.client_server import LightningStoreServer

INTERRUPTED = Patience(ask=1.0, interrupt=1.0, terminate=0.5)
"""Patience after Ctrl+C, which may take 5 s in total; our own cluster takes up to 2 s of them to end."""
_TOKEN = LightningEnvVar.AGL_TOKEN.value


class RayExecutionStrategy(ExecutionStrategy):
    """Runs every runner as a Ray actor, and the algorithm and a store server in this process.

    Args:
        n_runners: number of actors.
        address: the cluster: `auto`, `host:port`, `ray://host:port`, or `local` for a new one on this machine. None is
            `RAY_ADDRESS`, or `local` without it. If the program has already called `ray.init`, that cluster is used.
        num_cpus: CPUs of each runner. Ray counts them and does not enforce them; a fraction is allowed.
        num_gpus: GPUs of each runner.
        resources: custom resources of each runner, for example `{"browser": 1}`.
        runtime_env: Ray's runtime environment of each actor: `pip`, `working_dir`, `env_vars`, ... Do not put secrets
            there: everyone with access to the cluster can read it.
        max_runner_restarts: maximum number of restarts of each runner that died.
        start_timeout: seconds that Ray may take to place a runner.
        server_host: address to bind; None reads `AGL_SERVER_HOST`. The default is 127.0.0.1 with a local cluster, and
            otherwise the address by which Ray knows this machine, which requires `AGL_TOKEN`.
        server_port: port of the store server; None reads `AGL_SERVER_PORT`. The default is 4747, or a free port if that
            is in use.
        connect_host: address to which the runners connect, if it differs from `server_host`.
        graceful_timeout: seconds between the stop event and the cancellation of the runners, at an ordinary end.
        terminate_timeout: seconds after the cancellation, and after the end of the actors.
        managed_store: whether to serve the store to the runners; None reads `AGL_MANAGED_STORE`, which is true by
            default. With False, both sides get the store unchanged.
        stall_timeout: seconds without progress after which the run logs what each part waits for; None is never.
        on_stall: `report` continues after the report, `raise` ends the run with `StalledError`.

    Raises:
        ValueError, TypeError: a setting is out of range.
        MissingExtraError: Ray is not installed.
    """

    runners_share_process = False

    def __init__(
        self,
        n_runners: int = 1,
        address: str | None = None,
        *,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        max_runner_restarts: int = 3,
        start_timeout: float = 60.0,
        server_host: str | None = None,
        server_port: int | None = None,
        connect_host: str | None = None,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        managed_store: bool | None = None,
        stall_timeout: float | None = DEFAULT_SECONDS,
        on_stall: OnStall = "report",
    ) -> None:
        self.n_runners = check_count("n_runners", n_runners)
        self.address = address
        self.num_cpus = check_amount("num_cpus", num_cpus)
        self.num_gpus = check_amount("num_gpus", num_gpus)
        for name, setting in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            if resources and name in resources:
                raise ValueError(f"resources accepts only custom resources; for {name!r} use the setting {setting}")
        amounts = {name: check_amount(f"resources[{name!r}]", amount) for name, amount in (resources or {}).items()}
        self.resources = amounts
        self.runtime_env = dict(runtime_env or {})
        if _TOKEN in self.runtime_env.get("env_vars", {}):
            raise ValueError(
                f"runtime_env['env_vars'] holds {_TOKEN}, which Ray would show. Set it in the environment of this "
                "process, which passes it to every runner"
            )
        self.max_runner_restarts = check_count("max_runner_restarts", max_runner_restarts, minimum=0)
        self.start_timeout = check_seconds("start_timeout", start_timeout)
        self.server_host = resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, server_host)
        port = resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, server_port)
        self.server_port = None if port is None else check_port("server_port", port)
        self.connect_host = connect_host
        self.graceful_timeout = check_seconds("graceful_timeout", graceful_timeout)
        self.terminate_timeout = check_seconds("terminate_timeout", terminate_timeout)
        self.managed_store = resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, managed_store, fallback=True)
        self.stall_timeout = None if stall_timeout is None else check_seconds("stall_timeout", stall_timeout)
        self.on_stall: OnStall = check_choice("on_stall", on_stall, get_args(OnStall))
        check_installed()

    @override
    def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> Any:
        self.interrupted = False
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        options |= {k: v for k, v in (("resources", self.resources), ("runtime_env", self.runtime_env)) if v}
        with joined(self.address, self.n_runners * self.num_cpus) as cluster:
            server, task = None, RunnerTask(runner, None, store)
            if self.managed_store:
                address = self._address(cluster)
                server = address.bound_server(store)
                task = RunnerTask(runner, address.at(server.server_launcher.port).url, None)
            actors = RayActors(
                ray=cluster.ray,
                task=sent(cluster.ray, task),
                options=options,
                token=server_token(),
                start_timeout=self.start_timeout,
            )
            event = AskingEvent(actors.ask)
            team = ActorTeam(actors, self.n_runners, event, max_restarts=self.max_runner_restarts)
            try:
                return run(lambda interrupts: self._conduct(algorithm, runner, store, server, team, interrupts))
            finally:
                event.set()
                actors.close()

    async def _conduct(
        self,
        algorithm: AlgorithmBundle,
        runner: RunnerBundle,
        store: LightningStore,
        server: LightningStoreServer | None,
        team: ProcessTeam,
        interrupts: Interrupts,
    ) -> Any:
        patience = Patience(self.graceful_timeout, *[self.terminate_timeout] * 3)
        supervision = Supervision(team, team.event, interrupts, patience, INTERRUPTED)
        supervision.on_interrupt = partial(self.note_interrupt, algorithm)
        team.start()
        role = AlgorithmRole(algorithm, StallPolicy(self.stall_timeout, self.on_stall))
        return await role.conduct(supervision, store, server, runner=runner)

    def _address(self, cluster: Cluster) -> Address:
        port = DEFAULT_PORT if self.server_port is None else self.server_port
        return Address(self.server_host or cluster.host, port, self.server_port is None, self.connect_host)


class ActorTeam(ProcessTeam):
    """A `Team` of Ray actors, which are restarted and ended like a team of processes."""

    @override
    def _died(self) -> Exception:
        causes = "\n".join(exit_.explain() for exit_ in self._failed)
        return RunnerDiedError(f"Ray actors failed{self._restarted()}: {causes}")


LOCAL = "local"
ADDRESS_VARIABLE = "RAY_ADDRESS"
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is part of."""

    ray: Any
    """The module."""
    host: str
    """The host by which other nodes reach this machine; loopback without other nodes."""


def check_installed() -> None:
    """Raise `MissingExtraError` if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("strategy='ray'", "ray", "ray")


@contextlib.contextmanager
def joined(address: str | None, cpus: float) -> Generator[Cluster]:
    """Yield the cluster at `address`, and leave it at the end. A local one has at least `cpus` and ends with the body.

    A cluster that this process already belongs to is used unchanged and is not left.

    Raises:
        ConnectionError: no cluster responds at the address.
    """
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        yield Cluster(ray, ray.util.get_node_ip_address())
        return
    where = address or os.environ.get(ADDRESS_VARIABLE) or LOCAL
    at = urlsplit(where if "://" in where else f"ray://{where}")
    if at.hostname is not None and at.port is not None:  # Ray retries for minutes if nothing accepts connections
        try:
            socket.create_connection((at.hostname, at.port), CONNECT_SECONDS).close()
        except OSError as error:
            raise _no_cluster(where, error) from error
    settings: dict[str, object] = {}
    if where == LOCAL:  # Ray only counts the processors: runners mostly wait for a model
        settings = {"num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)), "include_dashboard": False}
    previous = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(where, **settings)
    except ConnectionError as error:
        raise _no_cluster(where, error) from error
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray replaces the program's SIGTERM handler
            signal.signal(signal.SIGTERM, previous)
    try:
        yield Cluster(ray, LOOPBACK if where == LOCAL else ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def _no_cluster(where: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"No Ray cluster responds at {where!r}: {error}. Start one with `ray start --head`, pass its address "
        f"(address= or {ADDRESS_VARIABLE}), or use address='local' for a cluster on this machine."
    )


def sent(ray: Any, task: ChildTask) -> Any:
    """Return a Ray reference to the pickled `task`, for `RunnerActor`. Ray sends it to each node once.

    Raises:
        TypeError: a part of it cannot be pickled.
    """
    try:
        return ray.put(_pickled(ray, task))
    except Exception as error:  # any class may refuse to be pickled, with any exception
        reason = str(error).strip().splitlines()[0]
        part = part_not_pickled(task, lambda part: _pickled(ray, part), depth=4)
        raise TypeError(
            f"strategy='ray' sends the parts of a runner to the actors, and {part} cannot be pickled "
            f"({type(error).__name__}: {reason}). Create connections, locks and clients where they are used, not when "
            "the agent is created; or pass a class, factory or dict instead of an instance."
        ) from error


def _pickled(ray: Any, value: object) -> bytes:
    """Pickle the program's definitions by value, as Ray does for functions and classes.

    An agent of `@rollout` is pickled by its name by default, and in an actor `__main__` is another program.
    """

    base: Any = ray.cloudpickle.Pickler

    class ByValue(base):
        def reducer_override(self, value: Any) -> Any:
            is_ours = getattr(value, "__module__", None) == "__main__" and not isinstance(value, type | FunctionType)
            if is_ours and isinstance(value.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str):
                return object.__reduce_ex__(value, pickle.HIGHEST_PROTOCOL)
            return base.reducer_override(self, value)

    buffer = io.BytesIO()
    ByValue(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
