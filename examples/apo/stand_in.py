"""A server that replaces three models and replies by rules: no download, no account, the same reply each time.

`selector` checks only the requirements that its instructions name. `critic` reads the failures in its request,
and proposes a rule for the most frequent need that the prompt does not name. It knows neither rooms nor tasks.
`assistant` calculates, and adds only the words that its instructions ask for.
"""

from __future__ import annotations

import json
import operator
import os
import re
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from room_selector import NEEDS, smallest

import agentlightning as agl

_CALCULATION = re.compile(r"(\d+) (plus|minus|times) (\d+)")
_OPERATORS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}

_CASE = re.compile(r"(?=<rollout |<trace |^# Example \d+)", re.MULTILINE)
_FAILED = re.compile(r"(?:reward|score)(?: is|\W)\W{0,3}0", re.IGNORECASE)
_TEMPLATE = re.compile(r"<template>\n(.*?)\n</template>|```[^\n]*\n(.*?)\n```", re.DOTALL)
_RULE = re.compile(r"^If .* is asked for, the room must have it\.$", re.MULTILINE)


def selector(messages: list[dict[str, str]]) -> str:
    """Answer as a model that follows exactly the instructions in its prompt."""
    rules, request = messages[0]["content"].casefold(), json.loads(messages[1]["content"])["request"]
    return smallest(request["people"], {name for name in NEEDS if request[name] and name in rules})


def critic(messages: list[dict[str, str]]) -> str:
    """Answer a request for a critique, for an edit by a critique, or (GEPA) for a new prompt in a fence."""
    text = "\n".join(message["content"] for message in messages)
    match = _TEMPLATE.search(text)
    if match is None:
        return "I see no prompt in this request."
    template = match[1] or match[2]
    if "<critique>" in text:
        return "\n".join([template, *_RULE.findall(text.partition("<critique>")[2])[:1]])
    needs: Counter[str] = Counter()
    for case in _CASE.split(text)[1:]:
        if _FAILED.search(case):
            requirements = set(re.findall(r'\\?"(\w+)\\?": true', case))
            needs.update(name for name in sorted(requirements) if name not in template)
    rules = [f"If {name} is asked for, the room must have it." for name, _ in needs.most_common(1)]
    if not rules:
        rules = ["The prompt names all that was needed."] if match[1] else []
    return "\n".join(rules) if match[1] else "\n".join(["```", template, *rules, "```"])


def assistant(messages: list[dict[str, str]]) -> str:
    """Answer a question in the manner that the prompt asks for."""
    prompt = messages[0]["content"]
    calculation = _CALCULATION.search(prompt)
    if calculation is None:
        return "I can only calculate."
    left, name, right = calculation.groups()
    result = str(_OPERATORS[name](int(left), int(right)))
    if "number alone" in prompt:
        return result
    answer = f"It is {result}." if "knowledgeable" in prompt else f"{calculation[0]} is {result}."
    return answer + " Ask me anything!" * ("friendly" in prompt) + " I calculated it." * ("Explain" in prompt)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = _MODELS[request["model"]](request["messages"])
        message = {"role": "assistant", "content": answer}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "usage": usage}
        body = json.dumps({**reply, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


_MODELS = {"selector": selector, "critic": critic, "assistant": assistant}


@contextmanager
def model_server() -> Generator[None]:
    """Serve the stand-ins at `OPENAI_BASE_URL`, unless it or `OPENAI_API_KEY` is already set for a real model."""
    if {"OPENAI_BASE_URL", "OPENAI_API_KEY"} & os.environ.keys():
        if "OPENAI_MODEL" not in os.environ:
            raise SystemExit(
                "OPENAI_BASE_URL or OPENAI_API_KEY is set. Set OPENAI_MODEL to the name of a model on that server, too."
            )
        yield
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield
        finally:
            del os.environ["OPENAI_BASE_URL"]
            server.shutdown()


def llm(role: Literal["selector", "critic", "assistant"]) -> agl.LLM:
    """Return the model `OPENAI_MODEL`, or the stand-in for a role; call it within `model_server`."""
    return agl.LLM(
        endpoint=os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"),
        model=os.environ.get("OPENAI_MODEL", role),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
