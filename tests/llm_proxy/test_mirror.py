"""Spans of the gateway reach the collector of the environment too, as they are stored: redacted and numbered."""

from __future__ import annotations

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.export import exporter as mirror
from tests.llm_proxy.harness import GatewayHarness
from tests.tracer.collector import Collector


async def test_calls_are_mirrored_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_process", mirror._Process())
    with Collector() as collector:
        monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", collector.url)
        async with GatewayHarness(keep="tokens") as harness:
            attempt = await harness.attempt()
            status, _ = await harness.ask(attempt, "a secret")
            assert status == 200
        stored = await harness.store.query_spans(attempt.rollout_id)
        assert {span.span_id: span.sequence_id for span in collector.spans} == {
            span.span_id: span.sequence_id for span in stored
        }
        assert len(collector.spans) == 2
        assert "secret" not in str(collector.spans)
    assert mirror._process.mirror is None


async def test_a_collector_that_cannot_be_used_is_told_when_the_gateway_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", "nowhere")
    with pytest.raises(ValueError, match="AGENT_LIGHTNING_OTLP_ENDPOINT must be http://host:4318"):
        await LLMProxy(store=InMemoryLightningStore()).start()
