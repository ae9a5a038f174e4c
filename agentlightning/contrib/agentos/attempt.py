"""The violations of the current attempt, and its entries in flight recorders.

They are stored in a context variable. A thread or a job that copies no context belongs to the attempt in which it was
started (`tracer/started.py`), even if it runs its own event loop, as required for `KernelSpace.syscall`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from agentlightning.base.terminal import cut
from agentlightning.emitter import emit_annotation
from agentlightning.errors import PolicyFault
from agentlightning.tracer.scope import TraceScope, current_scope, entered
from agentlightning.tracer.started import origin
from agentlightning.types import AttemptedRollout, Attributes
from agentlightning.utils.masking import masked, masked_text

logger = logging.getLogger(__name__)

VIOLATION_NAME = "policy_violation"
"""Name of the annotation that records a violation in the trace."""
LONGEST_TEXT = 4096
"""Maximum number of characters of a stored reason, argument list or result."""
_OF_THE_KERNEL = ("_syscall", "_ring")
"""Arguments that `KernelSpace` adds to a system call for the policy."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A refused action. Secrets in its texts are hidden, as in error messages."""

    reason: str
    """The reason of the policy."""
    agent_id: str | None = None
    """Id of the agent, which is also the role that the policy uses."""
    tool: str | None = None
    """Name of the tool, or the policy's name for the system call: `file_write`."""
    syscall: str | None = None
    """Name of the system call: `SYS_EXEC`."""
    arguments: str | None = None
    """Arguments of the call as JSON, at most `LONGEST_TEXT` characters."""

    @classmethod
    def of_syscall(cls, reason: object, agent_id: object, tool: object, args: Mapping[str, object]) -> Violation:
        """Return the violation of a system call that the policy of a `KernelSpace` refused."""
        own = {key: value for key, value in args.items() if key not in _OF_THE_KERNEL}
        return cls(readable_reason(reason), str(agent_id), str(tool), str(args.get("_syscall")), arguments_text(own))

    def attributes(self) -> Attributes:
        """Return the attributes of its annotation, excluding unknown ones."""
        values = {
            "name": VIOLATION_NAME,
            "violation": self.reason,
            "agent_os.agent_id": self.agent_id,
            "agent_os.tool": self.tool,
            "agent_os.syscall": self.syscall,
            "agent_os.arguments": self.arguments,
        }
        return {key: value for key, value in values.items() if value is not None}

    def __str__(self) -> str:
        return self.reason


class AttemptWatch:
    """Counts the violations of one attempt. May be used from any thread.

    Args:
        emit: record each violation as an annotation of the trace.
        ends: the first violation ends the attempt.
        reward: the reward of the attempt if a violation ends it.
    """

    def __init__(self, rollout: AttemptedRollout, *, emit: bool, ends: bool, reward: float) -> None:
        self.rollout_id = rollout.rollout_id
        self.attempt_id = rollout.attempt.attempt_id
        self.ends = ends
        self.first: Violation | None = None
        self.is_open = True
        self._emit = emit
        self._reward = reward
        self._counts: dict[Hashable, int] = {}
        self.entries: dict[Hashable, set[str]] = {}
        """Ids of the entries that this attempt wrote, by recorder."""
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """True if a violation has ended the attempt."""
        return self.ends and self.first is not None

    def add(self, source: Hashable, violation: Violation) -> None:
        """Count a violation that `source` reported, and record it. Never raises; the action remains refused."""
        with self._lock:
            self.first = self.first or violation
            self._counts[source] = self._counts.get(source, 0) + 1
        if not self._emit:
            return
        scope = _own_scope()
        try:
            with nullcontext() if scope is None or not scope.is_open else entered(scope):
                emit_annotation(violation.attributes())
        except Exception as error:  # it is counted anyway
            logger.warning("[Rollout %s] a policy violation was not recorded: %s", self.rollout_id, error)

    def add_entry(self, recorder: Hashable, entry_id: str) -> None:
        """Record that an entry of a recorder belongs to this attempt."""
        with self._lock:
            self.entries.setdefault(recorder, set()).add(entry_id)

    def count(self, source: Hashable) -> int:
        """Return the number of violations that `source` has reported."""
        with self._lock:
            return self._counts.get(source, 0)

    def fault(self, text: str | None = None) -> PolicyFault:
        """Return the exception that ends the attempt; its reason is the first violation or, without one, `text`."""
        reason = text if self.first is None else self.first.reason
        return PolicyFault(f"the policy kernel refused an action: {reason}", reward=self._reward)


_current: ContextVar[AttemptWatch | None] = ContextVar("agl_violations", default=None)
_running: dict[tuple[str | None, str | None], AttemptWatch] = {}
"""The watches of this process, by rollout and attempt."""


def attempt_watch() -> AttemptWatch | None:
    """Return the watch of the attempt of this context, thread or job; None outside watched attempts."""
    watch = _current.get()
    if watch is None and (scope := _own_scope()) is not None:
        watch = _running.get((scope.rollout_id, scope.attempt_id))
    return watch if watch is not None and watch.is_open else None


def note(source: Hashable, violation: Violation) -> AttemptWatch | None:
    """Add a violation to its attempt, and return the watch of that attempt."""
    watch = attempt_watch()
    if watch is not None:
        watch.add(source, violation)
    elif _running or _current.get() is not None:  # from a task that outlived its attempt, or a thread of unknown origin
        logger.warning(
            "a policy violation belongs to no attempt (%s): its task or thread outlived the attempt, or was not "
            "started inside an attempt. Wait for all tasks and threads before the agent returns, and run functions in "
            "your own threads with contextvars.copy_context().run(...).",
            violation.reason,
        )
    return watch


@contextmanager
def watched(watch: AttemptWatch) -> Generator[AttemptWatch]:
    """Count violations of this context, and of tasks and threads started in it, for `watch`."""
    key = (watch.rollout_id, watch.attempt_id)
    token = _current.set(watch)
    _running[key] = watch
    try:
        yield watch
    finally:
        watch.is_open = False
        _running.pop(key, None)
        _current.reset(token)


def _own_scope() -> TraceScope | None:
    """Return the scope of this context, or the scope in which this thread was started, even if it runs another loop."""
    return current_scope() or origin.get()


# --- texts without secrets -------------------------------------------------------------------------------------------


def readable_reason(reason: object) -> str:
    """Return the reason of a refusal as text without secrets."""
    return cut(masked_text(str(reason)), LONGEST_TEXT)


def arguments_text(arguments: object) -> str:
    """Return arguments as JSON without secrets; a value that JSON does not support becomes the name of its class."""
    try:
        value: Any = json.loads(json.dumps(arguments, default=_class_name, skipkeys=True))
    except (ValueError, RecursionError):  # an agent may pass a value that contains itself
        value = _class_name(arguments)
    return cut(json.dumps(masked(value), ensure_ascii=False), LONGEST_TEXT)


def without_secrets(text: str) -> str:
    """Return a text, JSON or not, with secrets hidden, of at most `LONGEST_TEXT` characters."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return readable_reason(text)
    return arguments_text(cast("object", value)) if isinstance(value, (dict, list)) else readable_reason(text)


def _class_name(value: object) -> str:
    return f"<{type(value).__qualname__}>"
