"""A step's entries record the ending of each call and the inputs of the loss; a row reads as text by its table."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.adapter.calls.calls import CallRef, ModelCall
from agentlightning.adapter.rows.samples import Sample
from agentlightning.training.ledger import Ledger, RolloutRecord
from agentlightning.training.ledger_records import LedgerRow, numbers_of
from agentlightning.training.recording import entries_of, row_of, vocabulary_id, vocabulary_of

SAMPLE = Sample("ro-1", "at-1", [1, 7, 7, 2], [0, 1, 1, 0], [0.0, -0.5, -0.25, 0.0], ["c1"], [3])


def call(rollout_id: str, call_id: str, tokens: int) -> ModelCall:
    """A call with so many tokens, served by the weights 3."""
    fields: dict[str, Any] = {name: None for name in ModelCall.__dataclass_fields__}
    fields |= {"ref": CallRef(rollout_id, "at-1", call_id), "completion_token_ids": [7] * tokens, "weight_version": 3}
    return ModelCall(**{**fields, "constrained_by": ("top_p",) if call_id == "c1" else ()})


def record(rollout_id: str, *calls: ModelCall, **fields: Any) -> RolloutRecord:
    """A rollout as it was read."""
    common: dict[str, Any] = {"attempt_id": "at-1", "outcome": "scored", "verdict": None, "reward": 1.0}
    return RolloutRecord(rollout_id=rollout_id, calls=list(calls), **{**common, **fields})


def test_each_rollout_has_an_entry_with_the_ending_of_each_call() -> None:
    ledger = Ledger(step=1)
    trained = record("ro-1", call("ro-1", "c1", 2), call("ro-1", "c2", 1))
    ledger.add(trained)
    ledger.exclude([CallRef("ro-1", "at-1", "c2")], "helper")
    ledger.train(SAMPLE, row=0, advantage=0.5)
    failed = record("ro-2", outcome="infrastructure_fault", verdict="infrastructure_fault", reward=None)
    ledger.add(failed)
    ledger.capture([call("ro-0", "c9", 1)])
    ledger.exclude([CallRef("ro-0", "at-1", "c9")], "unfinished")
    row: LedgerRow = {"row": 0}
    first, second, late = entries_of(ledger, [trained, failed], [4, 5], {"ro-1": [row]})
    assert first.get("rows") == [row]
    assert (first.get("group"), first.get("advantage"), first.get("weight_versions")) == (4, 0.5, [3])
    fields = ("call_id", "ending", "reason", "row", "tokens", "constrained_by")
    assert [tuple(end[name] for name in fields) for end in first["calls"]] == [
        ("c1", "trained", None, 0, 2, ["top_p"]), ("c2", "excluded", "helper", None, 0, []),
    ]  # fmt: skip
    assert (second.get("verdict"), second.get("calls"), second.get("advantage")) == ("infrastructure_fault", [], None)
    assert (late.get("rollout_id"), late.get("late")) == ("ro-0", True)
    assert [c["reason"] for c in late["calls"]] == ["unfinished"]


def test_a_row_comes_back_as_it_was_and_a_figure_of_another_length_is_refused() -> None:
    numbers = numbers_of(row_of(SAMPLE, row=3, vocabulary="v", ratio=[1.0, 2.5], clipped=[0, 2]))
    assert {name: list(values) for name, values in numbers.items()} == {
        "tokens": [1, 7, 7, 2], "mask": [0, 1, 1, 0], "ratio": [1.0, 2.5], "clipped": [0, 2],
    }  # fmt: skip
    with pytest.raises(
        ValueError, match=r"row 3 has 2 trained tokens, but these lists do not have that length: ratio \(1\)"
    ):
        row_of(SAMPLE, row=3, vocabulary=None, ratio=[1.0])


def test_a_byte_level_row_reads_as_its_text_and_parts_of_characters_are_escaped() -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["fine and fine"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    text = "Grüße aus Köln, 2 € and 👍\n\tfine<|end|>"
    table = vocabulary_of(tokenizer)
    assert len(table) == len(tokenizer)
    assert vocabulary_id(table) == vocabulary_id(tuple(table)) != vocabulary_id(table[1:])
    shown = "".join(table[token] for token in tokenizer(text)["input_ids"])
    assert shown.encode().decode("unicode_escape").encode("latin-1").decode() == text
    assert "\\xe2" in shown


def test_pieces_of_sentencepiece_lose_their_marks() -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"\u2581two": 0, "<0x0A>": 1, "<0xE2>": 2, "x": 3}, unk_token="x"))
    backend.decoder = decoders.Metaspace()
    assert vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=backend)) == [" two", "\n", "\\xe2", "x"]
