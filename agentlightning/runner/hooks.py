"""Calls the hooks: in order at a beginning, in reverse at an end. A hook's failure is logged, never the rollout's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from agentlightning.types import Hook
from agentlightning.utils.exceptions import readable

logger = logging.getLogger(__name__)


_ATTEMPT = frozenset(("agent", "runner", "rollout"))
OFFERED: dict[str, frozenset[str]] = {
    "on_rollout_start": _ATTEMPT,
    "on_trace_start": _ATTEMPT | {"tracer"},
    "on_trace_end": _ATTEMPT | {"tracer"},
    "on_rollout_error": _ATTEMPT | {"error"},
    "on_rollout_end": _ATTEMPT | {"spans"},
}
"""The arguments of each callback."""


class Hooks:
    """The hooks of one runner. A callback is given those keywords that it takes, and may be sync or async.

    Raises:
        TypeError: one is no hook, or asks for an argument that it is not given; names it.
    """

    def __init__(self, hooks: Sequence[Hook] | None) -> None:
        self._hooks = tuple(hooks or ())
        for hook in self._hooks:
            check_hook(hook)
        self._takes: dict[Any, frozenset[str] | None] = {}

    async def call(self, callback: str, **keywords: Any) -> None:
        """Call one callback of every hook that has it."""
        order = reversed(self._hooks) if callback.endswith("_end") else iter(self._hooks)
        for hook in order:
            method = getattr(hook, callback, None)
            if method is None:
                continue
            try:
                function = getattr(method, "__func__", method)
                if function not in self._takes:
                    parameters = inspect.signature(method).parameters.values()
                    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
                    self._takes[function] = None if takes_all else frozenset(p.name for p in parameters)
                names = self._takes[function]
                answer = method(**{key: value for key, value in keywords.items() if names is None or key in names})
                if inspect.isawaitable(answer):
                    await answer
            except Exception as error:  # a hook looks on; what goes wrong in it must not change the rollout
                shown = readable(error)
                raised = (type(shown), shown, shown.__traceback__)
                logger.error("Exception during %s hook of %s", callback, type(hook).__name__, exc_info=raised)


def check_hook(hook: Any) -> None:
    """Check that every callback of a hook can be called.

    Raises:
        TypeError: it is no hook, or a callback asks for an argument that it is not given; names it.
    """
    if not isinstance(hook, Hook):
        raise TypeError(f"A hook is an object of a subclass of agl.Hook; got {hook!r}")
    for callback, offered in OFFERED.items():
        method = getattr(hook, callback, None)
        parameters = () if method is None else inspect.signature(method).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        unknown = [p.name for p in needed if p.name not in offered or p.kind is p.POSITIONAL_ONLY]
        if unknown:
            raise TypeError(
                f"{type(hook).__name__}.{callback} asks for {', '.join(unknown)}; it may take, by name, any of "
                f"{', '.join(sorted(offered))}"
            )
