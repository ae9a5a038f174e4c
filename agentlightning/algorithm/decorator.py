"""`@algo`: an algorithm from a function whose parameters name the components that it needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, overload

from typing_extensions import TypeVar, override

from agentlightning.algorithm.base import Algorithm, ResultT
from agentlightning.algorithm.utils import running_llm_proxy
from agentlightning.litagent.decorator import PickledByName
from agentlightning.types import Dataset

R = TypeVar("R")
CalledT = TypeVar("CalledT", covariant=True, default=Any)
"""The value of a call of the function itself: its result, or the coroutine of it."""
INJECTED = ("store", "adapter", "llm_proxy", "initial_resources", "train_dataset", "val_dataset", "trainer", "run")
"""Names of the parameters that a function may have."""


class FunctionalAlgorithm(PickledByName, Algorithm[ResultT], Generic[ResultT, CalledT]):
    """An algorithm that calls a function with the components that its parameters name.

    With `auto_start_proxy`, the gateway runs while the function runs.

    Raises:
        TypeError: a required parameter is not one of the supported names, or is positional-only; or
            `auto_start_proxy` for a function that is not a coroutine function.
    """

    def __init__(self, function: Callable[..., Any], *, auto_start_proxy: bool = False) -> None:
        if not callable(function):
            raise TypeError(f"@algo requires a function; got {function!r}")
        if auto_start_proxy and not inspect.iscoroutinefunction(function):
            raise TypeError(f"@algo(auto_start_proxy=True) requires a coroutine function (async def); got {function!r}")
        self._function = function
        self._auto_start_proxy = auto_start_proxy
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._parameters = inspect.signature(function).parameters
        for parameter in self._parameters.values():
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise TypeError(f"@algo passes by keyword, but {parameter.name!r} is positional-only: remove the '/'")
            required = parameter.default is parameter.empty
            named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if named and required and parameter.name not in INJECTED:
                raise TypeError(
                    f"@algo has no {parameter.name!r} to pass to {getattr(function, '__name__', function)!r}. "
                    f"Valid parameters: {', '.join(INJECTED)}"
                )
        functools.update_wrapper(self, function)

    @override
    def __call__(self, *args: object, **kwargs: object) -> CalledT:  # pyright: ignore[reportIncompatibleMethodOverride] -- what the function returns, without the choice of the base
        """Call the function with these arguments."""
        return self._function(*args, **kwargs)

    @override
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    @override
    def recorded_settings(self) -> dict[str, object]:
        return {}

    @override
    def unused_parts(self) -> frozenset[str]:
        if "trainer" in self._parameters:  # has all parts
            return frozenset()
        return frozenset(("adapter", "initial_resources")) - frozenset(self._parameters)

    @override
    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Call the function with the components that it names; return its value, an awaitable for a coroutine function.

        Raises:
            TypeError: a dataset was passed, but the function has no parameter for it.
        """
        datasets = {"train_dataset": train_dataset, "val_dataset": val_dataset}
        for name, dataset in datasets.items():
            if dataset is not None and name not in self._parameters:
                raise TypeError(f"{name} is provided but not supported by {self.__name__}: no such parameter")
        sources: dict[str, Callable[[], object]] = {
            "store": self.get_store,
            "adapter": self.get_adapter,
            "llm_proxy": self.get_llm_proxy,
            "initial_resources": self.get_initial_resources,
            "trainer": self.get_trainer,
            "run": self.get_run_log,
            **{name: functools.partial(datasets.get, name) for name in datasets},
        }
        arguments = {name: source() for name, source in sources.items() if name in self._parameters}
        if self._auto_start_proxy:
            return self._run_beside_proxy(arguments)
        return self._function(**arguments)

    async def _run_beside_proxy(self, arguments: dict[str, object]) -> Any:
        async with running_llm_proxy(self, required=True):
            return await self._function(**arguments)


class _Decorator(Protocol):
    """The interface of `algo(auto_start_proxy=True)`, which decorates a coroutine function."""

    def __call__(
        self, function: Callable[..., Coroutine[Any, Any, R]], /
    ) -> FunctionalAlgorithm[R, Coroutine[Any, Any, R]]: ...


@overload
def algo(
    function: Callable[..., Coroutine[Any, Any, R]], *, auto_start_proxy: bool = False
) -> FunctionalAlgorithm[R, Coroutine[Any, Any, R]]: ...
@overload
def algo(function: Callable[..., R], *, auto_start_proxy: bool = False) -> FunctionalAlgorithm[R, R]: ...
@overload
def algo(function: None = None, *, auto_start_proxy: bool = False) -> _Decorator: ...
def algo(function: Callable[..., Any] | None = None, *, auto_start_proxy: bool = False) -> Any:
    """Create an algorithm from a sync or async function.

    Its parameters may be any of `store`, `adapter`, `llm_proxy`, `initial_resources`, `train_dataset`, `val_dataset`,
    `trainer` and `run` (the run's records, a `RunLog`); each is passed by name. `@algo(auto_start_proxy=True)` starts
    the Trainer's gateway before a coroutine function and always stops it afterwards.
    """
    if function is None:
        return functools.partial(algo, auto_start_proxy=auto_start_proxy)
    return FunctionalAlgorithm(function, auto_start_proxy=auto_start_proxy)
