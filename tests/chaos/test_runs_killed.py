"""`kill -9` of the store server between and within the batches of a run: acknowledged records are there, once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from agentlightning.store import LightningStoreClient
from agentlightning.types import RunRecord
from tests.chaos.kill import Server, Trap
from tests.chaos.stores import fresh_place
from tests.store.parts import required

STEPS, KILLS = 40, 8


@pytest.mark.parametrize("backend", ["sqlite", "postgres", "mongo"])
async def test_acknowledged_records_survive_kill_9_and_are_there_once(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place, chance = fresh_place(backend, request, tmp_path), random.Random(5)
    server, kills, done = Server(place), 0, asyncio.Event()

    def trap() -> Trap:
        where = chance.choice(("primitive", "before commit", "after commit"))
        return Trap(where, chance.randint(2, 12 if where != "primitive" else 60))

    async def restart() -> None:
        nonlocal kills
        while not done.is_set():
            if not server.is_alive():
                kills += 1
                await asyncio.to_thread(server.start_with, trap() if kills < KILLS else Trap("any moment", 0))
            await asyncio.sleep(0.01)

    await asyncio.to_thread(server.start_with, trap())
    restarting = asyncio.create_task(restart())
    client = LightningStoreClient(server.endpoint, deadline=60.0, request_timeout=5.0)
    await client.start_run("r", config={"lr": 1})
    expected: list[tuple[int, str, str]] = []
    for step in range(1, STEPS + 1):
        batch = [RunRecord(kind="step", step=step, data={"reward": step})]
        batch += [RunRecord(kind="ledger", step=step, name=f"ro-{k}", data={"text": "x" * 500}) for k in range(4)]
        added = await client.add_run_records("r", batch)
        assert added == len(batch) or backend == "mongo"
        expected += [(step, record.kind, record.name) for record in batch]
        if step % 20 == 0:
            removed = await client.rewind_run("r", step - 3)
            assert removed == 15 or backend == "mongo"
            expected = [each for each in expected if each[0] <= step - 3]
            await client.update_run("r", heartbeat=True, stop_reason=f"at {step}")
    done.set()
    await restarting
    assert kills >= 4
    records = await client.query_run_records("r")
    assert [(record.step, record.kind, record.name) for record in records] == expected
    run = required(await client.get_run_by_id("r"))
    assert (run.starts, run.stop_reason, run.last_step) == (1, f"at {STEPS}", STEPS - 3)
    await client.close()
    server.close()
