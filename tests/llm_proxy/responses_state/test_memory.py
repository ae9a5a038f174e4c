"""The bounds of what is remembered, under any sequence of responses, whoever makes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.llm_proxy.responses_state.memory import AttemptName, Item, ResponseMemory, StoredResponse

A, B = ("ro-1", "at-1"), ("ro-2", "at-1")


def response(attempt: AttemptName, name: str, *said: str) -> StoredResponse:
    items = tuple(Item(f"msg_{text[:20]}", text.encode()) for text in said)
    return StoredResponse(attempt, name, b"{}", items[:-1], items[-1:])


def memory(count: int = 1024, own: int = 2**26, total: int = 2**28) -> ResponseMemory:
    limits = GatewayLimits(remembered_responses=count, remembered_bytes_per_attempt=own, remembered_bytes=total)
    return ResponseMemory(limits)


def test_a_conversation_that_is_sent_again_with_each_call_is_kept_once() -> None:
    remembered, said = memory(), [f"{number} {'x' * 10_000}" for number in range(100)]
    for number in range(1, 100):
        remembered.add(response(A, f"r{number}", *said[: number + 1]))
    assert remembered.size < 2 * sum(map(len, said))


def test_the_response_that_was_not_used_for_longest_is_forgotten_first() -> None:
    remembered = memory(count=2)
    remembered.add(response(A, "r1", "one"))
    remembered.add(response(A, "r2", "two"))
    assert remembered.response(A, "r1") is not None
    remembered.add(response(A, "r3", "three"))
    assert [name for name in ("r1", "r2", "r3") if remembered.response(A, name)] == ["r1", "r3"]
    assert remembered.item(A, "msg_two") is None


def test_the_attempt_that_was_silent_for_longest_is_forgotten_first() -> None:
    remembered = memory(total=30_000)
    for attempt, name, said in ((A, "r", "a" * 12_000), (B, "r", "b" * 6000), (B, "s", "c" * 6000)):
        remembered.add(response(attempt, name, said))
    assert remembered.response(A, "r") is not None
    remembered.add(response(("ro-3", "at-1"), "r", "d" * 14_000))
    assert remembered.response(A, "r") is not None
    assert remembered.response(B, "r") is remembered.response(B, "s") is None


def test_a_response_beyond_the_bound_is_not_remembered_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    remembered = memory(own=1000)
    remembered.add(response(A, "r", "a" * 2000))
    assert remembered.response(A, "r") is None
    assert remembered.size == 0
    assert "larger than what is remembered" in caplog.text


STEPS = st.tuples(st.sampled_from([A, B]), st.integers(0, 5), st.lists(st.integers(0, 8), min_size=1, max_size=5))


@given(st.lists(st.one_of(STEPS, STEPS.map(lambda step: step[:2])), max_size=40))
def test_sizes_add_up_and_stay_within_the_bounds(steps: list[tuple[AttemptName, int, list[int]]]) -> None:
    remembered, number = memory(count=4, own=6000, total=9000), 0
    for attempt, which, *said in steps:
        if said:
            number += 1
            texts = [f"{place} {'x' * 100 * place}" for place in said[0]]
            remembered.add(response(attempt, f"r{number}", *texts))
            assert remembered.response(attempt, f"r{number}") is not None
        else:
            remembered.delete(attempt, f"r{which}")
        assert remembered.size <= 9000
    for attempt in (A, B):
        for name in range(number + 1):
            remembered.delete(attempt, f"r{name}")
    assert remembered.size == 0
    assert all(remembered.item(attempt, f"msg_{place} ") is None for attempt in (A, B) for place in range(9))
