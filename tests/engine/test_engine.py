"""The embedded engine over a real socket, with a real model: tokens, log-probabilities, pauses, and failures."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import openai
import pytest
import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.demo.calculator import TOOLS
from agentlightning.engine import decoder
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder
from agentlightning.engine.engine import InferenceEngine
from agentlightning.training.batch import make_batch
from agentlightning.training.learner.policy import Policy
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.updater import DrainTimeoutError, Learner, Updater
from tests.engine.byte_policy import byte_policy
from tests.engine.clients import ask, body_of, logprobs, refusal, tokens

LONG = 150  # tokens; the context is 256


@pytest.fixture
def endless(policy: Policy) -> Policy:
    """The policy with an end-of-sequence token that is hardly drawn, so that completions are long."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[policy.tokenizer.eos_token_id] = 0.0
    policy.model.generation_config.eos_token_id = None
    policy.tokenizer.eos_token = "<pad>"
    return policy


@pytest.fixture
def endless_engine(endless: Policy) -> Iterator[InferenceEngine]:
    engine = InferenceEngine(endless, max_batch=1, max_new_tokens=7)
    engine.start()
    yield engine
    engine.stop()


def await_load(engine: InferenceEngine, in_flight: int, waiting: int = 0) -> None:
    """Wait until so many completions are in flight, and so many requests wait behind them."""
    loop = engine._loop
    with loop._changed:
        assert loop._changed.wait_for(lambda: (len(loop._in_flight), len(loop._waiting)) == (in_flight, waiting), 30)


def port_of(engine: InferenceEngine) -> int:
    return int(engine.base_url.split(":")[2].split("/")[0])


# --- replies --------------------------------------------------------------------------------------------------------


def test_a_reply_is_spelled_as_openai_and_vllm_spell_it(engine: InferenceEngine) -> None:
    reply = ask(engine, max_tokens=5, tools=TOOLS)
    choice = reply["choices"][0]
    assert (reply["object"], reply["system_fingerprint"]) == ("chat.completion", "agl-w0")
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) <= 5
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    plain = ask(engine, max_tokens=5, return_token_ids=False)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_log_probabilities_equal_a_forward_pass_of_the_same_weights(engine: InferenceEngine, policy: Policy) -> None:
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda n: ask(engine, max_tokens=12, seed=n, n=2), range(6)))
    assert len({tuple(tokens(reply)) for reply in replies}) > 1
    for reply, index in itertools.product(replies, range(2)):
        prompt, ids = reply["prompt_token_ids"], tokens(reply, index)
        mask, logps = [0] * len(prompt) + [1] * len(ids), [0.0] * len(prompt) + logprobs(reply, index)
        row = Sample("r", "a", prompt + ids, mask, logps, [], [])
        with torch.no_grad():
            expected = policy.logprobs(make_batch([row], [0.0]))[0, len(prompt) :]
        assert logprobs(reply, index) == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_request_without_a_limit_ends_at_the_engines_own(endless_engine: InferenceEngine) -> None:
    reply = ask(endless_engine)
    assert (len(tokens(reply)), reply["choices"][0]["finish_reason"]) == (7, "length")


def test_health_and_models_say_what_is_served(engine: InferenceEngine) -> None:
    with urllib.request.urlopen(engine.base_url.replace("/v1", "/health"), timeout=10) as answer:
        assert json.load(answer) == {"status": "ok", "weight_version": 0, "waiting": 0, "in_flight": 0}
    with urllib.request.urlopen(f"{engine.base_url}/models", timeout=10) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["policy"]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"best_of": 2}, 400, "unsupported_value", "does not support best_of=2"),
        ({"messages": [{"role": "user", "content": "9" * 1000}]}, 400, "context_length_exceeded", "the messages use"),
        ({"max_tokens": 256}, 400, "context_length_exceeded", "completion requests 256"),
        ({"model": "somebody else"}, 404, "model_not_found", "use 'policy'"),
        ({"n": 9}, 400, "invalid_value", "'n' must be at most 8"),
        ({"logit_bias": {"99999": 1}}, 400, "invalid_value", "'logit_bias' names the token 99999"),
        ({"max_tokens": 5, "min_tokens": 9}, 400, "invalid_value", "'min_tokens' must be at most"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_its_code(
    engine: InferenceEngine, fields: dict[str, Any], status: int, code: str, words: str
) -> None:
    refused, error = refusal(engine, **fields)
    assert (refused, error["code"]) == (status, code)
    assert words in error["message"]
    assert engine.stats().completions == 0


def test_too_many_waiting_requests_get_a_time_to_retry(policy: Policy) -> None:
    engine = InferenceEngine(policy, max_batch=1, max_waiting=1)
    engine.start()
    with ThreadPoolExecutor(12) as pool, engine.paused():
        futures = [pool.submit(ask, engine, max_tokens=2) for _ in range(12)]
        refused = [future.exception() for future in itertools.islice(as_completed(futures, timeout=20), 8)]
    engine.stop()
    for error in refused:
        assert isinstance(error, openai.APIStatusError)
        assert (error.status_code, bool(error.response.headers["retry-after"])) == (503, True)


@pytest.mark.parametrize("limit", ["max_batch", "max_waiting", "max_new_tokens"])
def test_a_limit_below_one_is_refused_by_name(policy: Policy, limit: str) -> None:
    with pytest.raises(ValueError, match=limit):
        InferenceEngine(policy, **{limit: 0})  # type: ignore[arg-type]  # a limit of the right type


# --- start, pause, stop ----------------------------------------------------------------------------------------------


def test_an_engine_is_started_once_and_leaves_no_thread_and_no_port(policy: Policy) -> None:
    before = set(threading.enumerate())
    engine = InferenceEngine(policy)
    with pytest.raises(RuntimeError, match="start"):
        _ = engine.base_url
    engine.start()
    with pytest.raises(RuntimeError, match="started only once"):
        engine.start()
    engine.stop()
    engine.stop()
    assert set(threading.enumerate()) <= before
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port_of(engine))) != 0


def test_while_paused_nothing_is_served_and_after_it_the_new_weights_are(
    engine: InferenceEngine, policy: Policy
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with engine.paused():
            future = pool.submit(ask, engine, max_tokens=3)
            await_load(engine, 0, waiting=1)
            policy.weight_version += 1
            assert not future.done()
        assert future.result(20)["system_fingerprint"] == "agl-w1"


def test_weights_that_change_under_a_completion_end_it(endless: Policy, endless_engine: InferenceEngine) -> None:
    with ThreadPoolExecutor(1) as pool:
        with endless.lock:  # the decoder cannot take a token while this is held
            future = pool.submit(ask, endless_engine, max_tokens=LONG)
            await_load(endless_engine, 1)
        with endless.lock:
            endless.weight_version += 1
        error = future.exception()
    # it may have been admitted after the change: then all of it is made by the new weights
    assert "weights changed" in str(error) if error else future.result()["system_fingerprint"] == "agl-w1"
    assert ask(endless_engine, max_tokens=2)["system_fingerprint"] == "agl-w1"


def test_a_pause_that_cannot_wait_leaves_the_engine_as_it_was(endless: Policy, endless_engine: InferenceEngine) -> None:
    with ThreadPoolExecutor(1) as pool:
        with endless.lock:
            future = pool.submit(ask, endless_engine, max_tokens=LONG)
            await_load(endless_engine, 1)
            with (
                pytest.raises(TimeoutError, match="1 completion still in progress"),
                endless_engine.paused(timeout=0.01),
            ):
                pass
            updater = Updater([Learner(None, GRPOSettings(model="any"), endless)], [endless_engine])
            with pytest.raises(DrainTimeoutError, match="1 completion still in progress"), updater.paused(0.01):
                pytest.fail("the weights were about to change")
        assert tokens(future.result())
    with endless_engine.paused(), pytest.raises(RuntimeError, match="already paused"), endless_engine.paused():
        pass
    assert ask(endless_engine, max_tokens=1)


def test_stopping_answers_waiting_and_running_requests(endless: Policy, endless_engine: InferenceEngine) -> None:
    with ThreadPoolExecutor(2) as pool:
        with endless.lock:
            futures = [pool.submit(refusal, endless_engine, max_tokens=LONG) for _ in range(2)]
            await_load(endless_engine, 1, waiting=1)
            stopping = threading.Thread(target=endless_engine.stop)
            stopping.start()
        stopping.join()
        answers = [future.result() for future in futures]
    assert [(status, error["code"]) for status, error in answers] == [(503, "stopping")] * 2


def test_a_client_that_goes_away_ends_its_completions() -> None:
    engine = InferenceEngine(byte_policy(context=100_000), max_batch=4, max_new_tokens=90_000)
    engine.start()
    try:
        end = str(engine._policy.tokenizer.eos_token_id)
        raw = json.dumps(body_of(engine, n=4, max_tokens=90_000, logit_bias={end: -100})).encode()
        with socket.create_connection(("127.0.0.1", port_of(engine))) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            await_load(engine, 4)
        await_load(engine, 0)  # long before the 90,000 tokens are there
        assert len(ask(engine, max_tokens=3)["choices"]) == 1
    finally:
        engine.stop()


# --- weights and memory ---------------------------------------------------------------------------------------------


def test_broken_weights_are_an_error_of_the_server_and_it_goes_on(engine: InferenceEngine, policy: Policy) -> None:
    weight = policy.model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    status, error = refusal(engine)
    assert status == 500
    assert "no finite probabilities" in error["message"]
    with torch.no_grad():
        weight.copy_(before)
    assert ask(engine, max_tokens=2)


def few_at_once(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let the memory suffice for so many completions; return the list that says how many each step tried."""
    tried: list[int] = []
    real = Decoder.step

    def step(decoding: Decoder) -> list[Completion]:
        tried.append(decoding.running)
        if decoding.running > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of ...")
        return real(decoding)

    monkeypatch.setattr(Decoder, "step", step)
    return tried


def test_calls_that_the_memory_does_not_suffice_for_at_once_go_on_in_smaller_numbers(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replies: list[list[dict[str, Any]]] = []
    for most in (8, 3):
        with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
            engine = InferenceEngine(policy, max_batch=8, max_new_tokens=16)
            engine.start()
            tried = few_at_once(patch, most)
            calls = [pool.submit(ask, engine, seed=n, top_logprobs=2, n=2) for n in range(8)]
            replies.append([call.result() for call in calls])
            engine.stop()
    for one, other in zip(*replies, strict=True):
        assert [choice["message"] for choice in one["choices"]] == [choice["message"] for choice in other["choices"]]
        for choice in other["choices"]:
            assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
        assert one["usage"] == other["usage"]
    assert max(tried) > 3 >= tried[-1]
    assert "out of memory with" in caplog.text
    assert "(CUDA out of memory. Tried to allocate 20.00 MiB.); continuing with at most" in caplog.text
    assert "set engine_batch=" in caplog.text


def test_one_call_that_is_too_much_for_the_memory_says_so_and_the_next_one_is_answered(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = decoder.draw

    def draw(logits: torch.Tensor, completions: Sequence[Completion]) -> tuple[list[int], list[float]]:
        if any(completion.max_new_tokens == 9 for completion in completions):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
        return real(logits, completions)

    monkeypatch.setattr(decoder, "draw", draw)
    status, error = refusal(engine, max_tokens=9)
    assert (status, error["code"]) == (500, "out_of_memory")
    words = "does not fit into the memory of cpu (CUDA out of memory. Tried to allocate 20.00 MiB.). Try bf16"
    assert words in error["message"]
    assert ask(engine, max_tokens=8)
