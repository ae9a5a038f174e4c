"""Whatever an engine does wrong, a call ends in a named state, the agent's library says so, and nothing is invented."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest

from agentlightning.adapter.calls.calls import calls_from_triplets
from agentlightning.adapter.rows.samples import Sample, samples_from_calls
from agentlightning.semconv import CallState
from tests.stubs.model_replies import encode, logprobs_of

openai = pytest.importorskip("openai", reason="openai is not installed (it is in the extra dev)")
anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed (it is in the extra dev)")

from tests.llm_proxy.faults import CALLERS, FAULTS, Outcome, outcomes, table  # noqa: E402 -- it needs both libraries

PAGE = Path(__file__).parents[2] / "docs/deep-dive/gateway.md"
TEXT = "one two three"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    """Every call of the table, made once for all tests."""
    return asyncio.run(outcomes())


def rows_of(outcome: Outcome) -> list[Sample]:
    """Return what would have been trained, by either adapter."""
    ids = {"rollout_id": outcome.spans[0].rollout_id, "attempt_id": outcome.spans[0].attempt_id}
    readings = [samples_from_calls(calls_from_triplets(triplets, **ids)) for triplets in outcome.triplets()]
    assert len(readings[0].samples) == len(readings[1].samples)
    return readings[0].samples


def test_every_call_is_recorded_once_in_a_named_state(found: list[Outcome]) -> None:
    tried = {(outcome.fault, outcome.caller, outcome.streamed) for outcome in found}
    assert len(tried) == len(found) == sum(len(CALLERS) * (1 + fault.plain) for fault in FAULTS)
    assert [o for o in found if len(o.states) != 1 or o.states[0] not in get_args(CallState)] == []


def test_the_agent_gets_the_whole_reply_or_an_error_of_its_library(found: list[Outcome]) -> None:
    usual = (openai.APIError, anthropic.APIError)
    strange = [o for o in found if o.raised is not None and not isinstance(o.raised, usual)]
    assert [(o.fault, o.caller, o.streamed, repr(o.raised)) for o in strange] == []
    assert {o.text for o in found if o.raised is None} == {TEXT}


def test_a_call_is_recorded_as_answered_exactly_if_the_agent_has_the_answer(found: list[Outcome]) -> None:
    answered = {(o.fault, o.caller, o.streamed) for o in found if o.states[0] in ("ok", "no_tokens")}
    assert answered == {(o.fault, o.caller, o.streamed) for o in found if o.raised is None}


def test_only_calls_with_every_token_become_rows_and_the_rows_are_the_engines(found: list[Outcome]) -> None:
    ids = encode(TEXT)
    for outcome in found:
        rows = rows_of(outcome)
        assert len(rows) == (outcome.states[0] == "ok"), (outcome.fault, outcome.caller, outcome.streamed)
        for row in rows:
            assert row.token_ids[-len(ids) :] == ids
            assert row.logprobs[-len(ids) :] == logprobs_of(ids)
            assert sum(row.mask) == len(ids)


def test_the_page_of_the_gateway_shows_this_table(found: list[Outcome]) -> None:
    assert table(found) in PAGE.read_text(), "put the output of `python -m tests.llm_proxy.faults` into the page"
