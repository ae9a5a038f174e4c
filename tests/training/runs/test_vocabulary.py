"""A row of token ids can be read as text from the table alone, whichever kind of tokenizer made it."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.training.runs.vocabulary import vocabulary_id, vocabulary_of

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "Grüße aus Köln, 2 € and 👍\n\tfine"


def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["fine and fine"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def test_a_byte_level_row_reads_as_its_text_and_parts_of_characters_are_escaped() -> None:
    tokenizer = byte_level()
    table = vocabulary_of(tokenizer)
    assert len(table) == len(tokenizer)
    row = tokenizer(TEXT + "<|end|>")["input_ids"]
    shown = "".join(table[token] for token in row)
    assert shown.encode().decode("unicode_escape").encode("latin-1").decode() == TEXT + "<|end|>"
    assert "\\xe2" in shown


def test_pieces_of_sentencepiece_lose_their_marks() -> None:
    backend = Tokenizer(models.WordLevel({"\u2581two": 0, "<0x0A>": 1, "<0xE2>": 2, "x": 3}, unk_token="x"))
    backend.decoder = decoders.Metaspace()
    assert vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend)) == [" two", "\n", "\\xe2", "x"]


def test_the_id_follows_the_texts() -> None:
    assert vocabulary_id(["a", "b"]) == vocabulary_id(("a", "b")) != vocabulary_id(["ab"])
    assert len(vocabulary_id([])) == 64
