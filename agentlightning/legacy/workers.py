"""Workers of the v0.1 protocol: one in this process, or several in their own processes.

`kill_recorded` ends only the workers that this process has started: processes are not looked up by name.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from agentlightning.adapter import TraceAdapter
from agentlightning.errors import RunnerDiedError
from agentlightning.legacy.client import AgentLightningClient
from agentlightning.legacy.runner import LegacyAgentRunner
from agentlightning.litagent.litagent import LitAgent
from agentlightning.tracer.base import Tracer

logger = logging.getLogger(__name__)

TERMINATE_SECONDS = 10.0
"""Seconds between SIGTERM and the kill of a worker."""
_recorded: list[BaseProcess] = []
if hasattr(os, "register_at_fork"):  # a forked process did not start them, and must not end them
    os.register_at_fork(after_in_child=_recorded.clear)


def serve(
    agent: LitAgent[Any],
    client: AgentLightningClient,
    tracer: Tracer,
    exporter: TraceAdapter[Any],
    max_tasks: int | None = None,
    worker_id: int = 0,
) -> int:
    """Run tasks of the client's server in this process until `max_tasks` are done, and return their number."""
    with tracer.lifespan():
        return LegacyAgentRunner(agent, client, tracer, exporter, worker_id, max_tasks).iter()


def serve_in_processes(count: int, agent: LitAgent[Any], *parts: Any) -> None:
    """Run `serve` in `count` processes until each has done its tasks; they end with this process.

    Raises:
        RunnerDiedError: a process ended otherwise; the others were ended as well.
    """
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers: list[BaseProcess] = []
    try:
        for index in range(count):
            name = f"AgentLightning-Worker-{index}"
            worker = context.Process(target=serve, args=(agent, *parts, index), name=name, daemon=True)
            worker.start()
            workers.append(worker)
            _recorded.append(worker)
        alive = list(workers)
        while alive:
            wait([worker.sentinel for worker in alive])
            for worker in [worker for worker in alive if not worker.is_alive()]:
                alive.remove(worker)
                if worker.exitcode != 0:
                    raise RunnerDiedError(f"{worker.name} ended with exit code {worker.exitcode}; see its output")
    finally:
        kill_recorded()


def kill_recorded() -> int:
    """End the live workers that this process has started, and return their number."""
    alive = [worker for worker in _recorded if worker.is_alive()]
    for worker in alive:
        worker.terminate()
    for worker in alive:
        worker.join(TERMINATE_SECONDS)
        if worker.is_alive():
            logger.warning("%s (pid %s) did not end within %g s; killed", worker.name, worker.pid, TERMINATE_SECONDS)
            worker.kill()
            worker.join(TERMINATE_SECONDS)
    _recorded.clear()
    return len(alive)
