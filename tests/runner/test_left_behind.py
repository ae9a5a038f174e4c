"""Files and processes of a rollout do not reach the next one; the excess is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.emitter import find_final_reward
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.scope import spans_left_out

_go = threading.Event()
_gone = threading.Event()


def _late_reward() -> None:
    _go.wait(20)
    try:
        agl.emit_reward(100.0)
    except RuntimeError:
        _gone.set()


@agl.rollout
def leaves_a_thread(task: str) -> None:
    if task == "first":
        threading.Thread(target=_late_reward, daemon=True).start()
        agl.emit_reward(0.25)
    else:
        agl.emit_reward(0.5)
        _go.set()
        assert _gone.wait(20)


@agl.rollout
async def talks_too_much(task: int) -> None:
    agl.emit_reward(0.0)
    for _ in range(task):
        agl.emit_message("x")
    agl.emit_reward(1.0)


async def test_a_thread_that_a_rollout_left_behind_gives_no_reward_to_the_next(
    serve: Callable[..., Any], store: InMemoryLightningStore
) -> None:
    first, second = await serve(leaves_a_thread, "first", "second")
    rewards = [find_final_reward(list(await store.query_spans(each.rollout_id))) for each in (first, second)]
    assert rewards == [0.25, 0.5]


@pytest.mark.heavy
@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_an_attempt_with_too_many_spans_says_so_and_keeps_its_reward(
    serve: Callable[..., Any], store: InMemoryLightningStore, isolation: str
) -> None:
    (finished,) = await serve(talks_too_much, 20_500, isolation=isolation)
    assert (finished.status, finished.attempt.outcome, finished.attempt.outcome_reason) == (
        "succeeded",
        "scored",
        "spans_cut",
    )
    spans = list(await store.query_spans(finished.rollout_id))
    assert (find_final_reward(spans), len(spans), spans_left_out(spans)) == (1.0, 20_002, 501)


async def test_an_attempt_with_few_spans_has_no_mark(serve: Callable[..., Any], store: InMemoryLightningStore) -> None:
    (finished,) = await serve(talks_too_much, 3)
    assert (finished.attempt.outcome_reason, len(await store.query_spans(finished.rollout_id))) == (None, 5)
