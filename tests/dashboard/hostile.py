"""A store in which every text that a program can write is hostile: it runs where it is taken for HTML, turns writing
round, is no whole Unicode, or is a million characters long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.training.ledger_records import pack
from agentlightning.types import LLM, AttemptError, BestFigure, PromptTemplate, RunRecord, Span, TraceStatus
from tests.adapter.span_maker import reward, span, spoken_call
from tests.dashboard.stores import HOSTILE, run_async

TEXT = HOSTILE.replace("\x00", "").replace("\ud800", "")
"""The hostile text without the characters that the store refuses: NUL and half a character."""
NAME = TEXT.replace("\u202c", "")[:200] + "\u202eturned \u2066 \U0001f642\u200d"
LONG = TEXT + "x" * 1_000_000
RUN = TEXT[:64] + "\u202erun"
TASK = TEXT[:40] + "\u202etask"


def hostile_store(path: Path) -> tuple[Path, str]:
    return path, run_async(lambda: _make(path))


async def _make(path: Path) -> str:
    store = SQLiteLightningStore(path, synchronous="NORMAL")
    config = {NAME: {NAME: LONG, "b": TEXT}, "c": LONG}
    await store.start_run(RUN, algorithm=NAME, config=config, versions={NAME: TEXT}, metadata={NAME: TEXT})
    prompt, llm = PromptTemplate(template=LONG, engine="f-string"), LLM(endpoint="http://h/", model=NAME)
    resources = await store.update_resources(NAME, {NAME: prompt, "llm " + NAME: llm}, run_id=RUN)
    await store.add_vocabulary(NAME, [TEXT, "\u202e", LONG, "\\xf0"])
    rollout = await store.start_rollout(
        {NAME: TEXT},
        run_id=RUN,
        mode="train",
        resources_id=resources.resources_id,
        metadata={"note": LONG, "step": 1, "task": TASK, NAME: NAME},
        worker_id=NAME,
    )
    place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    await store.add_many_spans([each.model_copy(update=place) for each in _spans()])
    await store.update_attempt(
        rollout.rollout_id,
        rollout.attempt.attempt_id,
        status="failed",
        outcome="policy_fault",
        outcome_reason=NAME,
        error=AttemptError(type=LONG, message=LONG, traceback=TEXT),
        rewards={NAME: 1.0, NAME + "2": 0.5},
    )
    await store.add_run_records(RUN, _records(rollout.rollout_id, rollout.attempt.attempt_id))
    best = BestFigure(name=NAME, step=1, value=0.5)
    error = AttemptError(type=LONG, message=LONG, traceback=LONG)
    await store.update_run(RUN, best=best, error=error, stop_reason=NAME)
    await store.update_worker(NAME, heartbeat_stats={NAME: LONG})
    await store.close()
    return rollout.rollout_id


def _spans() -> list[Span]:
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": LONG}, {"role": NAME, "content": TEXT}]
    names: dict[str, Any] = {"gen_ai.request.model": NAME, "agentlightning.agent": NAME}
    call = spoken_call("c1", 1, [0, 1], [2, 3], messages, TEXT, **names)
    attributes = {NAME: LONG, "tool.name": NAME, "gen_ai.tool.name": NAME}
    failed = span("f", NAME, None, 1.0, 2.0, 9).model_copy(
        update={"status": TraceStatus(status_code="ERROR", description=LONG), "attributes": attributes}
    )
    return [*call, reward("r", None, 9.0, 1.0, sequence_id=8), failed, span("g", LONG, "f", 1.0, 2.0, 10)]


def _records(rollout_id: str, attempt_id: str) -> list[RunRecord]:
    step = {"mean_reward": 0.5, "calls_captured": 2, "calls_trained": 1, "calls_excluded": {NAME: 1}}
    call = {"call_id": "c1", "attempt_id": attempt_id, "ending": "trained", "reason": None, "advantage": 1.0}
    row = {
        "row": 0,
        "policy": NAME,
        "vocabulary": NAME,
        "length": 4,
        "tokens": pack([0, 1, 2, 3], "i32"),
        "mask": pack([0, 0, 1, 1], "u8"),
        "engine_logprobs": pack([-1.0, -0.5], "f32"),
    }
    ledger = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "reward": 1.0,
        "verdict": None,
        "advantage": 1.0,
        "calls": [
            {**call, "row": 0, "tokens": 2, "weight_version": 1},
            {**call, "call_id": "c2", "ending": "excluded", "reason": NAME, "row": None, "tokens": 0},
        ],
        "rows": [row],
    }
    tasks = {"tasks": [TASK, "b"], "rewards": [1.0, 0.0], "value": 0.5}
    alarm = {"text": LONG, "state": "raised", "since": 1, "what_to_try": LONG}
    prompt = {"version": NAME, "parent": NAME, "state": NAME, "score": 0.5, "critique": LONG, "templates": {NAME: LONG}}
    return [
        RunRecord(kind="step", step=1, data={**step, "seconds": {NAME: 1.0}}),
        RunRecord(kind="ledger", step=1, name=rollout_id, data=ledger),
        RunRecord(kind="evaluation", step=0, name=NAME, data=tasks),
        RunRecord(kind="evaluation", step=1, name=NAME, data=tasks),
        RunRecord(kind="alarm", step=1, name=NAME, data=alarm),
        RunRecord(kind="checkpoint", step=1, data={"path": LONG, "weight_version": 1, "digest": NAME}),
        RunRecord(kind="prompt", step=1, name=NAME, data=prompt),
    ]
