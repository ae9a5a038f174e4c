"""What becomes of every model call: finished rollouts are read, and the books of a step add up or say what does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToTripletBase, model_calls
from agentlightning.adapter.spans.tokens import FAILED_STATES
from agentlightning.errors import LedgerError
from agentlightning.training.ledger import (
    ExclusionReason,
    Ledger,
    RolloutRecord,
    Trained,
    attempt_verdict,
    read_rollout,
)
from agentlightning.types import Attempt, Rollout, Span, Triplet
from tests.adapter.span_maker import chat, gateway_call, reward, span, spoken_call, with_attributes

LATE = {"agentlightning.stale": True}


def rollout(**more: Any) -> Rollout:
    return Rollout(rollout_id="ro", input="task", start_time=0.0, **{"mode": "train", "status": "succeeded", **more})


def attempt(id: str = "at", number: int = 1, **more: Any) -> Attempt:
    fields = {"status": "succeeded", "outcome": "scored", **more}
    return Attempt(rollout_id="ro", attempt_id=id, sequence_id=number, start_time=0.0, **fields)


def two_turns(**more: Any) -> list[Span]:
    return [*gateway_call("c1", 1, [1, 2], [3], **more), *gateway_call("c2", 2, [1, 2, 3, 4], [5, 6], **more)]


def final(value: float = 1.0, number: int = 9, **more: Any) -> Span:
    return reward(f"r{number}", None, 90.0 + number, value, sequence_id=number, **more)


def reasons(record: RolloutRecord) -> dict[str, str]:
    return {ref.call_id: reason for ref, reason in record.exclusions.items()}


def closed(record: RolloutRecord) -> dict[str, int]:
    """Train every row of a record and return the counts of the closed books."""
    ledger = Ledger(0)
    ledger.add(record)
    for row, sample in enumerate(record.samples):
        ledger.train(sample, row=row, advantage=1.0)
    summary = ledger.close()
    assert summary.captured == summary.trained + sum(summary.excluded.values())
    return {"captured": summary.captured, "trained": summary.trained, **summary.excluded}


# --- one rollout ---------------------------------------------------------------------------------------------------


def test_a_scored_rollout_gives_its_reward_and_its_rows() -> None:
    record = read_rollout(rollout(), [attempt()], [final(0.5, 10), *two_turns(), final(0.75, 9)])
    assert (record.reward, record.outcome, record.verdict) == (0.5, "scored", None), "the last reward counts"
    (row,) = record.samples
    assert (row.token_ids, row.mask) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1])
    assert (row.call_ids, row.weight_versions) == (["c1", "c2"], [7, 7])
    assert record.exclusions == {}
    assert record.seams["first_call"] == 1


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (attempt(outcome="policy_fault", status="failed"), None),
        (attempt(outcome="infrastructure_fault", status="failed"), "infrastructure_fault"),
        (attempt(outcome="cancelled", status="failed"), "cancelled"),
        (attempt(outcome="unscored"), "no_reward"),
        (attempt(outcome="infrastructure_fault", outcome_reason="budget", status="failed"), "budget"),
        (attempt(outcome="infrastructure_fault", outcome_reason="lease_expired"), "infrastructure_fault"),
        (attempt(outcome=None, status="running"), "unfinished"),
        (attempt(outcome=None, status="timeout"), "cancelled"),
        (attempt(outcome=None, status="unresponsive"), "infrastructure_fault"),
        (attempt(outcome=None, status="succeeded"), None),
    ],
)
def test_the_outcome_of_the_attempt_decides(ended: Attempt, reason: ExclusionReason | None) -> None:
    assert attempt_verdict(ended) == reason
    record = read_rollout(rollout(), [ended], [*two_turns(), final()])
    assert record.verdict == reason
    expected = {"trained": 2} if reason is None else {"trained": 0, reason: 2}
    assert closed(record) == {"captured": 2, **expected}


@pytest.mark.parametrize("spans", [[], [final(float("nan"))], [final(1.0, 8), final(float("inf"), 9)]])
def test_a_missing_reward_is_never_filled_in(spans: list[Span]) -> None:
    record = read_rollout(rollout(), [attempt()], [*two_turns(), *spans])
    assert (record.reward, record.samples) == (None, [])
    assert closed(record) == {"captured": 2, "trained": 0, "no_reward": 2}


def test_only_the_latest_attempt_counts_and_its_reward_once() -> None:
    first = [*gateway_call("old", 1, [1], [2], attempt_id="at-1"), final(0.0, 2, attempt_id="at-1")]
    late = gateway_call("late", 5, [1], [2], attempt_id="at-1", **LATE)
    second = [*gateway_call("new", 3, [1], [2], attempt_id="at-2"), final(1.0, 4, attempt_id="at-2")]
    second += gateway_call("after", 7, [1], [2], attempt_id="at-2", **LATE)
    late_reward = with_attributes(final(0.0, 6, attempt_id="at-1"), LATE)
    attempts = [attempt("at-2", 2), attempt("at-1", 1, outcome="infrastructure_fault", status="unresponsive")]
    record = read_rollout(rollout(), attempts, [*first, *second, *late, late_reward])
    assert (record.reward, record.attempt_id) == (1.0, "at-2")
    assert [row.call_ids for row in record.samples] == [["new"]]
    assert reasons(record) == {"old": "superseded_attempt", "late": "stale", "after": "stale"}


@pytest.mark.parametrize("state", sorted(FAILED_STATES))
def test_a_call_without_an_answer_is_excluded_by_how_it_ended(state: Any) -> None:
    failed = gateway_call("x", 0, [1], [2], state=state)  # its turn is answered after it
    record = read_rollout(rollout(), [attempt()], [*failed, *two_turns(), final()])
    assert reasons(record) == {"x": state}
    assert len(record.samples) == 1
    assert state in get_args(ExclusionReason)


@pytest.mark.parametrize("state", ["refused", "upstream_error"])
def test_a_scored_rollout_with_a_call_that_was_refused_for_good_trains_nothing_unless_asked(state: Any) -> None:
    spans = [*two_turns(), *gateway_call("x", 3, [], [], state=state), final(0.0)]
    record = read_rollout(rollout(), [attempt()], spans)
    assert (record.verdict, record.reward) == ("refused_call", 0.0)
    assert reasons(record) == {"c1": "refused_call", "c2": "refused_call", "x": state}
    assert closed(record) == {"captured": 3, "trained": 0, "refused_call": 2, state: 1}
    assert closed(read_rollout(rollout(), [attempt()], spans, train_refused=True)) == {
        "captured": 3, "trained": 2, state: 1,
    }  # fmt: skip


def test_a_fault_of_the_policy_is_trained_also_after_a_refused_call() -> None:
    spans = [*two_turns(), *gateway_call("x", 3, [], [], state="refused"), final(-1.0)]
    record = read_rollout(rollout(), [attempt(outcome="policy_fault", status="failed")], spans)
    assert (record.verdict, len(record.samples)) == (None, 1)


def test_a_refused_call_of_an_older_attempt_or_a_late_one_does_not_count() -> None:
    older = gateway_call("old", 1, [], [], state="refused", attempt_id="at-0")
    late = gateway_call("late", 8, [], [], state="refused", **LATE)
    attempts = [attempt("at-0", 1, outcome="infrastructure_fault", status="failed"), attempt("at", 2)]
    record = read_rollout(rollout(), attempts, [*older, *two_turns(), *late, final()])
    assert (record.verdict, len(record.samples)) == (None, 1)


def test_a_reward_without_any_call_of_the_policy_is_no_call() -> None:
    record = read_rollout(rollout(), [attempt()], [final()])
    assert (record.verdict, record.reward, record.samples, record.calls) == ("no_call", 1.0, [], [])
    judge = gateway_call("judge", 1, [1], [2], **{"agentlightning.call.policy_kind": "frozen"})
    record = read_rollout(rollout(), [attempt()], [*judge, final()])
    assert (record.verdict, reasons(record)) == ("no_call", {"judge": "not_selected"})
    assert closed(record) == {"captured": 1, "trained": 0, "not_selected": 1}
    assert read_rollout(rollout(), [attempt(outcome="unscored")], []).verdict == "no_reward"


class OfEveryPolicy(TraceToTripletBase):
    """An adapter of a user that makes a triplet of each call, whosever it is."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        return [
            Triplet(
                prompt={"token_ids": call.prompt_token_ids},
                response={"token_ids": call.completion_token_ids},
                reward=None,
                metadata={"call_id": call.call_id},
            )
            for call in model_calls(source)
        ]


def test_what_an_adapter_of_the_user_selects_is_trained_though_it_is_of_another_policy() -> None:
    judge = gateway_call("judge", 1, [1], [2], **{"agentlightning.call.policy_kind": "frozen"})
    record = read_rollout(rollout(), [attempt()], [*judge, final()], OfEveryPolicy())
    assert (record.verdict, record.exclusions) == (None, {})
    assert closed(record) == {"captured": 1, "trained": 1}


def test_an_attempt_of_helper_calls_only_gives_no_triplet_and_is_explained() -> None:
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        assert adapter.adapt(title(1)) == []
        assert [each.reason for each in adapter.explain(title(1)).calls] == ["helper"]


def title(number: int) -> list[Span]:
    """The call with which Claude Code finds a title for the terminal."""
    instruction = "... If it does, extract a 2-3 word title that captures the new topic. Format your response as a JSON"
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": "fix the bug"}]
    return spoken_call(f"title-{number}", number, [1, 2, 3, 9], [8], messages)


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
def test_a_known_helper_call_changes_neither_the_row_nor_where_the_reward_goes(adapter: TraceToTripletBase) -> None:
    first, second = gateway_call("c1", 1, [1, 2], [3]), gateway_call("c2", 3, [1, 2, 3, 4], [5, 6])
    spans = [*first, *title(2), *second, *title(4), final(1.0)]
    record = read_rollout(rollout(), [attempt()], spans, adapter)
    assert reasons(record) == {"title-2": "helper", "title-4": "helper"}
    assert [row.call_ids for row in record.samples] == [["c1", "c2"]]
    assert [(t.metadata["call_id"], t.reward) for t in adapter.adapt(spans)] == [("c1", None), ("c2", 1.0)]
    assert [each.reason for each in adapter.explain(spans).calls] == [None, "helper", None, "helper"]
    assert closed(record) == {"captured": 4, "trained": 2, "helper": 2}


def test_a_rollout_of_helper_calls_only_has_no_call_and_a_refused_helper_is_none_of_its_matter() -> None:
    assert read_rollout(rollout(), [attempt()], [*title(1), final()]).verdict == "no_call"
    refused = title(3)
    refused[1] = with_attributes(refused[1], {"agentlightning.call.state": "refused"})
    record = read_rollout(rollout(), [attempt()], [*two_turns(), *refused, final()])
    assert (record.verdict, reasons(record)) == (None, {"title-3": "helper"})


@pytest.mark.parametrize("kind", [TracerTraceToTriplet, LlmProxyTraceToTriplet])
@pytest.mark.parametrize("rule", [r"system: You name sessions", lambda call: len(call.completion_token_ids) == 4])
def test_a_rule_of_the_user_names_helper_calls(kind: Any, rule: Any) -> None:
    messages = [{"role": "system", "content": "You name sessions."}, {"role": "user", "content": "hi"}]
    spans = [*two_turns(), *spoken_call("own", 3, [1], [2, 3, 4, 5], messages), final()]
    record = read_rollout(rollout(), [attempt()], spans, kind(ignore=rule))
    assert reasons(record) == {"own": "helper"}
    assert [t.reward for t in kind(ignore=rule).adapt(spans)] == [None, 1.0]
    assert reasons(read_rollout(rollout(), [attempt()], spans, kind())) == {}


def test_a_call_refused_for_its_budget_says_so() -> None:
    ended = attempt(outcome="infrastructure_fault", outcome_reason="budget", status="failed")
    record = read_rollout(rollout(), [ended], [*two_turns(), *gateway_call("x", 3, [], [], state="refused")])
    assert reasons(record) == {"c1": "budget", "c2": "budget", "x": "budget"}


def test_calls_that_cannot_be_trained_say_why() -> None:
    spans = [
        *gateway_call("words", 1, [], [], state="no_tokens"),
        *gateway_call("short", 2, [1], [2, 3], logprobs=[-0.5]),
        chat("seen", None, 3, 4, [1], [2], sequence_id=3),
        *gateway_call("good", 4, [1], [2]),
        final(),
    ]
    record = read_rollout(rollout(), [attempt()], spans)
    assert reasons(record) == {"words": "no_tokens", "short": "bad_logprobs", "seen": "no_logprobs"}
    assert [row.call_ids for row in record.samples] == [["good"]]


def test_a_call_whose_prompt_shows_an_image_is_in_no_row() -> None:
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:image/png,x"}}]
    image = [{"role": "user", "content": json.dumps(parts)}]
    words = [{"role": "user", "content": "what is the field image_url for?"}]
    spans = [*spoken_call("a", 1, [1], [2], image), *spoken_call("b", 2, [1, 2, 3], [4], words), final()]
    record = read_rollout(rollout(), [attempt()], spans)
    assert reasons(record) == {"a": "image_input"}
    assert [row.call_ids for row in record.samples] == [["b"]]


def test_a_call_that_tracer_and_gateway_saw_is_one_call() -> None:
    seen = [chat("s1", None, 1, 2, response_id="c1", sequence_id=7), chat("s2", None, 2, 3, response_id="c2")]
    record = read_rollout(rollout(), [attempt()], [*two_turns(), *seen, final()])
    assert closed(record) == {"captured": 2, "trained": 2}


def test_tokens_that_only_the_tracer_saw_complete_the_gateways_record() -> None:
    record = gateway_call("c1", 1, [], [], state="no_tokens", response_id="x")
    seen = with_attributes(
        chat("s", None, 1, 2, [1], [2], response_id="x"), {"logprobs.content": '[{"logprob": -0.5}]'}
    )
    assert closed(read_rollout(rollout(), [attempt()], [*record, seen, final()])) == {"captured": 1, "trained": 1}


def test_calls_that_the_adapter_leaves_out_are_not_selected() -> None:
    grading = with_attributes(
        span("O", "agentlightning.operation", None, 50, 60),
        {"agentlightning.operation.name": "agentlightning.reward"},
    )
    graded = chat("g", "O", 51, 52, response_id="call-g")
    spans = [*two_turns(), *gateway_call("grader", 3, [7], [8], response_id="call-g"), grading, graded, final()]
    record = read_rollout(rollout(), [attempt()], spans)
    assert reasons(record) == {"grader": "not_selected"}
    assert reasons(read_rollout(rollout(), [attempt()], spans, TracerTraceToTriplet(agent_match="planner"))) == {
        "c1": "not_selected",
        "c2": "not_selected",
        "grader": "not_selected",
    }


def test_a_call_that_may_be_of_several_agents_is_no_named_agents_call_and_the_advice_is_given_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agents = [
        with_attributes(span(name, f"invoke_agent {name}", None, 0, 40), {"gen_ai.agent.name": name})
        for name in ("planner", "critic")
    ]
    spans = [*two_turns(), *agents, final()]
    assert reasons(read_rollout(rollout(), [attempt()], spans)) == {}
    adapter = TracerTraceToTriplet(agent_match="planner")
    for _ in range(3):
        record = read_rollout(rollout(), [attempt()], spans, adapter)
        assert reasons(record) == {"c1": "unknown_agent", "c2": "unknown_agent"}
        assert "as_resource(role=" in str(record.explain())
    assert [each.getMessage().count("as_resource(role=") for each in caplog.records] == [1]


def test_evaluation_rollouts_train_nothing_and_keep_their_reward() -> None:
    record = read_rollout(rollout(mode="val"), [attempt()], [*two_turns(), final(0.5)])
    assert record.reward == 0.5
    assert closed(record) == {"captured": 2, "trained": 0, "not_a_train_rollout": 2}


def test_a_cancelled_rollout_that_nobody_claimed_or_whose_attempt_never_ended_is_cancelled() -> None:
    record = read_rollout(rollout(status="cancelled"), [], [])
    assert (record.attempt_id, record.reward, record.verdict, record.calls) == (None, None, "cancelled", [])
    running = attempt(outcome=None, status="running")
    record = read_rollout(rollout(status="cancelled"), [running], two_turns())
    assert set(reasons(record).values()) == {"cancelled"}


class Custom(TraceToTripletBase):
    """An adapter of a user: the gateway's triplets, changed by a function."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def adapt(self, source: Any, /) -> list[Triplet]:
        return [self.change(triplet) for triplet in LlmProxyTraceToTriplet()(source)][:1]


def test_an_adapter_of_a_user_selects() -> None:
    record = read_rollout(rollout(), [attempt()], [*two_turns(), final()], Custom(lambda triplet: triplet))
    assert [row.call_ids for row in record.samples] == [["c1"]]
    assert reasons(record) == {"c2": "not_selected"}


def test_an_adapter_that_changes_tokens_or_gives_triplets_without_a_name_is_refused() -> None:
    cut = Custom(lambda triplet: triplet.model_copy(update={"response": {"token_ids": [99]}}))
    with pytest.raises(LedgerError, match="Custom changed the tokens of call c1"):
        read_rollout(rollout(), [attempt()], [*two_turns(), final()], cut)
    nameless = Custom(lambda triplet: triplet.model_copy(update={"metadata": {}}))
    with pytest.raises(LedgerError, match=r"metadata\['call_id'\]"):
        read_rollout(rollout(), [attempt()], [*two_turns(), final()], nameless)


# --- the books of a step -------------------------------------------------------------------------------------------


def captured() -> tuple[Ledger, RolloutRecord]:
    ledger = Ledger(3)
    record = read_rollout(rollout(), [attempt()], [*two_turns(), *gateway_call("c3", 3, [9], [8]), final()])
    ledger.add(record)
    return ledger, record


def test_trained_and_excluded_calls_add_up() -> None:
    ledger, record = captured()
    ledger.train(record.samples[0], row=4, advantage=-0.5)
    ledger.exclude(record.samples[1], "over_length")
    summary = ledger.close()
    assert (summary.step, summary.captured, summary.trained, summary.trained_tokens) == (3, 3, 2, 3)
    assert summary.excluded == {"over_length": 1}
    ends = {ref.call_id: end for ref, end in ledger.endings().items()}
    assert ends == {"c1": Trained(4, 1, -0.5, 7), "c2": Trained(4, 2, -0.5, 7), "c3": "over_length"}


def test_a_call_without_an_end_is_named() -> None:
    ledger, record = captured()
    ledger.train(record.samples[0], row=0, advantage=1.0)
    with pytest.raises(LedgerError, match=r"step 3: 1 of 3 .* call c3 \(rollout ro, attempt at\) is neither"):
        ledger.close()


def test_a_call_with_several_ends_is_named() -> None:
    ledger, record = captured()
    for row, sample in enumerate([*record.samples, record.samples[1]]):
        ledger.train(sample, row=row, advantage=1.0)
    ledger.exclude(record.samples[1], "equal_rewards")
    ends = "trained in row 1 and trained in row 2 and excluded as equal_rewards"
    with pytest.raises(LedgerError, match=rf"call c3 .* is {ends}"):
        ledger.close()


def test_a_call_that_was_never_captured_is_named() -> None:
    _, record = captured()
    ledger = Ledger(0)
    ledger.exclude(record.samples[1], "no_group")
    with pytest.raises(LedgerError, match=r"call c3 .* is excluded as no_group and was never captured"):
        ledger.close()


def test_a_rollout_that_is_captured_twice_and_a_row_that_lost_tokens_are_refused() -> None:
    ledger, record = captured()
    with pytest.raises(LedgerError, match="captured twice"):
        ledger.add(record)
    sample = record.samples[0]
    sample.mask[2] = 0
    with pytest.raises(LedgerError, match="row 0 of rollout ro trains 2 tokens, its 2 model calls have 3"):
        ledger.train(sample, row=0, advantage=1.0)


def test_many_wrong_calls_are_counted_and_some_named_also_those_of_one_name_in_two_rollouts() -> None:
    spans = [made for n in range(25) for made in gateway_call(f"c{n}", n, [1], [2])]
    ledger = Ledger(0)
    ledger.capture(model_calls([*spans, *(made.model_copy(update={"rollout_id": "ro-2"}) for made in spans)]))
    with pytest.raises(LedgerError, match=r"50 of 50 .* and 42 more"):
        ledger.close()


OUTCOMES = st.sampled_from(["scored", "policy_fault", "infrastructure_fault", "cancelled", "unscored", None])
STATES = st.sampled_from(["ok", "ok", "ok", "no_tokens", "upstream_error", "refused", "client_left"])


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rollout, list[Attempt], list[Span]]:
    """A rollout with up to three attempts whose calls end in any way, late or in time."""
    attempts: list[Attempt] = []
    spans: list[Span] = []
    number = 0
    for place in range(1, draw(st.integers(1, 3)) + 1):
        name = f"at-{place}"
        attempts.append(attempt(name, place, outcome=draw(OUTCOMES)))
        for _ in range(draw(st.integers(0, 4))):
            number += 1
            state = draw(STATES)
            answer = [5, 6] if state in ("ok", "client_left") else []
            prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)) if answer else []
            late = LATE if draw(st.integers(0, 5)) == 0 else {}
            spans += gateway_call(f"c{number}", number, prompt, answer, state=state, attempt_id=name, **late)
        if draw(st.booleans()):
            number += 1
            spans.append(final(1.0, number, attempt_id=name))
    mode = draw(st.sampled_from(["train", "train", "train", "val", None]))
    return rollout(mode=mode), attempts, draw(st.permutations(spans))


@settings(max_examples=300, deadline=None)
@given(histories())
def test_whatever_happens_every_call_is_trained_or_excluded(
    history: tuple[Rollout, list[Attempt], list[Span]],
) -> None:
    record = read_rollout(*history)
    records = {made.span_id for made in history[2] if made.name == "raw_gen_ai_request"}
    counts = closed(record)
    assert counts["captured"] == len(records)
    latest = history[1][-1]
    if counts["trained"]:
        assert latest.outcome in ("scored", "policy_fault", None)
        assert record.reward == 1.0
        assert {row.attempt_id for row in record.samples} == {latest.attempt_id}
