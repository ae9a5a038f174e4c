"""Several endpoints of one model: a rollout stays, new ones go to the least busy, broken ones rest."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.llm_proxy import HealthChecks
from agentlightning.llm_proxy.endpoints.balancer import Balancer
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from tests.llm_proxy.harness import GatewayHarness, until
from tests.stubs.model_server import Fault, ModelServer

FAILURES = HealthChecks().failures
ONE, TWO, THREE = (ModelEndpoint("m", f"http://127.0.0.1:{port}/v1") for port in (1, 2, 3))


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def test_a_rollout_stays_where_it_began_even_when_others_have_less_to_do(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(), clock)
    home = balancer.order("r1", "m", [ONE, TWO])[0]
    with balancer.busy(home), balancer.busy(home):
        assert balancer.order("r1", "m", [ONE, TWO])[0] == home
        assert balancer.order("r2", "m", [ONE, TWO])[0] != home


def test_an_endpoint_that_fails_in_a_row_rests_and_then_one_call_tries_it(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(), clock)
    rests = [balancer.failed(ONE) for _ in range(FAILURES)]
    assert rests[:-1] == [None] * (FAILURES - 1)
    assert rests[-1] == 2.0
    assert balancer.state(ONE) == "out"
    assert balancer.order("r1", "m", [ONE, TWO]) == [TWO, ONE]
    clock.now = 2.1
    with balancer.busy(TWO):
        assert balancer.order("r2", "m", [ONE, TWO])[0] == ONE
        assert balancer.order("r3", "m", [ONE, TWO])[0] == TWO
    assert balancer.failed(ONE) == 4.0
    clock.now = 6.2
    with balancer.busy(TWO):
        assert balancer.order("r4", "m", [ONE, TWO])[0] == ONE
    balancer.served(ONE)
    assert balancer.state(ONE) == "serving"


def test_success_in_between_forgets_the_failures(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(), clock)
    for _ in range(FAILURES - 1):
        balancer.failed(ONE)
    balancer.served(ONE)
    assert balancer.failed(ONE) is None


def test_a_trial_that_tells_nothing_is_followed_by_another(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(), clock)
    for _ in range(FAILURES):
        balancer.failed(ONE)
    for now in (2.1, 20.0):
        clock.now = now
        with balancer.busy(TWO):
            assert balancer.order(f"r{now}", "m", [ONE, TWO])[0] == ONE


def test_an_endpoint_that_is_not_chosen_is_not_on_trial(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(), clock)
    for _ in range(FAILURES):
        balancer.failed(ONE)
    assert balancer.order("r1", "m", [ONE, TWO])[0] == TWO
    clock.now = 2.1
    assert balancer.order("r1", "m", [ONE, TWO])[0] == TWO
    with balancer.busy(TWO):
        assert balancer.order("r2", "m", [ONE, TWO])[0] == ONE


def test_an_endpoint_that_says_it_is_well_serves_and_one_failure_puts_it_out(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(), clock)
    for _ in range(FAILURES):
        balancer.failed(ONE)
    assert balancer.some_are_out.is_set()
    balancer.reported_healthy(ONE)
    assert (balancer.state(ONE), balancer.some_are_out.is_set()) == ("failing", False)
    with balancer.busy(TWO):
        assert balancer.order("r", "m", [ONE, TWO])[0] == ONE
    assert balancer.failed(ONE) == 4.0


def test_an_endpoint_that_says_it_is_well_and_fails_is_not_believed_until_it_has_served(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(failures=1), clock)
    balancer.failed(ONE)
    balancer.reported_healthy(ONE)
    balancer.failed(ONE)
    balancer.reported_healthy(ONE)
    assert balancer.state(ONE) == "out"
    balancer.served(ONE)
    balancer.failed(ONE)
    balancer.reported_healthy(ONE)
    assert balancer.state(ONE) == "failing"


def test_when_all_are_broken_they_are_tried_all_the_same(clock: _Clock) -> None:
    balancer = Balancer(HealthChecks(), clock)
    for endpoint in (ONE, TWO, THREE):
        for _ in range(FAILURES):
            balancer.failed(endpoint)
    assert sorted(balancer.order("r", "m", [ONE, TWO, THREE]), key=str) == [ONE, TWO, THREE]


async def test_a_server_that_says_503_is_left_for_the_other_at_once(two: tuple[GatewayHarness, ModelServer]) -> None:
    harness, second = two
    harness.model.faults = [Fault(503)] * 50
    for _ in range(6):
        assert (await harness.ask(of=await harness.attempt()))[0] == 200
    assert len(second.calls) == 6
    assert len(harness.model.calls) <= FAILURES


async def test_an_endpoint_that_is_out_is_asked_and_comes_back() -> None:
    checks = HealthChecks(interval_seconds=0.02, rest_seconds=600.0, longest_rest_seconds=600.0)
    async with ModelServer() as second, GatewayHarness(health=checks) as harness:
        harness.proxy.update_model_list([harness.model.entry("policy"), second.entry("policy")])
        name = f"policy at 127.0.0.1:{second.port}"
        second.get_status = 503
        second.faults = [Fault(503)] * FAILURES
        while harness.proxy.stats()["endpoints"][name] != "out":
            assert (await harness.ask(of=await harness.attempt()))[0] == 200
        gets_before = second.gets
        await until(lambda: second.gets >= gets_before + 2)
        assert harness.proxy.stats()["endpoints"][name] == "out"

        second.get_status = 200
        await until(lambda: harness.proxy.stats()["endpoints"][name] == "failing")
        harness.model.hold()
        held = [asyncio.create_task(harness.ask(of=await harness.attempt())) for _ in range(3)]
        await asyncio.to_thread(second.wait_until, lambda calls: calls[-1].status == 200)
        harness.model.release()
        assert [status for status, _ in await asyncio.gather(*held)] == [200] * 3
        assert harness.proxy.stats()["endpoints"][name] == "serving"


@pytest.mark.parametrize(
    "field", ["failures", "rest_seconds", "longest_rest_seconds", "interval_seconds", "timeout_seconds"]
)
@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_every_setting_of_the_checks_is_validated(field: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"HealthChecks.{field} must be a positive number"):
        HealthChecks(**{field: wrong})  # pyright: ignore[reportArgumentType] -- the point of the test


def test_settings_of_the_checks_fit_together() -> None:
    with pytest.raises(ValueError, match="must not be less than rest_seconds"):
        HealthChecks(rest_seconds=10.0, longest_rest_seconds=5.0)
    with pytest.raises(ValueError, match=r"failures must be a whole number; got 1\.5"):
        HealthChecks(failures=1.5)  # pyright: ignore[reportArgumentType] -- the point of the test
