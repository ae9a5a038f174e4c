"""A model server without a model: it renders a chat template, tokenises the prompt, samples what its policy wants to
say in tokens of its own choice, and keeps the record of every call. The gateway's own code writes the spans."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Literal

from jinja2 import Environment, Template

from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.recording.spans import spans_of
from agentlightning.types import Span
from tests.drift.families import END, Family

Json = dict[str, Any]
Manner = Literal["canonical", "otherwise", "noise"]
"""Spelling of the policy's text: in the tokenizer's tokens, in other tokens, or in any tokens at all."""

TEMPLATES = {
    # Shows what was said as it was said.
    "faithful": "{% for m in messages %}<|{{ m.role }}|>{% for c in m.tool_calls or [] %}{{ c.raw }}{% endfor %}"
    "{{ m.content or '' }}<|end|>\n{% endfor %}<|assistant|>",
    # Leaves out what was thought in earlier turns.
    "forgets thoughts": "{% for m in messages %}<|{{ m.role }}|>{{ (m.content or '').split('</think>')[-1] }}"
    "<|end|>\n{% endfor %}<|assistant|>",
    # Writes tool calls anew, as JSON of its own spelling.
    "writes calls anew": "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.call | json }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "<|assistant|>",
    # Has words instead of special tokens between the turns, so that tokens may merge across the seam.
    "words only": "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content or '' }}\n{% endfor %}Assistant: ",
    # Opens a thought in the prompt, and shows past turns without it.
    "opens a thought": "{% for m in messages %}<|{{ m.role }}|>{{ (m.content or '').split('</think>')[-1] }}<|end|>\n"
    "{% endfor %}<|assistant|><think>",
}
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Recorded:
    """The engine's record of one call; the tests compare everything with it."""

    call_id: str
    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    prompt_text: str
    completion_text: str
    """Text of the tokens, the end of the turn included."""


@dataclass
class Engine:
    """One attempt's view of a model server behind the gateway."""

    family: Family
    template: str
    random: Random
    manner: Manner = "canonical"
    log: list[Recorded] = field(default_factory=list[Recorded])
    spans: list[Span] = field(default_factory=list[Span])

    def ask(self, messages: Sequence[Json], *, say: str, cut_after: int | None = None) -> Json:
        """Answer a request as a server would; `say` is what the policy has in mind, `cut_after` a limit in tokens."""
        request: Json = {"model": "m", "messages": list(messages)}
        text = self._render(messages)
        prompt, completion = self.family.encode(text), self._sample(say)
        stopped = cut_after is None or cut_after >= len(completion)
        completion = completion[:cut_after]
        logprobs = [-self.random.random() for _ in completion]
        call = GatewayCall("ro", "at", len(self.log) + 1, request=request)
        message = self._message(completion)
        reason = "tool_calls" if message.get("tool_calls") else "stop" if stopped else "length"
        choice: Json = {"index": 0, "message": message, "finish_reason": reason, "token_ids": completion}
        reply: Json = {"id": f"chatcmpl-{len(self.log)}", "model": "m", "prompt_token_ids": prompt, "choices": [choice]}
        call.answered(reply, CallTokens(prompt, completion, logprobs))
        spoken = self.family.decode(completion)
        self.log.append(Recorded(call.call_id, prompt, completion, logprobs, text, spoken))
        self.spans.extend(spans_of(call))
        return message

    def _render(self, messages: Sequence[Json]) -> str:
        shaped = [
            {**message, "tool_calls": list(map(_shaped, message.get("tool_calls") or []))} for message in messages
        ]
        return _compiled(self.template).render(messages=shaped)

    def _sample(self, say: str) -> list[int]:
        end = [] if self.template == "words only" else [self.family.tokenizer.token_to_id(END)]
        spoken = self.family.encode(say)
        if self.manner == "otherwise":
            spoken = self.family.otherwise(spoken, self.random)
        if self.manner == "noise":
            spoken = self.family.noise(self.random.randint(1, 12), self.random)
        return [*spoken, *end]

    def _message(self, completion: list[int]) -> Json:
        ended = completion[-1:] == [self.family.tokenizer.token_to_id(END)]
        text = self.family.decode(completion[:-1] if ended else completion)
        calls = _CALL.findall(text)
        if not calls or not all(map(_is_call, calls)):
            return {"role": "assistant", "content": text}
        made = [{"id": f"t{len(self.log)}", "type": "function", "function": _function(call)} for call in calls]
        return {"role": "assistant", "content": _CALL.sub("", text) or None, "tool_calls": made}


@cache
def _compiled(template: str) -> Template:
    environment = Environment()
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True)
    return environment.from_string(TEMPLATES[template])


def _is_call(text: str) -> bool:
    try:
        call = json.loads(text)
        return isinstance(call, dict) and "arguments" in call
    except ValueError:
        return False


def _function(text: str) -> Json:
    """Return a call as the API spells it; the arguments keep the policy's own spelling, as good servers do."""
    call = json.loads(text)
    raw = re.sub(r'.*"arguments"\s*:', "", text, flags=re.DOTALL).strip().removesuffix("}").strip()
    return {"name": call.get("name"), "arguments": raw, "raw": text}


def _shaped(call: Json) -> Json:
    function = call["function"]
    whole = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    return {"raw": f"<tool_call>{function.get('raw')}</tool_call>", "call": whole}
