"""Pause, drain and resume around a change of weights; mostly from another loop than the gateway's."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from agentlightning.llm_proxy import GatewayLimits
from tests.llm_proxy.harness import GatewayHarness, arrived, until


async def waiting(harness: GatewayHarness, count: int) -> None:
    """Return when that many calls wait at the gate."""
    await until(lambda: harness.proxy.stats()["waiting"] == count)


@pytest.mark.parametrize("launch_mode", ["thread", "asyncio"])
async def test_calls_wait_out_a_weight_change_and_carry_the_version_that_served_them(
    launch_mode: Literal["thread", "asyncio"],
) -> None:
    async with GatewayHarness(launch_mode=launch_mode) as harness:
        await harness.ask()
        async with harness.proxy.weight_change(7):
            late = asyncio.create_task(harness.ask())
            await waiting(harness, 1)
            assert len(harness.model.calls) == 1  # the model server is left alone
            assert harness.proxy.weight_version == 0
        assert (await late)[0] == 200
        assert harness.proxy.weight_version == 7
        assert [call["weight_version"] for call in await harness.raw()] == [0, 7]


async def test_a_weight_change_begins_when_the_last_call_has_ended(harness: GatewayHarness) -> None:
    harness.model.hold()
    early = asyncio.create_task(harness.ask())
    await harness.model.until(arrived(1))
    order: list[str] = []

    async def change() -> None:
        async with harness.proxy.weight_change(1):
            order.append("changed")

    task = asyncio.create_task(change())
    late = asyncio.create_task(harness.ask())
    await waiting(harness, 1)
    assert order == []
    order.append("released")
    harness.model.release()
    await asyncio.gather(task, early, late)
    assert order == ["released", "changed"]
    assert [call["weight_version"] for call in await harness.raw()] == [0, 1]


async def test_a_drain_that_takes_too_long_says_how_many_calls_run_and_lets_the_others_go_on(
    harness: GatewayHarness,
) -> None:
    harness.model.hold()
    early = asyncio.create_task(harness.ask())
    await harness.model.until(arrived(1))
    with pytest.raises(TimeoutError, match=r"model calls still running after 0\.05 s: 1"):
        async with harness.proxy.weight_change(1, drain_timeout=0.05):
            pytest.fail("the weights changed under a running call")
    harness.model.release()
    assert (await early)[0] == 200
    assert (await harness.ask())[0] == 200
    assert harness.proxy.weight_version == 0


async def test_a_change_that_fails_keeps_the_version_and_resumes(harness: GatewayHarness) -> None:
    with pytest.raises(OSError, match="disk full"):
        async with harness.proxy.weight_change(1):
            raise OSError("disk full")
    assert harness.proxy.weight_version == 0
    assert (await harness.ask())[0] == 200


async def test_the_waiting_line_is_bounded() -> None:
    async with GatewayHarness(limits=GatewayLimits(waiting_calls=2)) as harness:
        await harness.proxy.pause()
        await harness.proxy.pause()  # twice is once
        line = [asyncio.create_task(harness.ask()) for _ in range(2)]
        await waiting(harness, 2)
        async with harness.session.post(harness.url(), json={"model": "policy", "messages": []}) as reply:
            assert reply.status == 503
            assert reply.headers["Retry-After"] == "1"
            assert (await reply.json())["error"]["code"] == "weights_changing"
        await harness.proxy.resume()
        assert [status for status, _ in await asyncio.gather(*line)] == [200, 200]
        assert sorted(await harness.states()) == ["ok", "ok", "refused"]


async def test_an_agent_that_leaves_the_line_costs_no_inference(harness: GatewayHarness) -> None:
    await harness.proxy.pause()
    call = asyncio.create_task(harness.ask())
    await waiting(harness, 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await waiting(harness, 0)
    await harness.proxy.resume()
    assert (await harness.ask())[0] == 200
    assert len(harness.model.calls) == 1
    assert sorted(await harness.states()) == ["client_left", "ok"]


async def test_waiting_counts_as_time_of_the_call() -> None:
    async with GatewayHarness(limits=GatewayLimits(call_seconds=0.1)) as harness:
        await harness.proxy.pause()
        assert (await harness.ask())[0] == 504
        await harness.proxy.resume()


async def test_versions_are_kept_across_a_restart_and_can_change_while_nothing_serves(harness: GatewayHarness) -> None:
    await harness.proxy.stop()
    async with harness.proxy.weight_change(3):
        pass
    await harness.proxy.start()
    await harness.ask()
    assert [call["weight_version"] for call in await harness.raw()] == [3]
