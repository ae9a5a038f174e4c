"""The ledger of model calls: finished rollouts are read, and the books of a step add up or name the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

TARGET = "agentlightning.reward.0.target"
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


def targeted(span: Span, target: str, target_id: str | None = None) -> Span:
    return with_attributes(span, {TARGET: target} | ({f"{TARGET}_id": target_id} if target_id else {}))


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([final(5.0)], {}),
        ([reward("r1", None, 1.5, 0.25, sequence_id=2), final(5.0)], {"c1": 0.25}),
        ([reward("r1", None, 3.8, 0.25, sequence_id=4), final(5.0)], {"c2": 0.25}),
        ([targeted(final(5.0), "rollout")], {}),
        ([reward("r1", None, 1.5, 0.25, sequence_id=2), targeted(final(5.0), "step")], {"c1": 0.25, "c2": 5.0}),
        ([targeted(reward("r1", None, 1.5, 0.25, sequence_id=2), "agent", "planner"), final(5.0)], {"c1": 0.25}),
        ([targeted(reward("r1", None, 1.5, 0.25, sequence_id=2), "agent", "nobody"), final(5.0)], {}),
        ([targeted(reward("r1", None, 0.5, 0.25, sequence_id=0), "agent", "planner"), final(5.0)], {}),
        ([targeted(reward("r1", None, 1.5, 0.25, sequence_id=2), "rollout"), final(5.0)], {}),
        (
            [
                *(targeted(reward(f"r{n}", None, 9.0, 0.5, sequence_id=7), "call", "reply-1") for n in range(2)),
                final(5.0),
            ],
            {"c1": 0.5 + 0.5},
        ),
        ([targeted(reward("r1", None, 9.0, 0.5, sequence_id=7), "call", "of nobody"), final(5.0)], {}),
        (
            [reward(f"r{n}", None, 3.7 + n / 10, 0.25 + n, sequence_id=4 + n) for n in range(2)] + [final(5.0)],
            {"c2": 0.25 + 1.25},
        ),
        (
            [
                *(targeted(reward(f"r{n}", None, 1.6, 0.5, sequence_id=2), "agent", "planner") for n in range(2)),
                reward("r3", None, 1.5, 0.25, sequence_id=2),
                final(5.0),
            ],
            {"c1": 0.25 + 0.5 + 0.5},
        ),
    ],
)
def test_every_reward_but_the_outcome_belongs_to_a_call(
    adapter: TraceToTripletBase, rewards: list[Span], expected: dict[str, float]
) -> None:
    planner = {"agentlightning.call.role": "planner"}
    first = [with_attributes(span, planner) for span in gateway_call("c1", 1, [1, 2], [3], response_id="reply-1")]
    spans = [*first, *gateway_call("c2", 3, [1, 2, 3, 4], [5, 6]), *rewards]
    record = read_rollout(rollout(), [attempt()], spans, adapter, credit=True)
    assert {ref.call_id: value for ref, value in record.call_rewards.items()} == expected
    assert record.reward == 5.0
    assert read_rollout(rollout(), [attempt()], spans, adapter).call_rewards == {}
    lost = [problem for problem in record.problems if "belongs to no call that is trained" in problem.detail]
    assert len(lost) == (not expected and rewards[0].attributes.get(TARGET) in ("agent", "call"))


def test_a_reward_of_the_group_replaces_the_outcome_of_the_agent() -> None:
    early, own, judged = reward("r1", None, 1.5, 0.5, sequence_id=2), final(5.0, 8), final(0.25, 9)
    spans = [*gateway_call("c1", 1, [1, 2], [3]), *gateway_call("c2", 3, [1, 2, 3, 4], [5, 6]), early, own, judged]
    record = read_rollout(rollout(), [attempt(outcome_reason="group_reward")], spans, credit=True)
    assert ({ref.call_id: value for ref, value in record.call_rewards.items()}, record.reward) == ({"c1": 0.5}, 0.25)
    alone = read_rollout(rollout(), [attempt(outcome_reason="group_reward")], [*spans[:4], judged], credit=True)
    assert alone.call_rewards == {}


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


def refused(id: str = "x", number: int = 3, **more: Any) -> list[Span]:
    return gateway_call(id, number, [], [], state="refused", **more)


def title(number: int, **more: Any) -> list[Span]:
    """The call with which Claude Code asks for a title for the terminal."""
    instruction = "... If it does, extract a 2-3 word title that captures the new topic. Format your response as a JSON"
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": "fix the bug"}]
    call, state = spoken_call(f"title-{number}", number, [1, 2, 3, 9], [8], messages)
    return [call, with_attributes(state, more)]


JUDGE = gateway_call("judge", 3, [1], [2], **{"agentlightning.call.policy_kind": "frozen"})
FAULT = {"outcome": "infrastructure_fault", "status": "failed"}
IN_ROW = ["c1", "c2"]
CASES: dict[str, tuple[list[Attempt], list[Span], str | None, dict[str, str], list[list[str]]]] = {
    "no_reward_and_no_call": ([attempt(outcome="unscored")], [], "no_reward", {}, []),
    "no_call": ([attempt()], [final()], "no_call", {}, []),
    "call_of_a_judge_alone": ([attempt()], [*JUDGE, final()], "no_call", {"judge": "not_selected"}, []),
    "helper_alone": ([attempt()], [*title(1), final()], "no_call", {"title-1": "helper"}, []),
    "refused_helper": (
        [attempt()],
        [*two_turns(), *title(3, **{"agentlightning.call.state": "refused"}), final()],
        *(None, {"title-3": "helper"}, [IN_ROW]),
    ),
    "policy_fault_after_a_refused_call": (
        [attempt(outcome="policy_fault", status="failed")],
        [*two_turns(), *refused(), final(-1.0)],
        *(None, {"x": "refused"}, [IN_ROW]),
    ),
    "refused_calls_that_do_not_count": (
        [attempt("at-0", 1, **FAULT), attempt("at", 2)],
        [*refused("old", 1, attempt_id="at-0"), *two_turns(), *refused("late", 8, **LATE), final()],
        *(None, {"old": "superseded_attempt", "late": "stale"}, [IN_ROW]),
    ),
    "budget": (
        [attempt(**FAULT, outcome_reason="budget")],
        [*two_turns(), *refused()],
        *("budget", {"c1": "budget", "c2": "budget", "x": "budget"}, []),
    ),
    "calls_without_their_tokens": (
        [attempt()],
        [
            *gateway_call("words", 1, [], [], state="no_tokens"),
            *gateway_call("short", 2, [1], [2, 3], logprobs=[-0.5]),
            chat("seen", None, 3, 4, [1], [2], sequence_id=3),
            *gateway_call("good", 4, [1], [2]),
            final(),
        ],
        *(None, {"words": "no_tokens", "short": "bad_logprobs", "seen": "no_logprobs"}, [["good"]]),
    ),
    "tokens_that_the_tracer_alone_saw": (
        [attempt()],
        [
            *gateway_call("c1", 1, [], [], state="no_tokens", response_id="x"),
            with_attributes(
                chat("s", None, 1, 2, [1], [2], response_id="x"), {"logprobs.content": '[{"logprob": -0.5}]'}
            ),
            final(),
        ],
        *(None, {}, [["c1"]]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_call_is_in_a_row_or_has_the_reason_of_its_exclusion(case: str) -> None:
    attempts, spans, verdict, excluded, rows = CASES[case]
    record = read_rollout(rollout(), attempts, spans)
    assert (record.verdict, reasons(record)) == (verdict, excluded)
    assert [row.call_ids for row in record.samples] == rows
    closed(record)


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
    assert closed(record) == {"captured": 3, "trained": 0, "refused_call": 2, state: 1}
    trained = read_rollout(rollout(), [attempt()], spans, train_refused=True)
    assert closed(trained) == {"captured": 3, "trained": 2, state: 1}


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
def test_a_known_helper_call_changes_neither_the_row_nor_where_the_reward_goes(adapter: TraceToTripletBase) -> None:
    first, second = gateway_call("c1", 1, [1, 2], [3]), gateway_call("c2", 3, [1, 2, 3, 4], [5, 6])
    spans = [*first, *title(2), *second, *title(4), final(1.0)]
    record = read_rollout(rollout(), [attempt()], spans, adapter)
    assert reasons(record) == {"title-2": "helper", "title-4": "helper"}
    assert [row.call_ids for row in record.samples] == [["c1", "c2"]]
    assert [(t.metadata["call_id"], t.reward) for t in adapter.adapt(spans)] == [("c1", None), ("c2", 1.0)]
    assert [each.reason for each in adapter.explain(spans).calls] == [None, "helper", None, "helper"]
    assert adapter.adapt(title(1)) == []


@pytest.mark.parametrize("kind", [TracerTraceToTriplet, LlmProxyTraceToTriplet])
@pytest.mark.parametrize("rule", [r"system: You name sessions", lambda call: len(call.completion_token_ids) == 4])
def test_a_rule_of_the_user_names_helper_calls(kind: Any, rule: Any) -> None:
    messages = [{"role": "system", "content": "You name sessions."}, {"role": "user", "content": "hi"}]
    spans = [*two_turns(), *spoken_call("own", 3, [1], [2, 3, 4, 5], messages), final()]
    record = read_rollout(rollout(), [attempt()], spans, kind(ignore=rule))
    assert reasons(record) == {"own": "helper"}
    assert [t.reward for t in kind(ignore=rule).adapt(spans)] == [None, 1.0]
    assert reasons(read_rollout(rollout(), [attempt()], spans, kind())) == {}


def test_calls_of_another_agent_than_the_adapters_are_not_selected() -> None:
    record = read_rollout(rollout(), [attempt()], [*two_turns(), final()], TracerTraceToTriplet(agent_match="planner"))
    assert reasons(record) == {"c1": "not_selected", "c2": "not_selected"}


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
    """An adapter of a user: the first triplets of the calls of any owner, changed by a function."""

    def __init__(self, change: Callable[[Triplet], Triplet] = lambda triplet: triplet) -> None:
        self.change = change

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        call = model_calls(source)[0]
        prompt, response = {"token_ids": call.prompt_token_ids}, {"token_ids": call.completion_token_ids}
        triplet = Triplet(prompt=prompt, response=response, reward=None, metadata={"call_id": call.call_id})
        return [self.change(triplet)]


def test_an_adapter_of_a_user_selects_calls_also_of_another_policy() -> None:
    record = read_rollout(rollout(), [attempt()], [*two_turns(), final()], Custom())
    assert [row.call_ids for row in record.samples] == [["c1"]]
    assert reasons(record) == {"c2": "not_selected"}
    record = read_rollout(rollout(), [attempt()], [*JUDGE, final()], Custom())
    assert (record.verdict, record.exclusions) == (None, {})
    assert closed(record) == {"captured": 1, "trained": 1}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"response": {"token_ids": [99]}}, "Custom changed the tokens of call c1"),
        ({"metadata": {}}, r"metadata\['call_id'\]"),
    ],
)
def test_an_adapter_that_changes_tokens_or_names_no_call_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(LedgerError, match=error):
        read_rollout(rollout(), [attempt()], [*two_turns(), final()], Custom(lambda t: t.model_copy(update=change)))


def three_rows() -> list[Span]:
    """The calls of three rows; the last call continues the first row."""
    prompts = {"c1": [1, 2], "c2": [8], "c3": [9], "c4": [1, 2, 3, 4]}
    calls = [gateway_call(name, number, prompt, [3]) for number, (name, prompt) in enumerate(prompts.items(), start=1)]
    return [*(made for call in calls for made in call), final()]


@pytest.mark.parametrize(
    ("max_rows", "trained", "excluded"),
    [
        (1, [["c1", "c4"]], {"c2": "row_limit", "c3": "row_limit"}),
        (2, [["c1", "c4"], ["c2"]], {"c3": "row_limit"}),
        (3, [["c1", "c4"], ["c2"], ["c3"]], {}),
        (None, [["c1", "c4"], ["c2"], ["c3"]], {}),
    ],
)
def test_the_first_rows_up_to_the_limit_are_trained_and_all_are_counted_by_cause(
    max_rows: int | None, trained: list[list[str]], excluded: dict[str, str]
) -> None:
    record = read_rollout(rollout(), [attempt()], three_rows(), max_rows=max_rows)
    assert [row.call_ids for row in record.samples] == trained
    assert reasons(record) == excluded
    assert sum(record.seams.values()) == 3
    counts = closed(record)
    assert (counts["captured"], counts["trained"]) == (4, 4 - len(excluded))


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


@pytest.mark.parametrize(
    ("rows", "excluded", "error"),
    [
        ([0], [], r"step 3: 1 of 3 .* call c3 \(rollout ro, attempt at\) is neither trained nor excluded"),
        (
            [0, 1, 1],
            ["equal_rewards"],
            "call c3 .* is trained in row 1 and trained in row 2 and excluded as equal_rewards",
        ),
    ],
)
def test_a_call_without_an_end_or_with_several_is_named(rows: list[int], excluded: list[Any], error: str) -> None:
    ledger, record = captured()
    for number, place in enumerate(rows):
        ledger.train(record.samples[place], row=number, advantage=1.0)
    for reason in excluded:
        ledger.exclude(record.samples[1], reason)
    with pytest.raises(LedgerError, match=error):
        ledger.close()


def test_calls_that_were_never_captured_or_captured_twice_and_rows_that_lost_tokens_are_refused() -> None:
    ledger, record = captured()
    other = Ledger(0)
    other.exclude(record.samples[1], "no_group")
    with pytest.raises(LedgerError, match=r"call c3 .* is excluded as no_group and was never captured"):
        other.close()
    with pytest.raises(LedgerError, match="captured twice"):
        ledger.add(record)
    sample = record.samples[0]
    sample.mask[2] = 0
    with pytest.raises(LedgerError, match="row 0 of rollout ro has 2 trained tokens, but its 2 model calls contain 3"):
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
@given(histories(), st.sampled_from([1, 2, None]))
def test_whatever_happens_every_call_is_trained_or_excluded(
    history: tuple[Rollout, list[Attempt], list[Span]], max_rows: int | None
) -> None:
    record = read_rollout(*history, max_rows=max_rows)
    records = {made.span_id for made in history[2] if made.name == "raw_gen_ai_request"}
    counts = closed(record)
    assert counts["captured"] == len(records)
    latest = history[1][-1]
    if counts["trained"]:
        assert latest.outcome in ("scored", "policy_fault", None)
        assert record.reward == 1.0
        assert {row.attempt_id for row in record.samples} == {latest.attempt_id}
