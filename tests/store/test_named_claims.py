"""Heartbeats that name claims: a claim of a worker that it does not name lapses, a named one never does.

The clock is an argument of the scripts, so nothing here waits. Every backend is held to the same table and the same
random stories; `tests/runner/test_lost_replies.py` shows the whole way over HTTP.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from agentlightning.errors import BadRequestError
from agentlightning.semconv import STALE
from agentlightning.store.rules.claims import claim, forget_claim_tokens
from agentlightning.store.rules.deletion import delete
from agentlightning.store.rules.enqueue import enqueue
from agentlightning.store.rules.lifecycle import LEASE_EXPIRED
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.spans import add_spans
from agentlightning.store.rules.tx import Record
from agentlightning.store.rules.updates import expire, update_attempt
from agentlightning.store.rules.workers import heartbeat, lost_claims
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from tests.chaos.stores import SPECS, fresh_place
from tests.store.parts import span_of

LEASE = 30.0
STORIES = {"memory": 100, "sqlite": 15, "postgres": 5, "mongo": 3}
SETTINGS = settings(stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
CONFIG = RolloutConfig(infrastructure_retries=1000)


class Scripts:
    """Scripts on one store, at a time that the test sets."""

    def __init__(self, store: Any) -> None:
        self.backend, self.now = store._backend, 1000.0
        self._numbers = itertools.count()

    def run(self, script: Any, *args: Any, **kwargs: Any) -> Any:
        return self.backend.execute(lambda tx: script(tx, *args, **kwargs))[0]

    def enqueue(self, count: int = 1) -> list[str]:
        name = f"e{next(self._numbers)}-"
        requests = [EnqueueRolloutRequest(input={}, config=CONFIG)] * count
        return [r.rollout_id for r in self.run(enqueue, self.now, lambda i: f"{name}{i}", requests)]

    def claim(self, worker: str, limit: int = 1, token: str | None = None) -> list[tuple[str, str]]:
        name = f"c{next(self._numbers)}-"
        claims = self.run(claim, self.now, lambda i: f"{name}{i}", token, None, worker, limit)
        return [(rollout.rollout_id, attempt.attempt_id) for rollout, attempt in claims.claims]

    def token(self) -> str:
        """Return a token that no call on this store has had, in any of its stories."""
        return f"t{next(self._numbers)}"

    def beat(self, worker: str, attempts: Any) -> None:
        named = None if attempts is None else frozenset(attempts)
        self.run(heartbeat, self.now, worker, {}, None, named)

    def look(self) -> set[str]:
        """Run the timer's scan; return the attempts that lapsed."""
        lost = self.run(lost_claims, self.now, LEASE)
        args = ("unresponsive", LEASE_EXPIRED, LEASE)
        return {a for r, a in lost if self.run(expire, self.now, r, a, *args)}

    def records(self) -> list[Record]:
        return self.backend.execute(lambda tx: tx.find(Plan()), write=False)[0][0]


@pytest.fixture(params=SPECS)
async def scripts(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    async with fresh_place(request.param, request, tmp_path).opened(synchronous="NORMAL") as store:
        yield Scripts(store)


# --- the table -------------------------------------------------------------------------------------------------------


CASES: dict[str, tuple[float, list[tuple[float, str | None, str]]]] = {
    "never named, beside another": (0, [(10, "b", "")] * 3 + [(0.1, None, "a")]),
    "from when it was last named": (0, [(10, "ab", "")] * 2 + [(10, "b", "")] * 3 + [(1, None, "a")]),
    "just made, before a heartbeat that was sent earlier": (
        LEASE - 1,
        [(0, "", ""), (2, None, ""), (0, "ab", ""), (LEASE - 1, None, "")],
    ),
    "named again in time": (0, [(LEASE / 2, "", ""), (LEASE / 2, "ab", "")] * 10),
    "of a worker that names none, as older clients do": (0, [(10, "*", "")] * 10 + [(LEASE + 1, None, "ab")]),
    "of a worker that falls silent": (0, [(0, "ab", ""), (LEASE + 1, None, "ab")]),
}
"""The seconds from a first heartbeat to the claims `a` and `b`. Then, step by step: the seconds that pass, the claims
that a heartbeat names (`*` if it names none, None if there is no heartbeat), and the claims that have lapsed then."""


@pytest.mark.parametrize("case", CASES)
def test_a_claim_lapses_a_lease_after_it_was_made_or_named(scripts: Scripts, case: str) -> None:
    seconds, steps = CASES[case]
    scripts.beat("w", None if steps[0][1] == "*" else [])
    scripts.now += seconds
    scripts.enqueue(2)
    claims = dict(zip("ab", scripts.claim("w", 2), strict=True))
    for passed, named, lapsed in steps:
        scripts.now += passed
        if named is not None:
            scripts.beat("w", None if named == "*" else [claims[letter][1] for letter in named])
        assert scripts.look() == {claims[letter][1] for letter in lapsed}
    again = scripts.claim("other", 2)
    assert [rollout for rollout, _ in again] == [claims[letter][0] for letter in lapsed]
    kept = {attempt for letter, (_, attempt) in claims.items() if letter not in lapsed}
    assert {a.status for r in scripts.records() for a in r.attempts if a.attempt_id in kept} <= {"preparing"}


def test_a_heartbeat_for_two_hundred_claims_writes_one_small_row(scripts: Scripts) -> None:
    scripts.enqueue(200)
    scripts.beat("w", [])
    attempts = [attempt for _, attempt in scripts.claim("w", 200)]
    wrote: list[tuple[str, Any]] = []

    def beat(tx: Any) -> None:
        class Watching:
            def __getattr__(self, name: str) -> Any:
                member = getattr(tx, name)
                if name in ("put", "save", "drop", "delete", "add_spans", "claim"):
                    return lambda *arguments: (wrote.append((name, arguments)), member(*arguments))[1]
                return member

        heartbeat(Watching(), scripts.now, "w", {}, None, frozenset(attempts))  # type: ignore[arg-type]

    scripts.backend.execute(beat)
    assert [name for name, _ in wrote] == ["put"]
    assert wrote[0][1][2].unnamed == []


def test_the_token_of_a_claim_is_answered_for_as_long_as_the_claim_is_in_hand(scripts: Scripts) -> None:
    scripts.enqueue(3)
    [lost] = scripts.claim("w", token="asked once")
    [done] = scripts.claim("w", token="done")
    for _ in range(10):
        scripts.now += 700
        scripts.run(forget_claim_tokens, scripts.now)
        assert scripts.claim("w", token="asked once") == [lost]
        assert scripts.claim("w", token="done") == [done]
        scripts.run(update_attempt, scripts.now, *lost, {"last_heartbeat_time": scripts.now})
    scripts.run(update_attempt, scripts.now, *done, {"status": "succeeded"})
    assert scripts.claim("w", token="done") == [], "it is over: nobody may run it again"
    scripts.now += 700
    scripts.run(forget_claim_tokens, scripts.now)
    assert scripts.run(lambda tx: [token for token, _ in tx.scan("claim")]) == ["asked once"]


def test_a_claim_that_lapsed_is_not_handed_out_again_by_its_token(scripts: Scripts) -> None:
    scripts.enqueue()
    scripts.beat("w", [])
    [(rollout, attempt)] = scripts.claim("w", token="t")
    scripts.now += LEASE + 1
    assert scripts.look() == {attempt}
    assert scripts.claim("w", token="t") == []
    [(again, _)] = scripts.claim("v", token="u")
    assert again == rollout
    assert scripts.claim("w", token="t") == []


@pytest.mark.parametrize("claimed_again", [False, True])
@pytest.mark.parametrize(
    "end",
    [
        {"status": "succeeded", "outcome": "scored"},
        {"status": "failed", "outcome": "infrastructure_fault", "outcome_reason": "spans_lost"},
        {"status": "failed", "outcome": "infrastructure_fault", "outcome_reason": "exception"},
    ],
    ids=lambda end: end.get("outcome_reason", "scored"),
)
def test_a_late_report_counts_until_another_attempt_has_begun(
    scripts: Scripts, end: dict[str, Any], claimed_again: bool
) -> None:
    [rollout] = scripts.enqueue()
    scripts.beat("w", [])
    [(_, old)] = scripts.claim("w")
    scripts.now += LEASE + 1
    assert scripts.look() == {old}
    newer = scripts.claim("v")[0][1] if claimed_again else None
    scripts.now += 1
    scripts.beat("w", [old])
    scripts.run(update_attempt, scripts.now, rollout, old, dict(end))
    scripts.beat("v", [newer] if newer else [])
    assert scripts.look() == set()
    [record] = scripts.records()
    assert record.attempts[0].status == end["status"]
    if newer is None:
        ended = {"scored": "succeeded", "exception": "failed", "spans_lost": "requeuing"}
        assert record.rollout.status == ended[end.get("outcome_reason", "scored")]
        assert len(scripts.claim("v")) == (record.rollout.status == "requeuing"), "only what has to be made again is"
        return
    assert (record.rollout.status, record.attempts[-1].status) == ("preparing", "preparing")
    [stored] = scripts.run(add_spans, scripts.now, [span_of((rollout, old))])
    assert stored.attributes[STALE] is True
    assert scripts.claim("x") == [], "nobody gets it a third time"
    scripts.run(update_attempt, scripts.now, rollout, newer, {"status": "succeeded"})
    assert [record.rollout.status for record in scripts.records()] == ["succeeded"]


def test_retries_after_lost_workers_come_to_an_end_whatever_the_condition(scripts: Scripts) -> None:
    config = RolloutConfig(infrastructure_retries=3, max_attempts=2, retry_condition=["unresponsive"])
    scripts.run(enqueue, scripts.now, str, [EnqueueRolloutRequest(input={}, config=config)])
    scripts.beat("w", [])
    made = 0
    while made < 20 and scripts.claim("w"):
        made += 1
        scripts.beat("w", [])
        scripts.now += LEASE + 1
        assert len(scripts.look()) == 1
    assert made == 5, "two attempts, and three retries that do not count"
    assert [record.rollout.status for record in scripts.records()] == ["failed"]


@pytest.mark.parametrize("names", ["at-1", [1], ["x"] * 100_001])
async def test_wrong_names_are_refused(names: Any) -> None:
    async with fresh_place("memory", None, Path()).opened() as store:  # type: ignore[arg-type]
        with pytest.raises(BadRequestError, match="attempts"):
            await store.update_worker("w", attempts=names)


# --- random stories --------------------------------------------------------------------------------------------------

WORKERS = st.sampled_from(["v", "w"])


class Stories(RuleBasedStateMachine):
    """Two workers whose replies get lost; each names and runs the claims that it knows of."""

    scripts: Scripts

    def __init__(self) -> None:
        super().__init__()
        self.scripts.now += 10 * LEASE
        self.tasks: set[str] = set(self.scripts.enqueue(2))
        self.knows: dict[str, dict[str, str]] = {"v": {}, "w": {}}
        self.asked: dict[str, tuple[int, str]] = {}
        self.named_at: dict[str, float] = {}
        for worker in self.knows:
            self.scripts.beat(worker, [])

    @rule(count=st.integers(1, 2))
    def enqueue(self, count: int) -> None:
        self.tasks |= set(self.scripts.enqueue(count))

    @rule(worker=WORKERS, limit=st.integers(1, 3), lost=st.booleans())
    def claim(self, worker: str, limit: int, lost: bool) -> None:
        limit, token = self.asked.setdefault(worker, (limit, self.scripts.token()))
        claims = self.scripts.claim(worker, limit, token)
        if not lost:
            del self.asked[worker]
            self.learn(worker, claims)

    def learn(self, worker: str, claims: list[tuple[str, str]]) -> None:
        held = {a.attempt_id: a for r in self.scripts.records() for a in r.attempts}
        for rollout, attempt in claims:
            assert all(attempt not in names for names in self.knows.values()), "handed out twice"
            self.knows[worker][attempt] = rollout
            self.named_at[attempt] = held[attempt].start_time

    @rule(worker=WORKERS)
    def beat(self, worker: str) -> None:
        self.scripts.beat(worker, self.knows[worker])
        self.named_at.update(dict.fromkeys(self.knows[worker], self.scripts.now))

    @rule(seconds=st.sampled_from([1.0, 10.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.scripts.now += seconds
        lapsed = self.scripts.look()
        fresh = {a for a in lapsed if a in self.named_at and self.scripts.now - self.named_at[a] <= LEASE}
        assert not fresh, "a claim in hand, claimed or named within the lease, was taken away"

    @rule(worker=WORKERS, report_lost=st.booleans())
    def finish(self, worker: str, report_lost: bool) -> None:
        if not self.knows[worker]:
            return
        attempt, rollout = next(iter(self.knows[worker].items()))
        [stored] = self.scripts.run(add_spans, self.scripts.now, [span_of((rollout, attempt))])
        latest = self.scripts.run(lambda tx: tx.load(rollout)).latest
        assert stored.attributes.get(STALE, False) is (latest.attempt_id != attempt), "two attempts would be trained"
        if not report_lost:
            self.scripts.run(update_attempt, self.scripts.now, rollout, attempt, {"status": "succeeded"})
        del self.knows[worker][attempt]

    @rule(worker=WORKERS)
    def restart(self, worker: str) -> None:
        """The worker is killed; another takes its place and name."""
        self.knows[worker].clear()
        self.asked.pop(worker, None)

    @invariant()
    def a_rollout_succeeds_by_its_last_attempt(self) -> None:
        for record in self.scripts.records():
            assert record.rollout.status != "succeeded" or record.attempts[-1].status == "succeeded"

    def teardown(self) -> None:
        """Lose no more replies: every rollout must then end, and succeed."""
        for _ in range(60):
            self.scripts.now += 10
            for worker in self.knows:
                self.learn(worker, self.scripts.claim(worker, *self.asked.pop(worker, (5, None))))
                self.scripts.beat(worker, self.knows[worker])
                for attempt, rollout in list(self.knows[worker].items()):
                    self.scripts.run(update_attempt, self.scripts.now, rollout, attempt, {"status": "succeeded"})
                self.knows[worker].clear()
            self.scripts.look()
            states = {r.rollout.rollout_id: r.rollout.status for r in self.scripts.records()}
            if set(states.values()) == {"succeeded"}:
                break
        assert states == dict.fromkeys(self.tasks, "succeeded")
        self.scripts.run(delete, self.scripts.now, sorted(self.tasks), "force")


@pytest.mark.parametrize("kind", SPECS)
async def test_random_stories_strand_nothing_and_take_nothing_from_a_worker_that_names_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with fresh_place(kind, request, tmp_path).opened(synchronous="NORMAL") as store:
        scripts = Scripts(store)
        machine = type("Told", (Stories,), {"scripts": scripts})
        run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=STORIES[kind]))
