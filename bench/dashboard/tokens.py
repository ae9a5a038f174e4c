"""A rollout with thousands of tokens in its ledger, and one with a thousand model calls."""

from __future__ import annotations

import base64
import struct
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.types import RunRecord
from bench.dashboard.store import RUN
from tests.adapter.span_maker import spoken_call

TOKENS = 8000
TURNS = 1000
_PROMPT = 500
_VOCABULARY = "vocabulary-of-the-benchmark"
_WORDS = 997


async def add_tokens(store: LightningStore) -> str:
    """Store a rollout with one row of `TOKENS` tokens, and return its id."""
    rollout = await store.start_rollout(input={"question": "a long answer"}, run_id=RUN)
    await store.add_vocabulary(_VOCABULARY, [f" word{number}" for number in range(_WORDS)])
    trained = TOKENS - _PROMPT
    attempt_id = rollout.attempt.attempt_id
    call = {"call_id": "call-1", "attempt_id": attempt_id, "ending": "trained", "reason": None, "row": 0}
    row: dict[str, Any] = {
        "row": 0,
        "vocabulary": _VOCABULARY,
        "length": TOKENS,
        "tokens": _packed("i32", [number % _WORDS for number in range(TOKENS)]),
        "mask": _packed("u8", [0] * _PROMPT + [1] * trained),
        "engine_logprobs": _packed("f32", [-(number % 40) / 10 for number in range(trained)]),
        "trainer_logprobs": _packed("f32", [-(number % 41) / 10 for number in range(trained)]),
        "advantage": _packed("f32", [0.5] * trained),
    }
    data: dict[str, Any] = {
        "rollout_id": rollout.rollout_id,
        "attempt_id": attempt_id,
        "reward": 1.0,
        "outcome": "scored",
        "verdict": None,
        "group": 0,
        "advantage": 0.5,
        "weight_versions": [1],
        "calls": [{**call, "tokens": trained, "advantage": 0.5, "weight_version": 1}],
        "rows": [row],
    }
    await store.add_run_records(RUN, [RunRecord(kind="ledger", step=1, name=rollout.rollout_id, data=data)])
    return rollout.rollout_id


async def add_turns(store: LightningStore) -> str:
    """Store a rollout with a conversation of `TURNS` calls, each with all earlier messages, and return its id."""
    rollout = await store.start_rollout(input={"question": "a long conversation"}, run_id=RUN)
    place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    messages = [{"role": "user", "content": "begin"}]
    for turn in range(TURNS):
        spans = spoken_call(f"call-{turn}", turn + 1, [turn], [1], messages, f"answer {turn}")
        await store.add_many_spans([span.model_copy(update=place) for span in spans])
        messages += [
            {"role": "assistant", "content": f"answer {turn}"},
            {"role": "user", "content": f"result {turn} " * 20},
        ]
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", outcome="unscored")
    return rollout.rollout_id


def _packed(dtype: str, values: list[Any]) -> dict[str, str]:
    raw = struct.pack(f"<{len(values)}{ {'i32': 'i', 'u8': 'B', 'f32': 'f'}[dtype] }", *values)
    return {"dtype": dtype, "data": base64.b64encode(raw).decode()}
