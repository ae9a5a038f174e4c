"""A process that plays attempts for a runner: it holds a copy of the agent, and its store is the runner's.

`AgentProcess` is the runner's end: started by `spawn`, so that nothing is copied but the agent and the tracer, in a
process group of its own, which is killed as a whole. What runs in it is in `agent_process_main.py`, and what the two
say to each other in `pipe.py`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable
from typing import Any

from agentlightning.litagent.groups import ProcessGroup
from agentlightning.runner.agent_process_main import main
from agentlightning.runner.outcome import AttemptFault
from agentlightning.runner.pipe import READY, Answer, Ask, Order, Outcome

START_SECONDS = 120.0
"""How long a process may take to import what the agent needs."""
END_SECONDS = 2.0


class AgentProcessDied(AttemptFault):
    """The process in which the agent ran ended by itself: it crashed, was killed, or could not load the agent."""


class AgentTraceback(Exception):
    """The traceback of an exception out of another process, as the cause of its copy here."""


class AgentProcess:
    """One process. Serves one attempt at a time; `play` blocks, the rest may be called meanwhile."""

    def __init__(self, parts: bytes, worker_id: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, parts, worker_id), name=f"agent-of-{worker_id}")
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._group = ProcessGroup(self._process.pid)
        self._ready = False

    def play(self, order: Order, ask: Callable[[Ask], Answer]) -> Any:
        """Have an attempt played, when it is ready, and return what the agent gave; `ask` calls the store for it.

        Raises:
            AgentProcessDied: the process ended meanwhile.
            BaseException: whatever the agent raised.
        """
        try:
            self._pipe.send(order)
            while not isinstance(message := self._pipe.recv(), Outcome):
                self._pipe.send(ask(message))
        except (EOFError, OSError) as error:
            raise AgentProcessDied(f"The process of the agent {self._death()} during the attempt") from error
        if message.error is not None:
            raise message.error from AgentTraceback(f'\n"""\n{message.traceback}"""')
        return message.value

    def interrupt(self) -> None:
        """Ask for the end of the attempt: what was recorded is still told, if the agent lets it."""
        if self._process.pid is not None and self._process.exitcode is None:
            self._group.signal(signal.SIGTERM)

    def is_alive(self) -> bool:
        """True while it can play."""
        return self._process.exitcode is None

    def kill(self) -> None:
        """Kill the process with everything that it has started; a `play` under way returns. May be called twice."""
        self._process.kill()  # it may not lead its group yet
        self._group.close()
        self._process.join(END_SECONDS)

    def let_go(self) -> None:
        """Close the pipe, at whose end an idle process ends by itself; when no `play` is under way."""
        self._pipe.close()

    def close(self) -> None:
        """Let it go, and kill it if it does not end soon. May be called twice."""
        self.let_go()
        self._process.join(END_SECONDS)
        self.kill()

    def wait_until_ready(self) -> None:
        """Wait until the agent is loaded; at once after the first time.

        Raises:
            AgentProcessDied: it was not within `START_SECONDS`, or cannot be.
        """
        if self._ready:
            return
        if not self._pipe.poll(START_SECONDS):
            raise AgentProcessDied(f"The process of the agent was not ready within {START_SECONDS:g} s")
        try:
            self._ready = self._pipe.recv() == READY
        except (EOFError, OSError) as error:
            raise AgentProcessDied(
                f"The process of the agent {self._death()} before it was ready; can it import the agent? Its error "
                "output tells. A script needs its `if __name__ == '__main__':`."
            ) from error

    def _death(self) -> str:
        self._process.join(END_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0 and -code in set(signal.Signals):
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def pickled_parts(agent: Any, runner: Any) -> bytes:
    """Return an agent, and a runner that has not been initialised, as they travel.

    Raises:
        TypeError: one of them cannot; says which, and the ways out.
    """
    for name, part in (("agent", agent), ("tracer", runner)):
        try:
            pickle.dumps(part)
        except Exception as error:  # any class may refuse to be pickled, with any exception
            raise TypeError(
                f"isolation='process' sends the {name} to a process of its own, and {part!r} cannot be pickled: "
                f"{type(error).__name__}: {error}. Define it at the top of a module, make what it holds in its methods,"
                " or leave isolation='thread'."
            ) from error
    return pickle.dumps((agent, runner))
