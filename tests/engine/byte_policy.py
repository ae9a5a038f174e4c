"""An untrained policy with a tokenizer of the common kind: byte-level, single digits, ChatML, Hermes tool calls."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.training.learner.policy import Policy

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = 'the weather of a city in {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} is good: say so. '


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokens.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokens.train_from_iterator([_TEXT] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def byte_policy(context: int = 1024, seed: int = 0) -> Policy:
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 6,  # padded, as those of real models are
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return Policy(model, tokenizer, learning_rate=1e-2)
