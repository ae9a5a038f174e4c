"""A model of 1.5 billion parameters on one GPU: tokens per second, peak memory, and its estimate.

python -m bench.gpu [--layers 28]

The model has the shape of Qwen2.5-1.5B and random weights, the last norm enlarged so that its probabilities are uneven.
Each line of the table is one setting: 64 replies of 256 tokens to prompts of 100 to 256 tokens, then two updates on
these very rows, one optimizer step each. Rates are those of the generation and of the second update. The peak is what
torch's allocator held at most; CUDA itself takes half a GiB beside it.
`ratio` is the mean and the largest distance from one of the learner's probability over the engine's, before the first
step: all that a correction of the sampling has to make up for. Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentlightning.adapter.rows.samples import Sample
from agentlightning.demo.model import make_tokenizer
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder, generate
from agentlightning.training.learner.memory import GIB, needed_memory
from agentlightning.training.learner.policy import Policy
from agentlightning.training.settings import GRPOSettings

REPLIES, PROMPT, REPLY = 64, 256, 256
LORA: Final = {"r": 16, "target_modules": "all-linear"}
CASES: Final[dict[str, dict[str, Any]]] = {
    "float32": {},
    "float32, LoRA": {"lora": LORA},
    "bf16": {"bf16": True},
    "bf16, checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "bf16, LoRA": {"bf16": True, "lora": LORA},
    "bf16, LoRA, checkpointing": {"bf16": True, "lora": LORA, "gradient_checkpointing": True},
    "bf16, LoRA, 1,024 tokens a forward": {"bf16": True, "lora": LORA, "max_tokens_per_forward": 1024},
    "bf16, LoRA, padded": {"bf16": True, "lora": LORA, "padding_free": False},
}


def make_model(folder: Path, layers: int, device: str) -> None:
    """Write the model and a tokenizer, whose few tokens are the first ones of the model's."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.model.norm.weight.data.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def row_of(number: int, completion: Completion) -> Sample:
    """Return the row of a call."""
    prompt, reply = list(completion.prompt_ids), completion.token_ids
    mask, logprobs = [0] * len(prompt) + [1] * len(reply), [0.0] * len(prompt) + completion.logprobs
    return Sample(f"rollout-{number}", "a", [*prompt, *reply], mask, logprobs, [], [])


def measure(folder: Path, device: str, others: Mapping[str, Any]) -> str:
    """Return the cells of a case."""
    settings = GRPOSettings(
        model=str(folder), device=device, max_completion_length=REPLY, max_model_length=PROMPT + REPLY, **others
    )
    need = sum(part.bytes for part in needed_memory(settings)) / GIB
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    names = ("bf16", "lora", "gradient_checkpointing", "max_tokens_per_forward", "padding_free", "max_model_length")
    policy = Policy.load(folder, device=device, **{name: getattr(settings, name) for name in names})
    drawn, decoder = random.Random(0), Decoder(policy.model, ())
    prompts = [[drawn.randrange(150_000) for _ in range(drawn.randint(100, PROMPT))] for _ in range(REPLIES)]
    generate(decoder, [Completion(prompt, 16) for prompt in prompts])  # loads the kernels, allocates the rows
    completions = [Completion(prompt, REPLY, seed=number) for number, prompt in enumerate(prompts)]
    began = time.perf_counter()
    generate(decoder, completions)
    generated = sum(len(one.token_ids) for one in completions) / (time.perf_counter() - began)
    of_engine = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    rows = [row_of(number, one) for number, one in enumerate(completions)]
    advantages = [drawn.gauss(0, 1) for _ in rows]
    first = policy.update(rows, advantages)
    torch.cuda.synchronize()
    began = time.perf_counter()
    policy.update(rows, advantages)
    torch.cuda.synchronize()
    trained = sum(len(row.token_ids) for row in rows) / (time.perf_counter() - began)
    peak = max(of_engine, torch.cuda.max_memory_allocated() / GIB)
    ratios = np.concatenate([abs(row["ratio"] - 1) for row in first.rows])
    notes = f" {first.notes}" if first.notes else ""
    return (
        f"{need:.1f} | {peak:.1f} (engine {of_engine:.1f}) | {need / peak:.2f} | {generated:,.0f} | {trained:,.0f} | "
        f"{ratios.mean():.1e}, {ratios.max():.1e}{notes}"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.gpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print("settings | sum at the start, GiB | peak, GiB | sum / peak | tokens/s generated | tokens/s trained | ratio")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers, "cuda")
        for name in options.cases:
            print(f"{name} | {measure(Path(folder), 'cuda', CASES[name])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
