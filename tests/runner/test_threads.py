"""Synchronous agents run in threads that are reused, and that end with the worker."""

from __future__ import annotations

import threading
from typing import Any

from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.utils.concurrency.threads import Threads


async def test_one_thread_runs_one_rollout_after_another_and_ends_with_the_worker(
    store: InMemoryLightningStore,
) -> None:
    threads: list[threading.Thread] = []

    @rollout
    def agent(task: str) -> float:
        threads.append(threading.current_thread())
        return 1.0

    with LitAgentRunner[Any](OtelTracer(), concurrency=2).run_context(agent=agent, store=store) as runner:
        for task in "abc":
            await runner.step(task)
        assert threads[0].is_alive()
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


async def test_a_thread_that_does_not_come_back_is_not_waited_for_and_not_used_again() -> None:
    threads, release = Threads(), threading.Event()
    stuck = threads.call(release.wait, "stuck")
    assert (await threads.call(lambda: 1, "other")).value == 1
    threads.close()
    threads.close()
    assert not stuck.done()
    release.set()
    assert (await stuck).value is True


async def test_what_a_call_raises_is_a_value() -> None:
    threads = Threads()
    done = await threads.call(lambda: {}["missing"], "x")
    assert isinstance(done.error, KeyError)
    threads.close()
