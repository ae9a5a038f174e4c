"""The exchange between the loop of a run and VERL's processes, in either order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.training.external.verl.bridge import Bridge

ROW: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2]}


async def test_rows_are_handed_out_by_place_and_session_whoever_comes_first() -> None:
    bridge = Bridge("token")
    early = asyncio.ensure_future(bridge.rows("train", 1, 0, 1, "uid-a"))
    await asyncio.sleep(0)
    assert not early.done()
    await bridge.give("train", 1, [[[], [ROW]], [[ROW, ROW], []]])
    assert await early == [ROW]
    assert await bridge.rows("train", 1, 1, 0, "uid-b") == [ROW, ROW]
    assert await bridge.rows("train", 1, 1, 1, "uid-b") == []
    for place, session in ((2, 0), (0, 2)):  # never collected
        assert not await bridge.rows("train", 1, place, session, "uid-c")


async def test_a_step_tells_which_task_each_name_of_verl_was() -> None:
    bridge = Bridge("token")
    waiting = asyncio.ensure_future(bridge.step(1))
    await bridge.give("train", 1, [[[ROW]], [[ROW]]])
    for place, uid in enumerate(("uid-a", "uid-b")):
        await bridge.rows("train", 1, place, 0, uid)
    await bridge.stepped(1, {"metrics": {"actor/pg_loss": 0.5}})
    assert await waiting == {"metrics": {"actor/pg_loss": 0.5}, "places": {"uid-a": 0, "uid-b": 1}}
    await bridge.stepped(2, {})
    assert (await bridge.step(2))["places"] == {}


async def test_whoever_waits_hears_that_verl_has_ended() -> None:
    bridge = Bridge("token")
    step, addresses = asyncio.ensure_future(bridge.step(1)), asyncio.ensure_future(bridge.addresses())
    await asyncio.sleep(0)
    await bridge.end("VERL ended with an error: out of memory")
    for waiting in (step, addresses, bridge.step(2)):
        with pytest.raises(RuntimeError, match="out of memory"):
            await waiting


async def test_the_first_address_is_enough_to_begin_and_later_ones_are_known() -> None:
    bridge = Bridge("token")
    waiting = asyncio.ensure_future(bridge.addresses())
    await bridge.announce("http://10.0.0.1:1/v1")
    assert await waiting == ["http://10.0.0.1:1/v1"]
    await bridge.announce("http://10.0.0.2:1/v1")
    assert await bridge.addresses() == ["http://10.0.0.1:1/v1", "http://10.0.0.2:1/v1"]
