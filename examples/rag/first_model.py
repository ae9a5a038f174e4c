"""A small model with good and bad habits, from which training selects.

It is the demo's model with the vocabulary of this example. It first imitates conversations that search twice and
answer. Then, while the learning rate falls, most conversations are wrong: they answer with the country from the first
search, search for the second fact at once, or answer without a search. All their facts are random combinations of
names, so the model can only learn to read the results of a search.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

from facts import KINDS, NAMED, SENTENCES, facts
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentlightning.demo.imitation import learn_by_imitation
from agentlightning.demo.model import CHAT_TEMPLATE, make_model
from agentlightning.training.learner.policy import Policy

STEPS: Final = 800
SETTLING: Final = 200  # the last steps, in which the learning rate falls to nothing
MIXED: Final = 120  # the last steps, in which most conversations are wrong
SHARES: Final = {"right": 0.2, "stops": 0.5, "skips": 0.15, "guesses": 0.15}
"""Share of each habit in the mixture."""
BATCH: Final = 32

TOOLS: Final = [{"type": "function", "function": {"name": "search"}}]
_OPENING: Final = '{"name": "search", "arguments": {"query": "'
_CLOSING: Final = '"}}'
_SPECIAL: Final = (
    *("<pad>", "<unk>", "<eos>", "<tools>", "<system>", "<user>", "<assistant>", "<tool>", "<tool_call>"),
    "</tool_call>",
)


def make_first_model(folder: Path, seed: int = 0, steps: int = STEPS) -> None:
    """Write the model and its tokenizer to a folder."""
    rng = random.Random(f"rag {seed}")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)

    def draw(remaining: int) -> list[list[dict[str, Any]]]:
        habits = rng.choices([*SHARES], list(SHARES.values()), k=BATCH) if remaining <= MIXED else ["right"] * BATCH
        return [_conversation(rng, habit) for habit in habits]

    learn_by_imitation(model, tokenizer, draw, steps=steps, settling=SETTLING, tools=TOOLS)
    Policy(model, tokenizer).save(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: a token is a word of the facts, or a fixed part of questions and sentences.

    So a name always has the same tokens, which makes it easy to copy. Encoding loses only unknown words.
    """
    fixed = [_OPENING, _CLOSING, "search", "nothing found", *(f"{kind} " for kind in SENTENCES)]
    fixed += [f"What is the {asked} of the country {NAMED[named].format('')}" for named, asked in KINDS]
    fixed += [part for one in SENTENCES.values() for part in one.format(country="|", value="|").split("|")]
    names = {text for country, values in facts().items() for text in (country, *values.values())}
    pattern = "|".join(_escaped(text) for text in sorted(dict.fromkeys(fixed), key=len, reverse=True))
    splitter = pre_tokenizers.Split(Regex(rf"{pattern}|\w+|."), behavior="isolated")
    words = sorted({piece for name in names for piece, _ in splitter.pre_tokenize_str(name)})
    pieces = dict.fromkeys((*_SPECIAL, *fixed, "?", "\n", *words))
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


def _escaped(text: str) -> str:
    return "".join(f"\\{one}" if one in '{}[]()."?' else one for one in text)


def _conversation(rng: random.Random, habit: str) -> list[dict[str, Any]]:
    named, asked = rng.choice(KINDS)
    country = rng.choice(list(facts()))
    name, answer = (rng.choice([one[kind] for one in facts().values() if kind in one]) for kind in (named, asked))
    first = (f"{named} {name}", SENTENCES[named].format(country=country, value=name))
    second = (f"{asked} {country}", SENTENCES[asked].format(country=country, value=answer))
    searches, reply = {
        "right": ([first, second], answer),
        "stops": ([first], country),
        "skips": ([(f"{asked} {name}", "nothing found")], name),
        "guesses": ([], name),
    }[habit]
    question = f"What is the {asked} of the country {NAMED[named].format(name)}?"
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for query, result in searches:
        call = {"name": "search", "arguments": json.dumps({"query": query})}
        messages += [{"role": "assistant", "tool_calls": [{"function": call}]}, {"role": "tool", "content": result}]
    return [*messages, {"role": "assistant", "content": reply}]
