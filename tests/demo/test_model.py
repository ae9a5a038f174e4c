"""The demo's tokenizer loses nothing that matters, and its template joins turns without a seam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentlightning.demo.calculator import TOOLS
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.demo.tasks import make_tasks
from agentlightning.engine.chat import ChatFormat, message_body


def test_the_generators_questions_have_no_unknown_word_and_come_back_whole() -> None:
    tokenizer = make_tokenizer()
    for task in make_tasks(0)[0]:
        tokens = tokenizer(task["question"])["input_ids"]
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == task["question"]


def test_numbers_of_any_length_are_single_digits_and_unknown_words_one_token() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.tokenize("Add 1234567 and 5.") == ["Add ", *"1234567", " and ", "5", "."]
    assert tokenizer.tokenize("Add 12 to zebra 3") == ["Add ", "1", "2", "<unk>", "<unk>", "3"]


def test_the_words_of_the_users_questions_are_known() -> None:
    tokenizer = make_tokenizer(["Wie viel ist 3 größer als 2?"])
    tokens = tokenizer("Wie viel ist 7 größer als 1?")["input_ids"]
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == "Wie viel ist 7 größer als 1?"


def test_the_second_prompt_begins_with_exactly_the_tokens_of_the_first_turn() -> None:
    tokenizer = make_tokenizer()
    chat_format = ChatFormat(tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 34 plus 5?"}]
    prompt = chat_format.prompt_ids(messages, TOOLS)
    call_text = '<tool_call>{"name": "calculator", "arguments": {"expression": "34 + 5"}}</tool_call>'
    completion = [*tokenizer(call_text)["input_ids"], tokenizer.eos_token_id]
    reply = chat_format.reply(completion[:-1], with_tools=True)
    messages += [message_body(reply), {"role": "tool", "tool_call_id": "c", "content": "39"}]
    second = chat_format.prompt_ids(messages, TOOLS)
    assert second[: len(prompt) + len(completion)] == prompt + completion
    assert tokenizer.decode(second[len(prompt) + len(completion) :]) == "<tool>39<assistant>"
    assert len(second) < 30


def test_the_tokenizer_is_the_same_after_a_round_through_a_folder(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["a zebra"])
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<user>Add 12 and 7 to a zebra.<assistant>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token, loaded.pad_token, loaded.unk_token) == ("<eos>", "<pad>", "<unk>")


@pytest.mark.parametrize("questions", [[], [f"word{chr(97 + n % 26)}{'x' * (n // 26)} {n}" for n in range(3000)]])
def test_the_model_has_between_a_fifth_of_a_million_and_a_million_parameters(questions: list[str]) -> None:
    model = make_model(make_tokenizer(questions))
    assert 200_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
