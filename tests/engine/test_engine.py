"""The embedded engine over a real socket, with a real model: tokens, log-probabilities, batching, refusals, swaps."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import pytest
import torch

from agentlightning.adapter.rows.samples import Sample
from agentlightning.demo.calculator import TOOLS
from agentlightning.engine.chat import parse_reply
from agentlightning.engine.engine import InferenceEngine
from agentlightning.llm_proxy.dialects import CHAT
from agentlightning.training.learner.batch import make_batch
from agentlightning.training.learner.policy import Policy

ASK = {"return_token_ids": True, "logprobs": True}


def post(engine: InferenceEngine, **body: Any) -> dict[str, Any]:
    body = {"model": engine.model_name, "messages": [{"role": "user", "content": "What is 3 plus 4?"}], **body}
    request = urllib.request.Request(
        f"{engine.base_url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def refusal(engine: InferenceEngine, **body: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(engine, **body)
    with refused.value as answer:
        return answer.code, json.load(answer)["error"]


def test_a_reply_is_spelled_as_openai_and_vllm_spell_it(engine: InferenceEngine) -> None:
    reply = post(engine, max_tokens=5, temperature=1.0, tools=TOOLS, **ASK)
    choice = reply["choices"][0]
    assert reply["object"] == "chat.completion"
    assert reply["system_fingerprint"] == "agl-w0"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) <= 5
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    plain = post(engine, max_tokens=5)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_a_call_for_a_stream_is_answered_with_frames_that_hold_the_same(engine: InferenceEngine) -> None:
    whole = post(engine, max_tokens=6, seed=3, temperature=1.0, **ASK)
    body = {"model": engine.model_name, "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}
    body |= {"max_tokens": 6, "seed": 3, "temperature": 1.0, "stream": True, **ASK}
    request = urllib.request.Request(f"{engine.base_url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = [frame for frame in answer.read().split(b"\n\n") if frame]
    reader = CHAT.read_stream(body)
    for frame in frames:
        reader.feed(frame)
    assert reader.ended
    streamed = reader.reply()
    assert streamed is not None
    assert CHAT.tokens_of(streamed, {}) == CHAT.tokens_of(whole, {})
    assert streamed["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]


def test_log_probabilities_equal_a_forward_pass_of_the_same_weights(engine: InferenceEngine, policy: Policy) -> None:
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda n: post(engine, max_tokens=12, seed=n, temperature=1.0, **ASK), range(12)))
    assert len({tuple(reply["choices"][0]["token_ids"]) for reply in replies}) > 1
    for reply in replies:
        prompt, choice = reply["prompt_token_ids"], reply["choices"][0]
        tokens = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        row = Sample(
            "r", "a", prompt + tokens, [0] * len(prompt) + [1] * len(tokens), [0.0] * len(prompt) + logprobs, [], []
        )
        with torch.no_grad():
            expected = policy.logprobs(make_batch([row], [0.0]))[0, len(prompt) :]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_engine_keeps_a_record_of_what_it_consumed_and_produced(engine: InferenceEngine) -> None:
    reply = post(engine, max_tokens=4, **ASK)
    call = engine.record[-1]
    assert (call.response_id, call.prompt_ids, call.token_ids, call.weight_version) == (
        reply["id"],
        reply["prompt_token_ids"],
        reply["choices"][0]["token_ids"],
        0,
    )


def test_greedy_tokens_do_not_depend_on_who_else_is_in_the_batch(engine: InferenceEngine) -> None:
    questions = [f"What is {n} times {n + 1}?" * (1 + n % 3) for n in range(8)]

    def ask(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return post(engine, messages=messages, temperature=0, max_tokens=10, **ASK)["choices"][0]["token_ids"]

    alone = [ask(question) for question in questions]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, questions)) == alone


def test_the_same_seed_draws_the_same_tokens(engine: InferenceEngine) -> None:
    draws = [post(engine, max_tokens=12, seed=7, **ASK)["choices"][0]["token_ids"] for _ in range(2)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("best_of", 2), ("temperature", -1), ("max_tokens", 0), ("messages", "hello"), ("messages", [])],
)
def test_a_request_that_cannot_be_served_names_the_field(engine: InferenceEngine, field: str, value: Any) -> None:
    status, error = refusal(engine, **{field: value})
    assert status == 400
    assert field in error["message"]


def test_a_prompt_beyond_the_context_is_refused_by_openais_code(engine: InferenceEngine) -> None:
    status, error = refusal(engine, messages=[{"role": "user", "content": "9" * 1000}])
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_an_unknown_model_is_refused(engine: InferenceEngine) -> None:
    status, error = refusal(engine, model="somebody else")
    assert status == 404
    assert engine.model_name in error["message"]


def test_inside_a_swap_nothing_is_served_and_after_it_the_new_weights_are(
    engine: InferenceEngine, policy: Policy
) -> None:
    asked = threading.Event()
    replies: list[dict[str, Any]] = []

    def ask() -> None:
        asked.set()
        replies.append(post(engine, max_tokens=3))

    asking = threading.Thread(target=ask)
    with engine.swap():
        asking.start()
        asked.wait()
        policy.weight_version += 1
        assert not replies
    asking.join(20)
    assert replies[0]["system_fingerprint"] == "agl-w1"


def test_too_many_waiting_requests_are_told_to_come_back(policy: Policy) -> None:
    engine = InferenceEngine(policy, max_batch=1, max_waiting=1)
    engine.start()
    with ThreadPoolExecutor(12) as pool, engine.swap():
        asking = [pool.submit(post, engine, max_tokens=2) for _ in range(12)]
        refused = [future.exception() for future in itertools.islice(as_completed(asking, timeout=20), 8)]
    engine.stop()
    for error in refused:
        assert isinstance(error, urllib.error.HTTPError)
        with error:
            assert (error.code, bool(error.headers["retry-after"])) == (503, True)


def test_an_engine_that_stopped_leaves_no_thread_and_no_port(policy: Policy) -> None:
    before = set(threading.enumerate())
    engine = InferenceEngine(policy)
    engine.start()
    port = int(engine.base_url.rsplit(":", 1)[1].split("/")[0])
    engine.stop()
    engine.stop()
    assert set(threading.enumerate()) <= before
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    with pytest.raises(ValueError, match="loopback"):
        InferenceEngine(policy, host="0.0.0.0")


def test_tool_calls_are_parsed_and_a_malformed_one_stays_text() -> None:
    good = 'so: <tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'
    reply = parse_reply(good)
    assert reply.content == "so:"
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [
        ("calculator", {"expression": "1 + 2"})
    ]
    for text in ("<tool_call>{</tool_call>", '<tool_call>{"name": 1}</tool_call>', "<tool_call>", "plain"):
        assert parse_reply(text).content == text
        assert not parse_reply(text).tool_calls
