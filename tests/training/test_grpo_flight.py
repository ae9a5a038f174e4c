"""Asynchronous collection: groups that are dropped, evaluations, drains and rewards of groups in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.ledger_records import check_ledger
from agentlightning.training.replay import replay
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import SMALL, ask, fit, say, two_turns
from tests.training.conformance.cases import AHEAD, POLICIES, RUN, STEPS, assert_complete, fit_whole, read, stored

TASKS = ["one", "two", "three", "four"]


def place_of(rollout: AttemptedRollout) -> tuple[int, int, int]:
    """Return step, task and sample of a rollout."""
    about: dict[str, Any] = rollout.metadata or {}
    return about["step"], about["task"], about["sample"]


@pytest.mark.parametrize("settings", [{"num_iterations": 2, "minibatch_rollouts": 4}, {"loss_type": "gspo"}])
def test_every_step_can_be_taken_again_from_its_records(
    untrained_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    fit_whole(AHEAD, untrained_model, tmp_path, **settings)
    for line in read(tmp_path).lines[1:]:
        update, step = line["update"], line["step"]
        assert update["stale_kl"] > 0
        assert update.get("first_ratio_error", 0.0) < 1e-3, "age is no difference of engine and learner"
        assert update["update_kl"] >= 0
        assert update["stale_kl"] + update["fresh_kl"] == pytest.approx(update["approx_kl"], rel=1e-3, abs=1e-7)
        assert stored(tmp_path, lambda store, step=step: replay(store, RUN, step)).differences == []


def test_several_policies_learn_ahead_of_their_weights(untrained_model: Path, tmp_path: Path) -> None:
    both = dataclasses.replace(AHEAD, roles=POLICIES.roles)
    fit_whole(both, untrained_model, tmp_path, policies=list(POLICIES.roles))
    books = read(tmp_path)
    assert_complete(books, STEPS)
    assert [line["flight"]["max_staleness"] for line in books.lines] == [0, 1, 1, 1]
    assert all(line["update"][f"{role}/tokens"] for line in books.lines for role in both.roles)


def test_a_group_that_outlives_its_weights_is_dropped_and_holds_nobody_up(untrained_model: Path) -> None:
    later = threading.Event()

    @agl.rollout
    def slow_once(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        reply = ask(llm, [say(task)])["content"]
        step, number, sample = place_of(rollout)
        if step >= 5:
            later.set()
        if (step, number, sample) == (1, 1, 0):
            assert later.wait(60)
        return len(reply) + rollout.start_time % 1

    store = agl.InMemoryLightningStore()
    result = fit(
        slow_once, TASKS, store=store, model=untrained_model, max_steps=7, max_staleness=1, trainer_run_id="slow"
    )
    late = [figures for figures in result.metrics if figures.flight["dropped"]]
    assert [figures.flight["dropped"] for figures in late] == [[[1, 1, None]]]
    assert late[0].flight["dropped_groups"] == 1
    assert late[0].calls_excluded["too_stale"] == 4
    assert late[0].rollouts_excluded == {"too_stale": 4}
    assert all(len(figures.flight["taken"]) == 2 for figures in result.metrics)
    assert not any([1, 1, None] in figures.flight["taken"] for figures in result.metrics)
    assert asyncio.run(check_ledger(store, "slow")).adds_up


def test_an_evaluation_has_the_engine_for_itself(untrained_model: Path) -> None:
    spans: list[tuple[str, float, float]] = []
    second_step = threading.Event()

    @agl.rollout
    def timed(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        began = time.monotonic()
        reward = two_turns(task, llm)
        if rollout.mode == "train" and place_of(rollout) == (2, 0, 0):
            second_step.set()
        if rollout.mode == "train" and place_of(rollout) == (1, 0, 0):
            assert second_step.wait(60)  # a version old when it is trained
        spans.append((str(rollout.mode), began, time.monotonic()))
        return reward + began % 1

    result = fit(
        timed,
        TASKS,
        model=untrained_model,
        max_steps=4,
        eval_steps=1,
        max_staleness=2,
        val_dataset=["five", "six", "seven", "eight"],
    )
    assert len(result.evaluations) == 2 + 3 + 2
    training = [(began, ended) for mode, began, ended in spans if mode == "train"]
    held_out = [(began, ended) for mode, began, ended in spans if mode == "val"]
    assert held_out
    assert not [one for one in held_out for other in training if one[0] < other[1] and other[0] < one[1]]
    assert max(figures.flight.get("max_staleness", 0) for figures in result.metrics) >= 1


class _HeldModel(http.server.BaseHTTPRequestHandler):
    """A model server beside the policy's engine, which answers only after the loop's first drain has timed out."""

    asked = threading.Event()
    may_answer = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.asked.set()
        assert self.may_answer.wait(60)
        message = {"role": "assistant", "content": "done"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"id": "x", "object": "chat.completion", "model": "held", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _OnRetry(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "weights are unchanged; retrying" in record.getMessage():
            _HeldModel.may_answer.set()


def test_a_call_that_is_in_progress_holds_the_weights_only_until_they_are_tried_again(untrained_model: Path) -> None:
    @agl.rollout
    def asks_another(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        if place_of(rollout) == (2, 0, 0):
            ask(llm.model_copy(update={"model": "held"}), [say(task)])
        elif place_of(rollout)[0] == 1:
            assert _HeldModel.asked.wait(60)  # so that the call is in progress when the weights are to change
        return len(ask(llm, [say(task)])["content"]) + rollout.start_time % 1

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _HeldModel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parameters = {
        "model": "hosted_vllm/held",
        "api_base": f"http://127.0.0.1:{server.server_port}/v1",
        "api_key": "none",
    }
    handler = _OnRetry()
    logging.getLogger("agentlightning").addHandler(handler)
    try:
        result = fit(
            asks_another,
            TASKS,
            model=untrained_model,
            max_steps=3,
            max_staleness=1,
            step_timeout_seconds=20.0,
            trainer_llm_proxy=agl.LLMProxy(model_list=[{"model_name": "held", "litellm_params": parameters}]),
            trainer_runner={"type": "agentlightning.LitAgentRunner", "concurrency": 16},
        )
    finally:
        logging.getLogger("agentlightning").removeHandler(handler)
        server.shutdown()
        server.server_close()
    assert _HeldModel.may_answer.is_set()
    assert [figures.flight["dropped_groups"] for figures in result.metrics] == [0, 0, 0]
    assert result.steps == 3


def test_the_rollouts_of_a_group_in_flight_are_rewarded_together(untrained_model: Path) -> None:
    def by_length(task: object, answers: Any) -> list[float]:
        return [float(len(answer[-1]["content"])) + number / 10 for number, answer in enumerate(answers)]

    @agl.rollout
    def says_something(task: str, llm: agl.LLM) -> None:
        ask(llm, [say(task)])

    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(
        algorithm=agl.GRPO(untrained_model, group_reward=by_length, **{**SMALL, "max_steps": 3, "max_staleness": 1}),
        store=store,
        strategy="shm",
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 4},
        run_id="judged",
    )
    trainer.fit(says_something, train_dataset=TASKS)
    assert all(figures.calls_trained == 8 for figures in trainer.result.metrics)
    assert asyncio.run(check_ledger(store, "judged")).adds_up
