"""A scripted model server whose prompts and completions go through one chat template, as those of a real engine do.

With it the tokens of a turn come back exactly at the start of the next prompt whenever the agent sent the turn back as
it was, tools and arguments included; so the token rows of a test tell whether a program's history survived its way.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from tests.stubs.model_replies import chat_frames, chat_reply, encode, logprobs_of
from tests.stubs.model_server import Exchange, Json, ModelServer, _send


class Engine(ModelServer):
    """The stub server with a chat template, and with chat completions only."""

    def __init__(self, answer: Callable[[Json], str | Json]) -> None:
        super().__init__(answer)
        self.trouble: list[Exception] = []
        """Errors of a script that got a request it does not expect."""
        self._names = (f"chatcmpl-{number}" for number in itertools.count(1))

    @override
    async def _reply(self, exchange: Exchange, writer: asyncio.StreamWriter) -> bool:
        if exchange.path != "/v1/chat/completions":
            return await _send(writer, 404, b'{"error": {"message": "chat completions only"}}', {})
        try:
            reply = self.reply(exchange.request)
        except Exception as error:
            self.trouble.append(error)
            raise
        exchange.status, exchange.reply = 200, reply
        if exchange.request.get("stream"):
            return await self._stream(exchange, chat_frames(reply, exchange.request), writer)
        return await _send(writer, 200, json.dumps(reply).encode(), {})

    def reply(self, request: Json) -> Json:
        """Return the reply to a request, with the tokens of the template."""
        reply = chat_reply(request, self.answer(request), next(self._names), tokens=True)
        put_tokens(reply, encode(template(request)), encode(said(reply["choices"][0]["message"])))
        return reply


def put_tokens(reply: Json, prompt: list[int], completion: list[int]) -> None:
    """Replace the tokens of a reply with one choice."""
    (choice,) = reply["choices"]
    if "token_ids" in choice:
        reply["prompt_token_ids"], choice["token_ids"] = prompt, completion
    if choice["logprobs"]:
        pairs = zip(completion, logprobs_of(completion), strict=True)
        choice["logprobs"] = {"content": [{"token": str(t), "logprob": p, "top_logprobs": []} for t, p in pairs]}
    counts = (len(prompt), len(completion), len(prompt) + len(completion))
    reply["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))


def template(request: Json) -> str:
    """Return the whole prompt as text: the tools, every message, and the beginning of the reply."""
    tools = [json.dumps(tool["function"], sort_keys=True) for tool in request.get("tools") or []]
    return "\n".join([*tools, *(f"<{m['role']}> {said(m)}" for m in request["messages"]), "<assistant>"])


def said(message: Json) -> str:
    """Return the text of one message: thoughts, text, then its tool calls with their arguments in one spelling."""
    content = message.get("content") or []
    thoughts = [f"<think> {message['reasoning_content']} </think>"] if message.get("reasoning_content") else []
    words = [content] if isinstance(content, str) else [part.get("text") or part["type"] for part in content]
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return " ".join([*thoughts, *words, *(f"{f['name']} {json.dumps(json.loads(f['arguments']))}" for f in functions)])


# --- what such a model says ------------------------------------------------------------------------------------------


def call(name: str, number: int = 0, **arguments: Any) -> Json:
    """Return an answer that calls one tool."""
    return calls((name, arguments), number=number)


def calls(*named_arguments: tuple[str, Json], number: int = 0) -> Json:
    """Return an answer that calls several tools at once. `number` tells the calls of several turns apart."""
    made = [
        {"id": f"call_{number}_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(named_arguments)
    ]
    return {"content": None, "tool_calls": made}


def last(request: Json) -> Json:
    """Return the last message of a request."""
    return request["messages"][-1]


def offered(request: Json) -> set[str]:
    """Return the names of the tools that a request offers."""
    return {tool["function"]["name"] for tool in request.get("tools") or []}


def numbers(request: Json) -> Json:
    """Return the two numbers of the question, the first message of the user."""
    question = next(said(message) for message in request["messages"] if message["role"] == "user")
    match = re.search(r"(\d+) times (\d+)", question)
    assert match, question
    return {"a": int(match[1]), "b": int(match[2])}


def calculator(request: Json) -> str | Json:
    """A model that multiplies with its tool and then says the result."""
    if last(request)["role"] == "tool":
        return f"It is {said(last(request)).strip()}, no doubt."
    return call("multiply", **numbers(request))


def both_ways(request: Json) -> str | Json:
    """A model that multiplies both ways at once and then says both results."""
    results = [said(message) for message in request["messages"] if message["role"] == "tool"]
    if results:
        return f"It is {' and '.join(results)}."
    factors = numbers(request)
    return calls(("multiply", factors), ("multiply", {"a": factors["b"], "b": factors["a"]}))


def steps(*answers: str | Json) -> Callable[[Json], str | Json]:
    """Return a model that gives one reply after the other, each after the result of a tool."""
    return lambda request: answers[sum(message["role"] == "tool" for message in request["messages"])]


def thinking(request: Json) -> Json:
    """The calculator, with a thought before each answer: "Thought  1.", and after the tool "Thought  3.".

    Two spaces show that nothing on the way tidies what is said.
    """
    answer = calculator(request)
    message = {"content": answer} if isinstance(answer, str) else answer
    spoken = [one for one in request["messages"] if one["role"] != "system"]
    return {**message, "reasoning_content": f"Thought  {len(spoken)}."}


def thoughts(request: Json) -> list[str | None]:
    """Return the thought of each earlier turn of the model, as it was sent back; None where it was dropped."""
    turns = [message for message in request["messages"] if message["role"] == "assistant"]
    return [turn.get("reasoning_content") or turn.get("reasoning") for turn in turns]
