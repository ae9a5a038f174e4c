"""Several endpoints of one model: a rollout stays, new ones go where there is least to do, broken ones rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from agentlightning.llm_proxy.balance import FAILURES, Balancer
from agentlightning.llm_proxy.models import Endpoint
from tests.llm_proxy.desk import Desk, arrived
from tests.stubs.model_server import Fault, ModelServer

ONE, TWO, THREE = (Endpoint("m", f"http://127.0.0.1:{port}/v1") for port in (1, 2, 3))


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def test_a_rollout_stays_where_it_began_even_when_others_have_less_to_do(clock: _Clock) -> None:
    balancer = Balancer(clock)
    home = balancer.order("r1", "m", [ONE, TWO])[0]
    with balancer.busy(home), balancer.busy(home):
        assert balancer.order("r1", "m", [ONE, TWO])[0] == home
        assert balancer.order("r2", "m", [ONE, TWO])[0] != home


def test_an_endpoint_that_fails_in_a_row_rests_and_then_one_call_tries_it(clock: _Clock) -> None:
    balancer = Balancer(clock)
    rests = [balancer.failed(ONE) for _ in range(FAILURES)]
    assert rests[:-1] == [None] * (FAILURES - 1)
    assert rests[-1] == 2.0
    assert balancer.state(ONE) == "broken"
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
    balancer = Balancer(clock)
    for _ in range(FAILURES - 1):
        balancer.failed(ONE)
    balancer.served(ONE)
    assert balancer.failed(ONE) is None


def test_when_all_are_broken_they_are_tried_all_the_same(clock: _Clock) -> None:
    balancer = Balancer(clock)
    for endpoint in (ONE, TWO, THREE):
        for _ in range(FAILURES):
            balancer.failed(endpoint)
    assert sorted(balancer.order("r", "m", [ONE, TWO, THREE]), key=str) == [ONE, TWO, THREE]


@pytest.fixture
async def two() -> AsyncGenerator[tuple[Desk, ModelServer], None]:
    with ModelServer() as second:
        async with Desk() as desk:
            desk.proxy.update_model_list([desk.model.entry("policy"), second.entry("policy")])
            yield desk, second


async def test_new_rollouts_go_where_there_is_least_to_do(two: tuple[Desk, ModelServer]) -> None:
    desk, second = two
    attempts = [await desk.attempt() for _ in range(8)]
    for server in (desk.model, second):
        server.hold()
    asking = [asyncio.create_task(desk.ask(attempt)) for attempt in attempts]
    await desk.model.until(arrived(4))
    await asyncio.to_thread(second.wait_until, arrived(4))
    for server in (desk.model, second):
        server.release()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8
    assert (len(desk.model.calls), len(second.calls)) == (4, 4)


async def test_a_server_that_says_503_is_left_for_the_other_at_once(two: tuple[Desk, ModelServer]) -> None:
    desk, second = two
    desk.model.faults = [Fault(503)] * 50
    for _ in range(6):
        assert (await desk.ask(await desk.attempt()))[0] == 200
    assert len(second.calls) == 6
    assert len(desk.model.calls) <= FAILURES
