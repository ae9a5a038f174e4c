"""`Runner.execute`, which programs override: what becomes of a class that has nothing else."""

from __future__ import annotations

import functools
import types
from typing import Any, cast

from agentlightning.runner.agent import LitAgentRunner
from agentlightning.runner.base import Runner
from agentlightning.tracer.otel import OtelTracer


def overrides_only_execute(cls: type[Runner[Any]]) -> bool:
    """True for a subclass of `Runner` that defines `execute` and neither `iter` nor `step`."""
    mine, base = cast("Any", cls), cast("Any", Runner)
    return mine.execute is not base.execute and mine.iter is base.iter and mine.step is base.step


class _Behind(LitAgentRunner[Any]):
    """What serves the queue behind such a class, whose constructor may know nothing of a tracer."""

    @functools.wraps(cast("Any", LitAgentRunner).__init__)  # by whose signature it is given settings
    def __init__(self, *args: Any, **settings: Any) -> None:
        if not args:
            settings.setdefault("tracer", OtelTracer())
        super().__init__(*args, **settings)


@functools.cache
def serving(cls: type[Runner[Any]]) -> type[Runner[Any]]:
    """Return a class that serves the queue: `cls` itself, or with `LitAgentRunner` behind it if it has only `execute`.

    `super().execute(task)` of such a class runs the rollout. Its objects can be pickled wherever `cls` can.
    """
    if not overrides_only_execute(cls):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = types.new_class(cls.__name__, (cls, _Behind), {}, lambda body: body.update(names))
    made.__reduce_ex__ = lambda self, protocol: (_restored, (cls,), self.__getstate__())  # type: ignore[method-assign]
    return made


def _restored(cls: type[Runner[Any]]) -> Any:
    made = serving(cls)
    return made.__new__(made)
