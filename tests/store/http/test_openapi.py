"""Requests drawn from the published description, right and wrong ones, against a real server: the answers are those
that the description promises, and none is a failure of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.http.event_stream import EVENTS_PATH
from agentlightning.store.http.openapi import openapi_document
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM

TOKEN = "fuzz"
EXAMPLES = 6
"""Number of examples for each operation, for right and for wrong requests each."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture
def server() -> Iterator[LightningStoreServer]:
    made = LightningStoreServer(InMemoryLightningStore(), port=0, token=TOKEN)
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


async def known_ids(server: LightningStoreServer) -> dict[str, str]:
    """Return ids of things that are there, so that not every request ends at an unknown one."""
    update = await server.add_resources({"llm": LLM(endpoint="http://m", model="m")})
    rollout = await server.start_rollout("x", worker_id="w")
    return {
        "rollout_id": rollout.rollout_id,
        "attempt_id": rollout.attempt.attempt_id,
        "worker_id": "w",
        "resources_id": update.resources_id,
    }


def put_ids(values: Any, ids: dict[str, str]) -> None:
    if isinstance(values, dict):
        values.update({name: ids[name] for name in values.keys() & ids.keys()})


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:(status|rollout_ids) is deprecated:DeprecationWarning")
def test_every_answer_to_a_drawn_request_is_one_that_the_description_promises(
    server: LightningStoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    ids = asyncio.run(known_ids(server))
    schema = schemathesis.openapi.from_dict(openapi_document())
    tried: set[str] = set()

    def check(operation: Any, mode: GenerationMode) -> None:
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), name_is_known=st.booleans())
        def run(case: Any, name_is_known: bool) -> None:
            if name_is_known:
                for values in (case.path_parameters, case.query, case.body):
                    put_ids(values, ids)
            if isinstance(case.body, dict) and "timeout" in case.body:
                case.body["timeout"] = 0
            headers = {"Authorization": f"Bearer {TOKEN}"}
            case.call_and_validate(base_url=server.endpoint, headers=headers, checks=CHECKS)

        run()

    for result in schema.get_all_operations():
        operation = result.ok()
        tried.add(operation.path)
        if operation.path == EVENTS_PATH:
            continue  # never ends; tests/store/http/test_event_stream.py
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and operation.path.startswith("/assets/"):
                continue  # the name of a file may be any text
            if mode is GenerationMode.POSITIVE or operation.body or operation.query or operation.path_parameters:
                check(operation, mode)
    assert tried == set(openapi_document()["paths"])
    assert not [record for record in caplog.records if record.exc_info]
