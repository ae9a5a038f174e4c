"""`store.traces`: all spans of a store, in memory, in a file and behind a server."""

from __future__ import annotations

import pytest

from agentlightning.errors import TooLargeError
from agentlightning.store import LightningStore
from tests.store.parts import span_of


async def test_all_spans_come_by_rollout_and_number(store: LightningStore) -> None:
    assert await store.traces.get_all() == []
    rollouts = [await store.start_rollout(number) for number in range(103)]
    for rollout in (rollouts[-1], rollouts[0], rollouts[0]):
        await store.add_span(span_of(rollout, attributes={"k": rollout.input}))
    spans = await store.traces.get_all()
    assert [(span.attributes["k"], span.sequence_id) for span in spans] == [(0, 1), (0, 2), (102, 1)]
    assert await store.traces.get_all(most=3) == spans
    with pytest.raises(TooLargeError, match=r"more than 2 spans.*await store\.query_spans\(rollout_id\)"):
        await store.traces.get_all(most=2)
