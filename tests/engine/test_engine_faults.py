"""What the engine does when something is wrong: with the body, the port, the weights, the moment."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder
from agentlightning.engine.engine import InferenceEngine
from agentlightning.training.learner.policy import Policy

LONG = 200  # tokens, as many as the context allows


def ask(engine: InferenceEngine, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": engine.model_name, "messages": [{"role": "user", "content": "What is 3 plus 4?"}], **fields}
    return send(engine, json.dumps(body).encode())


def send(engine: InferenceEngine, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{engine.base_url}/chat/completions", body)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)["error"]


def without_end(policy: Policy) -> Policy:
    """The policy with an end-of-sequence token that is never drawn, so that completions are as long as allowed."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[policy.tokenizer.eos_token_id] = 0.0
    policy.model.generation_config.eos_token_id = None
    policy.tokenizer.eos_token = "<pad>"
    return policy


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused(engine: InferenceEngine, body: bytes) -> None:
    status, error = send(engine, body)
    assert (status, error["code"]) == (400, "invalid_json")


def test_a_completion_that_would_not_fit_is_refused_before_it_starts(engine: InferenceEngine) -> None:
    status, error = ask(engine, max_tokens=250)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert engine.stats().completions == 0


def test_a_request_without_a_limit_ends_at_the_engines_own(policy: Policy) -> None:
    engine = InferenceEngine(without_end(policy), max_new_tokens=7)
    engine.start()
    _, reply = ask(engine)
    engine.stop()
    assert reply["usage"]["completion_tokens"] == 7
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_taken_port_is_an_error_that_names_it(engine: InferenceEngine, policy: Policy) -> None:
    port = int(engine.base_url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match=f"127.0.0.1:{port}.*port 0 takes a free one"):
        InferenceEngine(policy, port=port).start()


def test_an_engine_is_started_once_and_has_no_address_before(policy: Policy) -> None:
    engine = InferenceEngine(policy)
    with pytest.raises(RuntimeError, match="start"):
        _ = engine.base_url
    engine.start()
    with pytest.raises(RuntimeError, match="started once"):
        engine.start()
    engine.stop()


@pytest.mark.parametrize("limit", ["max_batch", "max_waiting", "max_new_tokens"])
def test_a_limit_below_one_is_refused_by_name(policy: Policy, limit: str) -> None:
    with pytest.raises(ValueError, match=limit):
        InferenceEngine(policy, **{limit: 0})  # type: ignore[arg-type]  # a limit of the right type


def test_broken_weights_are_an_error_of_the_server_and_it_goes_on(engine: InferenceEngine, policy: Policy) -> None:
    weight = policy.model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    status, error = ask(engine)
    assert status == 500
    assert "no finite probabilities" in error["message"]
    with torch.no_grad():
        weight.copy_(before)
    assert ask(engine, max_tokens=2)[0] == 200


def test_weights_that_change_under_a_completion_end_it(policy: Policy) -> None:
    engine = InferenceEngine(without_end(policy))
    engine.start()
    with ThreadPoolExecutor(1) as pool:
        with policy.lock:  # the decoder cannot take a token while this is held
            asked = pool.submit(ask, engine, max_tokens=LONG)
            in_flight(engine)
        with policy.lock:
            policy.weight_version += 1
        status, error = asked.result()
    assert ask(engine, max_tokens=2)[1]["system_fingerprint"] == "agl-w1"
    engine.stop()
    # it may have been admitted after the change: then all of it is made by the new weights
    assert (status, error.get("code")) == (503, "weights_changed") or error["system_fingerprint"] == "agl-w1"


def test_a_swap_that_cannot_wait_leaves_the_engine_as_it_was(policy: Policy) -> None:
    engine = InferenceEngine(without_end(policy))
    engine.start()
    with ThreadPoolExecutor(1) as pool:
        with policy.lock:
            asked = pool.submit(ask, engine, max_tokens=LONG)
            in_flight(engine)
            with pytest.raises(TimeoutError, match="1 completions are still in flight"), engine.swap(timeout=0.01):
                pass
        assert asked.result()[0] == 200
    with engine.swap(), pytest.raises(RuntimeError, match="open already"), engine.swap():
        pass
    assert ask(engine, max_tokens=1)[0] == 200
    engine.stop()


def test_stopping_answers_who_waits_and_who_is_in_flight(policy: Policy) -> None:
    engine = InferenceEngine(without_end(policy), max_batch=1)
    engine.start()
    with ThreadPoolExecutor(2) as pool:
        with policy.lock:
            asked = [pool.submit(ask, engine, max_tokens=LONG) for _ in range(2)]
            in_flight(engine, waiting=1)
            stopping = threading.Thread(target=engine.stop)
            stopping.start()
        stopping.join()
        answers = [future.result() for future in asked]
    assert {status for status, _ in answers} == {503}
    assert {error["code"] for _, error in answers} == {"stopping"}


def test_health_and_models_say_what_is_served(engine: InferenceEngine) -> None:
    with urllib.request.urlopen(engine.base_url.replace("/v1", "/health"), timeout=10) as answer:
        assert json.load(answer) == {"status": "ok", "weight_version": 0, "waiting": 0, "in_flight": 0}
    with urllib.request.urlopen(f"{engine.base_url}/models", timeout=10) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["policy"]


def test_the_openai_client_reads_replies_and_errors(engine: InferenceEngine) -> None:
    with openai.OpenAI(base_url=engine.base_url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Add 3 and 4."}]
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=3, logprobs=True)
        assert reply.usage is not None
        assert reply.usage.completion_tokens <= 3
        with pytest.raises(openai.BadRequestError, match="does not support best_of=2"):
            client.chat.completions.create(model="policy", messages=messages, extra_body={"best_of": 2})


def in_flight(engine: InferenceEngine, waiting: int = 0) -> None:
    """Wait until the engine has taken one request and so many wait behind it."""
    loop = engine._loop
    with loop._changed:
        assert loop._changed.wait_for(lambda: (len(loop._in_flight), len(loop._waiting)) == (1, waiting), 10)


def few_at_once(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let the memory suffice for so many completions; return the list that says how many each step tried."""
    tried: list[int] = []
    real = Decoder.step

    def step(decoder: Decoder) -> list[Completion]:
        tried.append(len(decoder))
        if len(decoder) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of ...")
        return real(decoder)

    monkeypatch.setattr(Decoder, "step", step)
    return tried


def test_calls_that_the_memory_does_not_suffice_for_at_once_go_on_in_smaller_numbers(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replies = []
    for most in (8, 3):
        with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
            engine = InferenceEngine(policy, max_batch=8, max_new_tokens=16)
            engine.start()
            tried = few_at_once(patch, most)
            calls = [pool.submit(ask, engine, seed=n, logprobs=True, top_logprobs=2, n=2) for n in range(8)]
            replies.append([call.result() for call in calls])
            engine.stop()
    assert [status for status, _ in replies[1]] == [200] * 8
    for (_, one), (_, other) in zip(*replies, strict=True):
        assert [choice["message"] for choice in one["choices"]] == [choice["message"] for choice in other["choices"]]
        for choice in other["choices"]:
            entries = choice["logprobs"]["content"]
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert one["usage"] == other["usage"]
    assert max(tried) > 3
    assert tried[-1] <= 3
    text = caplog.text
    assert "out of memory while" in text
    assert "(CUDA out of memory. Tried to allocate 20.00 MiB.): they go on, at most" in text
    assert "set engine_batch=" in text


def test_one_call_that_is_too_much_for_the_memory_says_so_and_the_next_one_is_answered(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Decoder.add

    def add(decoder: Decoder, new: list[Completion]) -> list[Completion]:
        if any(completion.max_new_tokens == 9 for completion in new):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
        return real(decoder, new)

    monkeypatch.setattr(Decoder, "add", add)
    status, error = ask(engine, max_tokens=9)
    assert (status, error["code"]) == (500, "out_of_memory")
    assert (
        "too much for the memory of cpu (CUDA out of memory. Tried to allocate 20.00 MiB.). Try bf16"
        in error["message"]
    )
    assert ask(engine, max_tokens=8)[0] == 200
