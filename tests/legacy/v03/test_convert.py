"""Single documents of v0.3 as values of this package: numbers, times and ids of BSON, limits, unknown fields."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from agentlightning.legacy.v03.convert import Converter, NotCarriedOver, plain_json
from agentlightning.types import Attempt, CustomResource, ResourcesUpdate, Rollout, Span
from tests.legacy.v03.older import older


def test_values_of_bson_and_of_its_extended_json_become_json() -> None:
    from bson import Decimal128, Int64, ObjectId

    moment = datetime(2025, 1, 2, tzinfo=UTC)
    id_ = ObjectId("0" * 24)
    values = {"a": Int64(5), "b": Decimal128("1.5"), "c": id_, "d": moment, "e": b"\x00", "f": (1, None), 7: True}
    assert plain_json(values) == {
        **{"a": 5, "b": "1.5", "c": "0" * 24, "d": "2025-01-02T00:00:00+00:00", "e": "AA==", "f": [1, None], "7": True},
    }
    extended = {
        **{"a": {"$numberLong": "5"}, "b": {"$numberDouble": "Infinity"}, "c": {"$oid": "x"}, "d": {"$numberInt": "3"}},
        **{"e": {"$date": {"$numberLong": "7"}}, "f": {"$date": "2025"}, "g": {"$own": 1}},
    }
    assert plain_json(extended) == {
        **{"a": 5, "b": math.inf, "c": "x", "d": 3, "e": 7, "f": "2025", "g": {"$own": 1}},
    }


def test_limits_that_are_no_limits_become_none() -> None:
    document = {**older()["rollouts"][0], "config": {"timeout_seconds": math.inf, "max_attempts": 3}}
    rollout = Converter().convert("rollouts", document).value
    assert isinstance(rollout, Rollout)
    assert (rollout.config.timeout_seconds, rollout.config.max_attempts) == (None, 3)


def test_an_attempt_that_was_given_up_has_an_end() -> None:
    document = {**older()["attempts"][0], "status": "timeout", "end_time": None, "last_heartbeat_time": 12.5}
    attempt = Converter().convert("attempts", document).value
    assert isinstance(attempt, Attempt)
    assert (attempt.status, attempt.end_time, attempt.outcome) == ("timeout", 12.5, None)


def test_a_span_keeps_what_it_has_and_loses_attributes_without_a_value() -> None:
    document = older()["spans"][0]
    document["attributes"]["score"] = None
    span, _, change = Converter().convert("spans", document)
    assert isinstance(span, Span)
    assert span.attributes == {"gen_ai.request.model": "m", "n": [1, 2]}
    assert (span.model_extra or {})["a_vendors_own"] == "kept"
    assert change == "spans: attributes without a value removed"


def test_resources_of_a_kind_of_its_own_are_kept() -> None:
    document = older()["resources"][0]
    document["resources"]["mine"] = {"resource_type": "my_own", "size": 3}
    update = Converter(run_id="r").convert("resources", document).value
    assert isinstance(update, ResourcesUpdate)
    assert update.run_id == "r"
    mine = update.resources["mine"]
    assert isinstance(mine, CustomResource)
    assert (mine.kind, mine.values) == ("my_own", {"size": 3})


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("rollouts", {"start_time": "soon"}, "start_time"),
        ("rollouts", {"mode": "play"}, "mode"),
        ("rollouts", {"config": ["max_attempts"]}, "config is a list"),
        ("attempts", {"status": "lost"}, "status"),
        ("attempts", {"sequence_id": None}, "sequence_id"),
        ("spans", {"attributes": {"a": {"b": None}}}, "attributes"),
        ("spans", {"sequence_id": -1}, "0 or more"),
        ("resources", {"resources": [1]}, "resources"),
        ("resources", {"resources": {"llm": 5}}, "llm"),
    ],
)
def test_what_means_no_value_here_says_what_was_wrong(kind: Any, change: dict[str, Any], says: str) -> None:
    with pytest.raises(NotCarriedOver, match=says) as caught:
        Converter().convert(kind, {**older()[kind][0], **change})
    assert caught.value.reason == "unreadable"
    assert str(caught.value)
