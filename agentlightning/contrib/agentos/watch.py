"""Watches the refusals of a kernel: between a `KernelSpace` and its policy engine, or by a callback.

`KernelSpace` calls `policy_engine.check_violation(agent_role, tool_name, args)` before every system call and refuses
the call if it returns a reason: the agent ends with `AgentKernelPanic` if it was registered with
`create_agent_context`, otherwise it receives a result with `error_code` -2. Both call the engine once. The kernel's
`metrics.policy_violations` counts each refusal twice and is not used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from agentlightning.contrib.agentos.attempt import AttemptWatch, Violation, attempt_watch, note, readable_reason

Entry = Mapping[str, Any]
"""One entry of a flight recorder."""
_ENGINE, _RECORDER = "_policy_engine", "_flight_recorder"
"""Attributes of `KernelSpace`."""


@runtime_checkable
class PolicyKernel(Protocol):
    """A kernel of another project that reports its own refusals."""

    def on_violation(self, callback: Callable[[Any], None], /) -> object:
        """Call `callback` with every action that is refused later."""


class _Watch:
    """A wrapper of a part of a kernel; it delegates everything that it does not define."""

    _watched: str
    """Name of the attribute with the part."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == self._watched:  # the object is being copied or unpickled
            raise AttributeError(name)
        return getattr(getattr(self, self._watched), name)


class PolicyWatch(_Watch):
    """A policy engine that reports its refusals to the attempt, and delegates everything else to the engine.

    `KernelSpace(policy_engine=PolicyWatch(engine))`: for agents that create a kernel for each attempt, while runner
    and reward have only the watch. It can be pickled if the engine can.

    Raises:
        TypeError: the engine has no `check_violation`.
    """

    _watched = "engine"

    def __init__(self, engine: object) -> None:
        if isinstance(engine, type) or not callable(getattr(engine, "check_violation", None)):
            raise TypeError(
                "engine must have a method check_violation(agent_role, tool_name, args) that returns a reason or None, "
                f"as PolicyEngine of agent-os-kernel has; got {engine!r}"
            )
        self.engine: Any = engine

    def check_violation(self, agent_role: str, tool_name: str, args: Mapping[str, object]) -> str | None:
        """Return the engine's reason to refuse an action, or None.

        A query (`SYS_CHECKPOLICY`) is not an action: the kernel marks system calls, and only marked calls count.

        Raises:
            PolicyFault: a violation has already ended the attempt; its agent may take no further actions.
        """
        watch = attempt_watch()
        if watch is not None and watch.is_over:
            raise watch.fault()
        reason = self.engine.check_violation(agent_role, tool_name, args)
        if reason and "_syscall" in args:
            note(self, Violation.of_syscall(reason, agent_role, tool_name, args))
        return cast("str | None", reason)


class RecorderWatch(_Watch):
    """A `FlightRecorder` that reports each entry to its attempt, and delegates everything else to the recorder.

    An entry has no field for the attempt, and its `agent_id` is the role that all attempts share.

    Raises:
        TypeError: the recorder has no `start_trace` or no `get_log`.
    """

    _watched = "recorder"

    def __init__(self, recorder: object) -> None:
        if isinstance(recorder, type) or not all(
            callable(getattr(recorder, name, None)) for name in ("start_trace", "get_log")
        ):
            raise TypeError(
                "recorder must have the methods start_trace and get_log, as FlightRecorder of agent-os-kernel has; "
                f"got {recorder!r}"
            )
        self.recorder: Any = recorder

    def start_trace(self, *args: Any, **kwargs: Any) -> str:
        """Begin an entry and return its id."""
        entry_id = cast("str", self.recorder.start_trace(*args, **kwargs))
        watch = attempt_watch()
        if watch is not None:
            watch.add_entry(self, entry_id)
        return entry_id

    def entries_of(self, watch: AttemptWatch, since: float) -> list[Entry]:
        """Return the entries that an attempt has written, the oldest first.

        Args:
            since: start of the attempt in Unix seconds; only later entries of a long log are read.
        """
        ids = watch.entries.get(self)
        if not ids:
            return []
        between = getattr(self.recorder, "get_events_in_time_range", None)
        if between is None:
            entries: list[Entry] = self.recorder.get_log()
        else:
            entries = between(datetime.fromtimestamp(since, UTC), datetime.now(UTC))
        return [entry for entry in entries if entry.get("trace_id") in ids]


class Kernels:
    """The kernels of a runner or a reward. A copy is the same object, because the agent's kernel is not copied.

    Wraps the engine of a `KernelSpace` in a `PolicyWatch` and its recorder in a `RecorderWatch`, once each.

    Args:
        kernel: a `KernelSpace`, a `PolicyWatch`, an object with `on_violation(callback)`, or a list of them.

    Raises:
        TypeError: no kernel reports violations.
    """

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        kernels = list(_flat(kernel))
        self.sources = tuple(dict.fromkeys(source for each in kernels for source in _sources_of(each)))
        """The objects that report violations; empty if no kernel has a policy."""
        recorders = [getattr(each, _RECORDER, None) for each in kernels if _is_kernel_space(each)]
        self.recorders = [recorder for recorder in recorders if isinstance(recorder, RecorderWatch)]

    def subscribe(self) -> None:
        """Register the callbacks of the kernels that support them, once per process."""
        for source in self.sources:
            if isinstance(source, _Callback):
                source.subscribe()

    def __deepcopy__(self, memo: object) -> Kernels:
        return self


def _flat(kernel: object) -> Generator[object]:
    if not isinstance(kernel, (list, tuple)):
        yield kernel
        return
    if not kernel:
        raise TypeError("kernel must not be an empty list")
    for each in cast("list[object]", kernel):
        yield from _flat(each)


def _sources_of(kernel: object) -> tuple[Hashable, ...]:
    """Return the objects that report the violations of a kernel; a `KernelSpace` gets its watches here."""
    if isinstance(kernel, PolicyWatch):
        return (kernel,)
    if _is_kernel_space(kernel):
        engine, recorder = getattr(kernel, _ENGINE), getattr(kernel, _RECORDER, None)
        if recorder is not None and not isinstance(recorder, RecorderWatch):
            setattr(kernel, _RECORDER, RecorderWatch(recorder))
        if engine is None:
            return ()
        if not isinstance(engine, PolicyWatch):
            engine = PolicyWatch(engine)
            setattr(kernel, _ENGINE, engine)
        return (engine,)
    if not isinstance(kernel, type) and isinstance(kernel, PolicyKernel):
        return (_Callback(kernel),)
    raise TypeError(
        "kernel must be a KernelSpace of agent-os-kernel, a PolicyWatch, a list of them, or an object with a method "
        f"on_violation(callback), which calls the callback with refused actions; got {kernel!r}"
    )


def _is_kernel_space(kernel: object) -> bool:
    return not isinstance(kernel, type) and callable(getattr(kernel, "syscall", None)) and hasattr(kernel, _ENGINE)


class _Callback:
    """A `PolicyKernel`, equal to every other one of the same kernel."""

    def __init__(self, kernel: PolicyKernel) -> None:
        self._kernel = kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Callback) and other._kernel is self._kernel

    def __hash__(self) -> int:
        return id(self._kernel)

    def subscribe(self) -> None:
        with _lock:
            if self in _subscribed:
                return
            _subscribed.add(self)
        self._kernel.on_violation(partial(_note_of_callback, self))


_lock = threading.Lock()
_subscribed: set[_Callback] = set()
"""References to the kernels, so that no other kernel gets the same id."""


def _note_of_callback(source: _Callback, violation: object) -> None:
    watch = note(source, Violation(readable_reason(violation)))
    if watch is not None and watch.ends:
        raise watch.fault()
