"""Two calls that draw the same rollout id: the later one draws again; neither is answered with the other's rollout."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.store.rules import enqueue as rules
from agentlightning.store.rules.tx import Backend
from agentlightning.types import EnqueueRolloutRequest

LATER = 100_000.0


@pytest.fixture
def backend(local: Any) -> Backend:
    return local._backend


def same_first(index: int) -> str:
    """The digits of two calls that agree in the first draw."""
    return f"{index % 7:012x}"


def enqueue(backend: Backend, question: str, now: float) -> str:
    requests = [EnqueueRolloutRequest(input=question)]
    [rollout], _ = backend.execute(lambda tx: rules.enqueue(tx, now, same_first, requests))
    assert rollout.input == question
    return rollout.rollout_id


def test_a_call_that_draws_the_id_of_another_rollout_draws_again(backend: Backend) -> None:
    first, second = enqueue(backend, "one", 0.0), enqueue(backend, "two", LATER)
    assert first != second
    assert enqueue(backend, "one", LATER) == first, "a repeated call is answered again"
    assert enqueue(backend, "two", LATER) == second


def test_a_rollout_started_at_once_draws_again_too(backend: Backend) -> None:
    first = enqueue(backend, "one", 0.0)
    request = EnqueueRolloutRequest(input="two")

    def start() -> str:
        (rollout, attempt), _ = backend.execute(
            lambda tx: rules.start_rollout(tx, LATER, same_first, "at-1", request, "w")
        )
        assert (rollout.input, attempt.attempt_id) == ("two", "at-1")
        return rollout.rollout_id

    assert start() == start() != first
