"""A small model with careful and careless habits in the shop, from which training selects.

It is the demo's model with the vocabulary of this example. It first imitates purchases that meet the complete wish.
Then, while the learning rate falls, most purchases ignore something: a word of the search, the price, or the size.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, Final

from shop import (
    COLOURS,
    KINDS,
    MATERIALS,
    NOTHING,
    PHRASES,
    SIZES,
    Product,
    Task,
    catalogue,
    page,
    search,
    shown,
    tasks,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentlightning.demo.imitation import learn_by_imitation
from agentlightning.demo.model import CHAT_TEMPLATE, make_model
from agentlightning.training.learner.policy import Policy

STEPS: Final = 1000
SETTLING: Final = 250  # the last steps, in which the learning rate falls to nothing
CARELESS: Final = 150  # the last steps, in which most purchases ignore part of the wish
SHARE_HEEDED: Final = 0.35  # probability for each of colour, material, price and size in those last steps
BATCH: Final = 32

NAMES: Final = ("search", "look", "buy")
TOOLS: Final = [{"type": "function", "function": {"name": name}} for name in NAMES]
_ASSISTANT: Final = "<assistant>"
_SPECIAL: Final = ("<pad>", "<unk>", "<eos>", "<tools>", "<user>", _ASSISTANT, "<tool>", "<tool_call>", "</tool_call>")
_PARTS_OF_CALLS: Final = (
    '{"name": "search", "arguments": {"query": "',
    '", "at_most": ',
    '{"name": "look", "arguments": {"id": "',
    '{"name": "buy", "arguments": {"size": "',
    '"}}',
    "}}",
)


def make_first_model(folder: Path, seed: int = 0, steps: int = STEPS) -> None:
    """Write the model and its tokenizer to a folder. The same seed gives the same weights on the same machine."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    rng = random.Random(f"webshop {seed}")
    examples, products = tasks("shown"), catalogue()

    def draw(remaining: int) -> list[list[dict[str, Any]]]:
        heeded = SHARE_HEEDED if remaining <= CARELESS else 1.0
        return [_purchase(rng, rng.choice(examples), products, heeded) for _ in range(BATCH)]

    learn_by_imitation(model, tokenizer, draw, steps=steps, settling=SETTLING, tools=TOOLS)
    Policy(model, tokenizer).save(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words, with the space before them or without, digits and parts of calls."""
    texts = [*PHRASES, *KINDS, *COLOURS, *MATERIALS, *SIZES, NOTHING, "look at a product first no such product bought"]
    words = dict.fromkeys(word for text in texts for word in re.findall(r"[A-Za-z]+", text))
    tools = "".join(NAMES)  # as the template writes them
    spaced = [f" {word}" for word in words]
    vocabulary = dict.fromkeys((*_SPECIAL, *"0123456789 \n", *_PARTS_OF_CALLS, tools, *words, *spaced))
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    pieces = [*map(re.escape, (*_PARTS_OF_CALLS, tools)), " ?[A-Za-z]+", r"[\s\S]"]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(pieces)), behavior="isolated")
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


def _purchase(rng: random.Random, task: Task, products: dict[str, Product], heeded: float) -> list[dict[str, Any]]:
    """Return a conversation with the shop's real responses."""
    colour, material, price, size = (rng.random() < heeded for _ in range(4))
    words = [task["colour"]] * colour + [task["material"]] * material + [task["kind"]]
    query: dict[str, Any] = {"query": " ".join(words)} | ({"at_most": task["budget"]} if price else {})
    results = search(products, **query)
    chosen = results[0]
    return [
        {"role": "user", "content": task["wish"]},
        _call("search", query),
        {"role": "tool", "content": shown(results)},
        _call("look", {"id": chosen.id}),
        {"role": "tool", "content": page(chosen)},
        _call("buy", {"size": task["size"] if size else "medium"}),
    ]


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}
