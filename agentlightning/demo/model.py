"""The demo's model and tokenizer: a tiny Llama with whole words, single digits and the parts of a tool call as tokens.

A token is a word with the spaces around it, one digit, or a fixed part of a tool call, so a rollout has about 30
tokens and copying a number takes a few steps of attention. Encoding and decoding lose only unknown words. The
tool-call syntax is the common one, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.demo import settings
from agentlightning.demo.tasks import PHRASES

CALL_OPENING: Final = '{"name": "calculator", "arguments": {"expression": "'
CALL_CLOSING: Final = '"}}'
_SPECIAL: Final = (
    "<pad>",
    "<unk>",
    "<eos>",
    "<tools>",
    "<system>",
    "<user>",
    "<assistant>",
    "<tool>",
    "<tool_call>",
    "</tool_call>",
)
_CHARACTERS: Final = tuple("0123456789 .,:;?!()'\"-+*/=%\n")
_OPERATORS: Final = (" + ", " - ", " * ", " / ")
_PIECES: Final = (
    r'\{"name": "[a-z]+", "arguments": \{"[a-z]+": "'
    r'|"\}\}'
    r"| [-+*/] "
    r"| ?[^\W\d_]+ ?"
    r"|."
)

CHAT_TEMPLATE: Final = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{%- for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor %}"
    "{%- if message.role == 'assistant' %}<eos>{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(questions: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer: the words of the generator's phrases and the most common words of `questions`.

    Unknown words become `<unk>`. Digits are always known, so numbers of any length work.
    """
    splitter = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    phrases = [phrase.format(a=1, b=1) for several in PHRASES.values() for phrase in several]
    pieces = dict.fromkeys((*_SPECIAL, *_CHARACTERS, *_OPERATORS, CALL_OPENING, CALL_CLOSING, "calculator"))
    pieces |= dict.fromkeys(piece for phrase in phrases for piece, _ in splitter.pre_tokenize_str(phrase))
    counts = Counter(piece for question in questions for piece, _ in splitter.pre_tokenize_str(question))
    pieces |= dict.fromkeys(piece for piece, _ in counts.most_common(settings.MAX_WORDS))
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[token for token in _SPECIAL if token not in ("<eos>", "<pad>", "<unk>")],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Return the untrained model with about 0.25 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.WIDTH,
        intermediate_size=settings.FEED_FORWARD_WIDTH,
        num_hidden_layers=settings.LAYERS,
        num_attention_heads=settings.HEADS,
        max_position_embeddings=settings.CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": settings.ROPE_THETA},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue] -- taken by the base class, which is not declared
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
