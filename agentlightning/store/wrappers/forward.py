"""A class decorator that sends every operation which a wrapper does not define itself through one `_call`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable
from types import CodeType
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import override

from agentlightning.store import (
    base,
    detail_operations,
    history_operations,
    read_operations,
    run_operations,
    summary_operations,
)
from agentlightning.store.base import LightningStore, LightningStoreCapabilities
from agentlightning.store.detail_operations import DetailOperations
from agentlightning.store.history_operations import HistoryOperations
from agentlightning.store.read_operations import ReadOperations
from agentlightning.store.run_operations import RunOperations
from agentlightning.store.summary_operations import SummaryOperations

COMPOSED = frozenset(
    ("wait_for_rollout", "finish_attempt", "finish_rollout", "fail_rollout", "list_rollouts", "register_worker")
)
"""Short forms that `base.py` builds out of other operations."""

RUN_OPERATIONS, DEFAULTED, FORWARDED = (
    tuple(
        name
        for part in parts
        for name, member in vars(part).items()
        if inspect.iscoroutinefunction(member) and not name.startswith("_") and name not in COMPOSED and name != "close"
    )
    for parts in (
        (RunOperations,),
        (SummaryOperations, DetailOperations, HistoryOperations),
        (LightningStore, ReadOperations, RunOperations, SummaryOperations, DetailOperations, HistoryOperations),
    )
)
"""Every operation of runs, every one that the contract has made out of others, and every operation of the contract."""


class Forwarding(Protocol):
    """What the decorated class offers."""

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object: ...


def take_annotations(cls: type[object]) -> None:
    """Give the operations that `cls` defines the annotations of the contract, where alone they are written.

    Its module gets the names that they use, by which `typing.get_type_hints` finds the types.
    """
    module = vars(sys.modules[cls.__module__])
    parts = (base, read_operations, run_operations, summary_operations, detail_operations, history_operations)
    for name, value in (pair for part in parts for pair in vars(part).items()):
        if not name.startswith("_"):
            module.setdefault(name, value)
    for name in FORWARDED:
        if name in vars(cls):
            vars(cls)[name].__annotations__ = dict(getattr(LightningStore, name).__annotations__)


def names_of_parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """Return what `inspect.signature` does of a function, wrapped or not, at a hundredth of its time."""
    code: CodeType = inspect.unwrap(function).__code__  # of an operation that is forwarded, that of the contract
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


class StoreWrapper(LightningStore):
    """A store in front of another one, whose operations it changes."""

    def __init__(self, store: LightningStore) -> None:
        self.store = store

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return self.store.capabilities

    @override
    def otlp_traces_endpoint(self) -> str:
        return self.store.otlp_traces_endpoint()

    @override
    async def close(self) -> None:
        """Close the store behind it."""
        await self.store.close()


C = TypeVar("C", bound=type[Any])


def forward_operations(cls: C) -> C:
    """Fill in each operation that `cls` does not define: it becomes `self._call(name, args, kwargs)`."""
    take_annotations(cls)
    for name in FORWARDED:
        if name not in vars(cls):
            setattr(cls, name, _forwarder(name))
    return cls


def _forwarder(name: str) -> Callable[..., Awaitable[object]]:
    @functools.wraps(cast("Callable[..., Awaitable[object]]", getattr(LightningStore, name)))
    async def forwarded(self: Forwarding, *args: object, **kwargs: object) -> object:
        return await self._call(name, args, kwargs)

    return forwarded
