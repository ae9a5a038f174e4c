"""Templates and tokenizers of Qwen, Llama and SmolLM: the next prompt begins with exactly the tokens so far.

Where it does not, the seam says why. The templates are those of the models' public cards, the vision parts left out. A
tokenizer splits text and knows special tokens as its family does, and has learned its merges from a few lines.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.rows.samples import samples_from_calls
from agentlightning.adapter.rows.seams import describe
from agentlightning.engine.chat import ChatFormat, message_body, parse_reply
from tests.adapter.span_maker import spoken_call

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen": _GPT4 % "", "llama3": _GPT4 % "{1,3}"}
SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
END = {"qwen": "<|im_end|>", "llama3": "<|eot_id|>", "smollm2": "<|im_end|>"}
LINES = [
    'call weather with {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} please',
    "It is cold in Oslo: bring a coat, a scarf and gloves.\n\nThe user asks for 12 days; I'd say it's enough.",
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function> café 漢字 👍🏽",
]
TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
FAMILY = {name: "llama3" if name == "llama3_1" else "smollm2" if name == "smollm2" else "qwen" for name in TEMPLATES}
ARGUMENTS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": ARGUMENTS}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": WEATHER}]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 12}}\n</tool_call>'
CALLS = {
    "qwen2_5": HERMES,
    "qwen3": f"<think>\nI'd better look.\n</think>\n\n{HERMES}",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n12\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_1": '{"name": "weather", "parameters": {"city": "Oslo", "days": 12}}',
}
"""Text of each model's reply when it follows its template."""


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    tokens, end = Tokenizer(models.BPE()), END[family]
    if family == "smollm2":
        split, by_regex = pre_tokenizers.Digits(individual_digits=True), True
    else:
        split, by_regex = pre_tokenizers.Split(Regex(SPLITS[family]), "isolated"), False
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_regex)
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.Sequence([split, byte_level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        LINES * 9, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    tokens.add_special_tokens(SPECIAL[family])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    )


class Talk:
    """A conversation of one model, token in, token out."""

    def __init__(self, template: str) -> None:
        self.family = FAMILY[template]
        tokenizer = copy.deepcopy(tokenizer_of(self.family))
        tokenizer.chat_template = TEMPLATES[template]
        self.tokenizer = tokenizer
        self.format = ChatFormat(tokenizer)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it cold in Oslo, in the next 12 days?"}]
        self.tools: list[dict[str, Any]] | None = None
        self.spans: list[Any] = []

    def say(self, text: str) -> list[int]:
        """Let the model reply with this; return all tokens of the call."""
        prompt = self.format.prompt_ids(self.messages, self.tools)
        token_ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        token_ids.append(self.tokenizer.convert_tokens_to_ids(END[self.family]))
        sent = [{"role": m["role"], "content": m.get("content") or ""} for m in self.messages]
        number = len(self.spans) // 2 + 1
        self.spans += spoken_call(f"c{number}", number, prompt, token_ids, sent, text)
        reply = self.format.reply(token_ids[:-1], with_tools=self.tools is not None)
        self.messages.append(json.loads(json.dumps(message_body(reply))))  # as a client gets it and sends it back
        return [*prompt, *token_ids]

    def hear(self, role: str, text: str) -> list[int]:
        """Add the agent's message; return the tokens of the next prompt."""
        self.messages.append({"role": role, "content": text})
        return self.format.prompt_ids(self.messages, self.tools)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_a_turn_of_words_continues_the_tokens_so_far(template: str) -> None:
    talk = Talk(template)
    for reply, turn in (("It is cold: bring a coat.\n\n1. a scarf", "And café 漢字?"), ("Yes, 12 of them.", "Thanks")):
        tokens = talk.say(reply)
        assert talk.hear("user", turn)[: len(tokens)] == tokens


@pytest.mark.parametrize("template", sorted(CALLS))
def test_a_turn_with_a_tool_continues_the_tokens_so_far(template: str) -> None:
    talk = Talk(template)
    talk.tools = TOOLS
    tokens = talk.say(CALLS[template])
    [call] = talk.messages[-1]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": 12}
    assert talk.hear("tool", "2 degrees")[: len(tokens)] == tokens
    more = talk.say("It is cold.")
    assert more[: len(tokens)] == tokens
    [row] = samples_from_calls(model_calls(talk.spans)).samples
    assert row.token_ids == more


def test_thinking_that_the_template_leaves_out_is_named_where_the_row_parts() -> None:
    talk = Talk("qwen3")
    talk.say("<think>\nI'd say it's cold.\n</think>\n\nBring a coat.")
    talk.hear("user", "And gloves?")
    talk.say("Yes.")
    calls = model_calls(talk.spans)

    def decode(ids: Any) -> str:
        return talk.format.text(list(ids))

    reading = samples_from_calls(calls, decode=decode)
    assert len(reading.samples) == 2
    [seam] = reading.seams
    assert seam.cause == "template"
    assert "template (the thinking of that reply is missing)" in describe(seam, calls, decode)


# --- the syntaxes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("syntax", "text", "calls"),
    [
        ("hermes", f"Let me look.\n{HERMES}", [("weather", {"city": "Oslo", "days": 12})]),
        ("hermes", '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>', [("a", {}), ("b", {})]),
        (
            "hermes",
            '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
            [("a", {}), ("b", {})],
        ),
        ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {"x": 1}}', [("a", {"x": 1})]),
        ("llama3_json", '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}', [("a", {}), ("b", {})]),
        ("llama3_json", '[{"name": "a", "arguments": {"y": "é"}}]', [("a", {"y": "é"})]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=run>\n<parameter=code>\nif a:\n    b\n</parameter>\n<parameter=n>\n[1]\n"
            "</parameter>\n</function>\n</tool_call>",
            [("run", {"code": "if a:\n    b", "n": [1]})],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=a><parameter=x>NaN</parameter></function></tool_call>",
            [("a", {"x": "NaN"})],
        ),
    ],
)
def test_calls_are_read_in_order_with_an_id_each(syntax: Any, text: str, calls: list[Any]) -> None:
    made = message_body(parse_reply(text, syntax))["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made] == calls
    assert len({call["id"] for call in made}) == len(calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": ["string", "integer"]}, "123", 123),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "true", True),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "integer"}, "about 12", "about 12"),
        ({"description": "of any type"}, "123", 123),
        ("no schema", "123", 123),
    ],
)
def test_a_value_in_a_tag_is_of_the_type_that_the_tools_schema_gives_it(schema: Any, text: str, value: object) -> None:
    chat = Talk("qwen3_coder").format
    tool = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"word": schema}}}}
    reply = f"<tool_call>\n<function=find>\n<parameter=word>\n{text}\n</parameter>\n</function>\n</tool_call>"
    [call] = chat.read(reply, [tool]).tool_calls
    assert json.loads(call.arguments) == {"word": value}


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a"} and more</tool_call>'),
        ("hermes", '{"name": "a", "arguments": {}}'),
        ("llama3_json", 'I call {"name": "a", "parameters": {}}'),
        ("llama3_json", '{"name": "a", "parameters": {}} so it is'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", "[" * 100_000),
        ("llama3_json", ""),
        ("qwen3_coder", "<tool_call><function=a><parameter=x>1</function></tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "a", "arguments": {}}</tool_call>'),
    ],
)
def test_what_is_no_call_stays_text(syntax: Any, text: str) -> None:
    reply = parse_reply(text, syntax)
    assert (reply.content, reply.tool_calls) == (text, ())
