"""Calls become token rows: examples by hand, and properties over arbitrary conversations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapter import CallRef, ModelCall, Sample, SampleReading, samples_from_calls, samples_from_triplets
from agentlightning.adapter.rows.samples import UNKNOWN_WEIGHTS
from agentlightning.types import Triplet


def call(name: str, prompt: list[int], completion: list[int], **more: Any) -> ModelCall:
    fields: dict[str, Any] = {
        "sequence_id": 0,
        "response_id": None,
        "logprobs": [-0.5 - place for place in range(len(completion))],
        "finish_reason": "stop",
        "weight_version": 1,
        "state": "ok",
        **more,
    }
    ref = CallRef("ro", fields.pop("attempt", "at"), name)
    return ModelCall(ref=ref, prompt_token_ids=prompt, completion_token_ids=completion, **fields)


def starts(reading: SampleReading) -> list[tuple[str, str]]:
    return [(start.call_id, start.cause) for start in reading.starts]


def test_turns_that_continue_each_other_become_one_row() -> None:
    reading = samples_from_calls(
        [call("a", [1, 2], [3, 4], weight_version=6), call("b", [1, 2, 3, 4, 5], [6], weight_version=7)]
    )
    assert reading.samples == [
        Sample(
            rollout_id="ro",
            attempt_id="at",
            token_ids=[1, 2, 3, 4, 5, 6],
            mask=[0, 0, 1, 1, 0, 1],
            logprobs=[0.0, 0.0, -0.5, -1.5, 0.0, -0.5],
            call_ids=["a", "b"],
            weight_versions=[6, 7],
        )
    ]
    assert starts(reading) == [("a", "first_call")]


def test_a_turn_that_adds_nothing_of_its_own_is_joined_without_a_gap() -> None:
    (row,) = samples_from_calls([call("a", [1], [2]), call("b", [1, 2], [3])]).samples
    assert (row.token_ids, row.mask) == ([1, 2, 3], [0, 1, 1])


def test_a_prompt_that_differs_in_one_token_begins_a_new_row() -> None:
    reading = samples_from_calls([call("a", [1, 2], [3, 4, 7]), call("b", [1, 2, 3, 9, 5], [6])])
    assert [row.token_ids for row in reading.samples] == [[1, 2, 3, 4, 7], [1, 2, 3, 9, 5, 6]]
    assert starts(reading) == [("a", "first_call"), ("b", "tokenisation")]
    assert reading.samples[1].mask == [0, 0, 0, 0, 0, 1]


def test_conversations_that_run_side_by_side_find_their_rows_again() -> None:
    calls = [
        call("x1", [1, 1], [2]),
        call("y1", [5, 5], [6]),
        call("x2", [1, 1, 2, 3], [4]),
        call("y2", [5, 5, 6, 7], [8]),
    ]
    assert [row.call_ids for row in samples_from_calls(calls).samples] == [["x1", "x2"], ["y1", "y2"]]


def test_the_longest_row_that_fits_is_continued() -> None:
    calls = [call("short", [1], [2]), call("long", [1, 2, 3, 4], [5]), call("next", [1, 2, 3, 4, 5, 6], [7])]
    assert [row.call_ids for row in samples_from_calls([calls[1], calls[0], calls[2]]).samples] == [
        ["long", "next"],
        ["short"],
    ]


def test_two_continuations_of_one_turn_train_that_turn_once() -> None:
    reading = samples_from_calls([call("a", [1], [2]), call("b", [1, 2, 3], [4]), call("c", [1, 2, 8], [9])])
    assert [row.call_ids for row in reading.samples] == [["a", "b"], ["c"]]
    assert reading.samples[1].mask == [0, 0, 0, 1]
    assert starts(reading) == [("a", "first_call"), ("c", "branch")]


def test_a_turn_whose_answer_came_back_in_other_tokens_is_no_branch() -> None:
    reading = samples_from_calls([call("a", [1], [2]), call("b", [1, 2, 3], [4, 5]), call("c", [1, 2, 3, 45, 6], [7])])
    assert starts(reading) == [("a", "first_call"), ("c", "tokenisation")]
    assert {cause: count for cause, count in reading.seam_counts().items() if count} == {
        "first_call": 1,
        "tokenisation": 1,
    }


@pytest.mark.parametrize("answers", [([2, 3], [2, 3]), ([2, 3], [2, 4]), ([2], [2, 3])])
def test_parallel_calls_of_one_prompt_are_all_kept(answers: tuple[list[int], list[int]]) -> None:
    reading = samples_from_calls([call("a", [1], answers[0]), call("b", [1], answers[1])])
    assert [row.token_ids for row in reading.samples] == [[1, *answers[0]], [1, *answers[1]]]
    assert starts(reading) == [("a", "first_call"), ("b", "repeated_prompt")]


def test_of_two_equal_rows_one_goes_on() -> None:
    calls = [call("a", [1], [2]), call("b", [1], [2]), call("c", [1, 2, 3], [4]), call("d", [1, 2, 5], [6])]
    assert [row.call_ids for row in samples_from_calls(calls).samples] == [["a", "c"], ["b", "d"]]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (call("x", [], [2]), "no_tokens"),
        (call("x", [1], []), "no_tokens"),
        (call("x", [1], [2], state="no_generation"), "no_generation"),
        (call("x", [1], [2], logprobs=None), "no_logprobs"),
        (call("x", [1], [2], logprobs=[-1.0, -2.0]), "bad_logprobs"),
        (call("x", [1], [2], logprobs=[float("-inf")]), "bad_logprobs"),
    ],
)
def test_a_call_that_cannot_be_trained_makes_no_row_and_is_reported(broken: ModelCall, reason: str) -> None:
    reading = samples_from_calls([broken, call("good", [1, 2, 3], [4])])
    assert [row.call_ids for row in reading.samples] == [["good"]]
    assert reading.unusable == [("x", reason)]
    assert starts(reading) == [("good", "first_call")]


def test_unknown_weights_are_said_to_be_unknown() -> None:
    (row,) = samples_from_calls([call("a", [1], [2], weight_version=None)]).samples
    assert row.weight_versions == [UNKNOWN_WEIGHTS]


def test_the_recorded_lists_are_not_changed() -> None:
    first = call("a", [1], [2])
    samples_from_calls([first, call("b", [1, 2, 3], [4])])
    assert (first.prompt_token_ids, first.completion_token_ids, first.logprobs) == ([1], [2], [-0.5])


def test_calls_of_two_attempts_are_refused() -> None:
    with pytest.raises(ValueError, match="one attempt"):
        samples_from_calls([call("a", [1], [2]), call("b", [1], [2], attempt="other")])


def test_a_call_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="more than once: a"):
        samples_from_calls([call("a", [1], [2]), call("a", [1], [2])])


def test_triplets_become_the_same_rows() -> None:
    triplets = [
        Triplet(
            prompt={"token_ids": prompt},
            response={"token_ids": completion, "token_logprobs": [-0.5] * len(completion)},
            metadata={"response_id": name, "weight_version": 3},
        )
        for name, prompt, completion in (("a", [1], [2]), ("b", [1, 2, 3], [4]))
    ]
    triplets.append(Triplet(prompt="text", response="text"))
    reading = samples_from_triplets(triplets, rollout_id="ro", attempt_id="at")
    assert [(row.token_ids, row.call_ids, row.weight_versions) for row in reading.samples] == [
        ([1, 2, 3, 4], ["a", "b"], [3, 3])
    ]
    assert reading.unusable == [("triplet-2", "no_tokens")]


# --- properties ----------------------------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> list[ModelCall]:
    """Calls of which many continue, repeat, branch off or alter an earlier one; few tokens, so that prefixes meet."""
    calls: list[ModelCall] = []
    for place in range(draw(st.integers(1, 8))):
        prompt = draw(tokens)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            whole = earlier.prompt_token_ids + earlier.completion_token_ids
            prefix = draw(st.sampled_from([whole, earlier.prompt_token_ids, whole[: len(whole) // 2]]))
            prompt = prefix + draw(st.lists(st.integers(0, 2), max_size=3))
        calls.append(call(f"c{place}", prompt or [0], draw(tokens), weight_version=place))
    return calls


def slow_rows(calls: list[ModelCall]) -> list[list[str]]:
    """The rule in five lines: compare with every row; of equal ones take the one that has been so longest."""
    rows: list[tuple[list[int], list[str]]] = []
    for one in calls:
        open_rows = [row for row in rows if one.prompt_token_ids[: len(row[0])] == row[0]]
        row = max(open_rows, key=lambda row: len(row[0]), default=None)
        row = row or ([], [])
        rows = [*(other for other in rows if other is not row), row]
        row[0][:] = one.prompt_token_ids + one.completion_token_ids
        row[1].append(one.call_id)
    return [names for _, names in rows]


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_rows_are_those_of_the_slow_rule(calls: list[ModelCall]) -> None:
    rows = [row.call_ids for row in samples_from_calls(calls).samples]
    expected = slow_rows(calls)
    assert sorted(map(len, rows)) == sorted(map(len, expected))
    tokens_of = {one.call_id: tuple(one.prompt_token_ids + one.completion_token_ids) for one in calls}
    assert sorted([tokens_of[name] for name in row] for row in rows) == sorted(
        [tokens_of[name] for name in row] for row in expected
    )


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_every_row_is_exactly_what_was_recorded(calls: list[ModelCall]) -> None:
    by_name = {one.call_id: one for one in calls}
    reading = samples_from_calls(calls)
    assert sorted(name for row in reading.samples for name in row.call_ids) == sorted(by_name)
    for row in reading.samples:
        members = [by_name[name] for name in row.call_ids]
        last = members[-1]
        assert len(row.mask) == len(row.token_ids) == len(row.logprobs)
        assert row.token_ids == last.prompt_token_ids + last.completion_token_ids
        spoken = [place for one in members for place in _places(one)]
        assert [place for place, bit in enumerate(row.mask) if bit] == spoken
        assert [row.logprobs[place] for place in spoken] == [number for one in members for number in one.logprobs or ()]
        assert all(number == 0.0 for number, bit in zip(row.logprobs, row.mask, strict=True) if not bit)
        assert row.weight_versions == [one.weight_version for one in members]


def _places(one: ModelCall) -> range:
    start = len(one.prompt_token_ids)
    return range(start, start + len(one.completion_token_ids))


@settings(max_examples=200, deadline=None)
@given(conversations())
def test_every_row_has_one_seam_and_the_first_call_is_the_first(calls: list[ModelCall]) -> None:
    reading = samples_from_calls(calls)
    assert [name for name, _ in starts(reading)] == [row.call_ids[0] for row in reading.samples]
    assert [cause for _, cause in starts(reading)].count("first_call") == 1
    assert sum(reading.seam_counts().values()) == len(reading.samples)
