"""Ray itself, imported when it is used: joining a cluster or starting one, and sending it what the runners need."""

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
from collections.abc import Generator
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from urllib.parse import urlsplit

from agentlightning.errors import MissingExtraError
from agentlightning.execution.address import LOOPBACK
from agentlightning.execution.processes.children import ChildTask
from agentlightning.execution.processes.team import part_not_pickled

LOCAL = "local"
ADDRESS_VARIABLE = "RAY_ADDRESS"
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is part of."""

    ray: Any
    """The module."""
    host: str
    """Where the other nodes reach this machine; loopback if there are none."""


def check_installed() -> None:
    """Raise `MissingExtraError` if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("strategy='ray'", "ray", "ray")


@contextlib.contextmanager
def joined(address: str | None, cpus: float) -> Generator[Cluster]:
    """Give the cluster at `address`, left at the end; one of its own, with at least `cpus`, ends with the body.

    A cluster that this process belongs to already is used as it is, and stays.

    Raises:
        ConnectionError: there is none at the address.
    """
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        yield Cluster(ray, ray.util.get_node_ip_address())
        return
    where = address or os.environ.get(ADDRESS_VARIABLE) or LOCAL
    at = urlsplit(where if "://" in where else f"ray://{where}")
    if at.hostname is not None and at.port is not None:  # Ray tries for minutes where nothing accepts connections
        try:
            socket.create_connection((at.hostname, at.port), CONNECT_SECONDS).close()
        except OSError as error:
            raise _no_cluster(where, error) from error
    settings: dict[str, object] = {}
    if where == LOCAL:  # the processors are counted, not used: runners mostly wait for a model
        settings = {"num_cpus": max(os.cpu_count() or 1, math.ceil(cpus)), "include_dashboard": False}
    previous = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(where, **settings)
    except ConnectionError as error:
        raise _no_cluster(where, error) from error
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray replaces what the program does at SIGTERM
            signal.signal(signal.SIGTERM, previous)
    try:
        yield Cluster(ray, LOOPBACK if where == LOCAL else ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


def _no_cluster(where: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"No Ray cluster answers at {where!r}: {error}. Start one with `ray start --head`, give its address "
        f"(address= or {ADDRESS_VARIABLE}), or use address='local' for a cluster on this machine."
    )


def sent(ray: Any, task: ChildTask) -> Any:
    """Return a reference to `task` as bytes, for `RunnerActor`: they are sent to each node once.

    Raises:
        TypeError: a part of it cannot be pickled; names the part and the ways out.
    """
    try:
        return ray.put(_pickled(ray, task))
    except Exception as error:  # any class may refuse to be pickled, with any exception
        reason = str(error).strip().splitlines()[0]
        part = part_not_pickled(task, lambda part: _pickled(ray, part), depth=4)
        raise TypeError(
            f"strategy='ray' sends the parts of a runner to the actors, and {part} cannot be pickled "
            f"({type(error).__name__}: {reason}). Ways out: make connections, locks and clients where they are used, "
            "not when the agent is made; or pass a class, factory or dict instead of an instance."
        ) from error


def _pickled(ray: Any, value: object) -> bytes:
    """Pickle by value what the program itself defines, as Ray does for functions and classes.

    An agent of `@rollout` asks to be pickled by its name, and in an actor `__main__` is another program.
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
