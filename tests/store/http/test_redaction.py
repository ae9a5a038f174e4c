"""What a server says of runs holds no secret that its name gives away; what an algorithm goes on from is told whole."""

from __future__ import annotations

import aiohttp
import pytest

from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.store.http.metrics import PROMETHEUS_PATH
from agentlightning.store.http.operations import PREFIX
from agentlightning.types import RunRecord
from agentlightning.types.runs import RecordKind

SECRET = "planted-secret-of-a-run"
CONFIG = {"llm": {"api_key": SECRET, "url": f"http://user:{SECRET}@host/v1"}, "lr": 1e-4, "eos_token": "</s>"}
SHOWN: tuple[RecordKind, ...] = ("step", "ledger", "evaluation", "alarm", "checkpoint")


@pytest.fixture
async def store():
    made = InMemoryLightningStore()
    await made.start_run("r", config=CONFIG, metadata={"headers": {"Authorization": f"Bearer {SECRET}"}})
    records = [RunRecord(kind=kind, step=1, data={"reward": 1.0, "password": SECRET}) for kind in SHOWN]
    await made.add_run_records("r", records)
    return made


async def test_no_answer_about_a_run_holds_a_secret(store: InMemoryLightningStore) -> None:
    server = LightningStoreServer(store, port=0)
    await server.start()
    async with aiohttp.ClientSession() as session:
        for method, path, body in (
            ("GET", "/runs", None),
            ("POST", "/runs/search", {}),
            ("GET", "/runs/r", None),
            ("POST", "/runs/r", {"heartbeat": True}),
            ("POST", "/runs/r/start", {}),
            ("GET", "/runs/r/records", None),
            ("POST", "/runs/r/records/search", {}),
            ("POST", "/events/search", {"after": "0"}),
        ):
            async with session.request(method, server.endpoint + PREFIX + path, json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
                assert SECRET not in text, path
                assert '"r"' in text or '"reward":1.0' in text
        async with session.get(server.endpoint + PROMETHEUS_PATH) as answer:
            text = await answer.text()
            assert SECRET not in text
            assert 'agl_run_reward{run="r"} 1.0' in text
    client = LightningStoreClient(server.endpoint)
    run = await client.get_run_by_id("r")
    assert run is not None
    assert run.config == {**CONFIG, "llm": {"api_key": "[hidden]", "url": "http://user:[hidden]@host/v1"}}
    assert (await store.query_runs())[0].config == CONFIG  # within the process nothing is hidden
    await client.close()
    await server.stop()


async def test_a_state_and_a_prompt_come_back_as_they_were_stored(store: InMemoryLightningStore) -> None:
    data = {"session": "abc", "text": "Say token: 12 and password=x"}
    kinds: tuple[RecordKind, ...] = ("state", "prompt")
    await store.add_run_records("r", [RunRecord(kind=kind, step=2, data=data) for kind in kinds])
    server = LightningStoreServer(store, port=0)
    await server.start()
    client = LightningStoreClient(server.endpoint)
    assert [record.data for record in await client.query_run_records("r", kind_in=kinds)] == [data, data]
    await client.close()
    await server.stop()
