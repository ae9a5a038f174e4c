"""A small model that knows all things but guesses too early; training has to break this habit.

It has the size of the demo's model. A question, an answer and the name of a thing are one token each. It first imitates
games with questions in any order and a right guess. At each turn it learns to predict the thing, so that it knows the
properties of each. Then, while the learning rate falls, most games guess after one or two questions.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, Final

import torch
from things import NOT_UNDERSTOOD, NOTHING, PROPERTIES, RULES, THINGS, answer, search
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from agentlightning.demo.model import CHAT_TEMPLATE, make_model
from agentlightning.engine.torch_setup import one_thread
from agentlightning.training.learner.policy import Policy

STEPS: Final = 1700
SETTLING: Final = 500  # the last steps, in which the learning rate falls to nothing
HURRIED: Final = 100  # the last steps, in which a game continues after a question with this probability:
GOES_ON: Final = 0.6
MOST_SHOWN: Final = len(PROPERTIES)  # questions per game
RATE: Final = 4e-3
BATCH: Final = 16
GAIN: Final = 7.0  # of the initial weights: the defaults of transformers suit wider models, and learn very slowly here
HABIT: Final = 0.3  # weight of the next-token loss, relative to that of predicting the thing
CONTEXT: Final = 1024  # tokens; enough for twenty searches

TOOLS: Final = [{"type": "function", "function": {"name": "search"}}]
_ASSISTANT: Final = "<assistant>"
_SPECIAL: Final = ("<pad>", "<unk>", "<eos>", "<tools>", "<user>", _ASSISTANT, "<tool>", "<tool_call>", "</tool_call>")
_PIECES: Final = (
    *('{"name": "search", "arguments": {"query": "', '"}}'),
    *(f"{word}{end}" for word in PROPERTIES for end in ("?", ": yes", ": no")),
)


def make_first_model(folder: Path, *, searches: bool = False, seed: int = 0, steps: int = STEPS) -> None:
    """Write the model and its tokenizer to a folder. The same seed gives the same weights on the same machine.

    Args:
        searches: whether its games use the search tool.
        steps: number of imitation steps; the default takes about two minutes.
    """
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    model.config.max_position_embeddings = CONTEXT
    names = torch.tensor(tokenizer.convert_tokens_to_ids(list(THINGS)))  # (K,)
    rng = random.Random(f"twenty questions {seed}")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(GAIN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    with one_thread():
        for step in range(steps):
            remaining = steps - step
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 50, remaining / SETTLING)
            tokens, mask = _batch(tokenizer, rng, searches=searches, hurried=remaining <= HURRIED)
            hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]  # (B, T - 1, width)
            spoken = mask[:, 1:]
            habit = cross_entropy(model.lm_head(hidden[spoken]), tokens[:, 1:][spoken])
            turns = spoken & ~mask[:, :-1]  # the first position of each reply
            guessed = ((tokens[:, :, None] == names) & mask[:, :, None]).any(1).float().argmax(1)  # (B,)
            naming = cross_entropy(model.lm_head(hidden[turns])[:, names], guessed[:, None].expand(turns.shape)[turns])
            optimizer.zero_grad(set_to_none=True)
            (HABIT * habit + naming).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    Policy(model, tokenizer).save(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words, with the space before them or without, questions, answers, and parts
    of calls."""
    texts = [RULES, NOT_UNDERSTOOD, NOTHING, *PROPERTIES, *THINGS, "not search"]
    words = dict.fromkeys(word for text in texts for word in re.findall(r"[A-Za-z]+", text))
    spaced = [f" {word}" for word in words]
    vocabulary = dict.fromkeys((*_SPECIAL, *"0123456789 \n.,:?", *_PIECES, *words, *spaced))
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    pieces = [*map(re.escape, _PIECES), " ?[A-Za-z]+", r"[\s\S]"]
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


def _game(rng: random.Random, *, searches: bool, hurried: bool) -> list[dict[str, Any]]:
    """Return a game with the true answers; its guess fits them, and is right without a search."""
    thing = rng.choice(list(THINGS))
    count = rng.randint(1, MOST_SHOWN)
    if hurried:
        count = 1
        while rng.random() < GOES_ON and count < MOST_SHOWN:
            count += 1
    messages: list[dict[str, Any]] = [{"role": "user", "content": RULES}]
    facts: list[str] = []
    for word in rng.sample(PROPERTIES, count):
        messages += [{"role": "assistant", "content": f"{word}?"}, {"role": "user", "content": answer(thing, word)}]
        facts.append(word if word in THINGS[thing] else f"not {word}")
    guess = thing
    if searches and rng.random() < 0.5:
        query = " ".join(facts)
        result = search(query)
        call = {"function": {"name": "search", "arguments": {"query": query}}}
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": result}]
        guess = rng.choice(result.split())
    return [*messages, {"role": "assistant", "content": guess}]


def _batch(tokenizer: Any, rng: random.Random, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return games, padded on the right, and a mask of the player's tokens: (B, T) each."""
    games = [_game(rng, **how) for _ in range(BATCH)]
    texts = tokenizer.apply_chat_template(games, tools=TOOLS if how["searches"] else None, tokenize=False)
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assistant, eos = tokenizer.convert_tokens_to_ids(_ASSISTANT), tokenizer.eos_token_id
    length = max(map(len, rows))
    tokens = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    masks: list[list[bool]] = []
    for row in rows:
        masks.append([])
        inside = False
        for token in row:
            masks[-1].append(inside)
            inside = token == assistant or (inside and token != eos)
        masks[-1].extend([False] * (length - len(row)))
    return tokens, torch.tensor(masks)
