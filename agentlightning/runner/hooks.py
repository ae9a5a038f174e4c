"""Calls the hooks: in order at a beginning, in reverse at an end. A hook's failure is logged, never the rollout's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from agentlightning.types import Hook

logger = logging.getLogger(__name__)


class Hooks:
    """The hooks of one runner. A callback is given those keywords that it takes, and may be sync or async."""

    def __init__(self, hooks: Sequence[Hook] | None) -> None:
        self._hooks = tuple(hooks or ())
        for hook in self._hooks:
            if not isinstance(hook, Hook):
                raise TypeError(f"A hook is an object of a subclass of agl.Hook; got {hook!r}")
        self._takes: dict[Any, frozenset[str] | None] = {}

    async def call(self, callback: str, **keywords: Any) -> None:
        """Call one callback of every hook that has it."""
        order = reversed(self._hooks) if callback.endswith("_end") else iter(self._hooks)
        for hook in order:
            method = getattr(hook, callback, None)
            if method is None:
                continue
            try:
                answer = method(**self._accepted(method, keywords))
                if inspect.isawaitable(answer):
                    await answer
            except Exception:  # a hook looks on; what goes wrong in it must not change the rollout
                logger.exception("Exception during %s hook of %s", callback, type(hook).__name__)

    def _accepted(self, method: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
        function = getattr(method, "__func__", method)
        if function not in self._takes:
            parameters = inspect.signature(method).parameters.values()
            takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
            self._takes[function] = None if takes_all else frozenset(p.name for p in parameters)
        names = self._takes[function]
        return keywords if names is None else {key: value for key, value in keywords.items() if key in names}
