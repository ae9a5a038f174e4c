"""The task: name the kind of thing, out of four, that a word means.

Each prompt shows one example of each kind. Held-out items have words, a question and examples that training never
shows, so only the model's knowledge of words transfers.
"""

from __future__ import annotations

import random
from typing import Final, TypedDict

_TRAIN: Final = {
    "animal": "dog horse sparrow salmon tiger rabbit frog whale beetle camel",
    "food": "bread cheese apple rice honey onion sausage cake omelette peanut",
    "vehicle": "car bicycle tractor train ship helicopter canoe tram ambulance submarine",
    "country": "France Japan Brazil Egypt Norway Mexico Kenya Poland Vietnam Ireland",
}
_HELD_OUT: Final = {
    "animal": "cat cow lion duck elephant mouse snake bear sheep monkey penguin dolphin fox squirrel spider deer owl "
    "crocodile giraffe pig goat shark wolf eagle donkey turtle hamster pigeon otter crow",
    "food": "pizza banana sandwich chocolate tomato chicken egg noodle biscuit pear mushroom hamburger jam lettuce "
    "cucumber porridge cherry pie garlic lemon pasta yoghurt potato butter salad strawberry bacon pancake carrot soup",
    "vehicle": "lorry scooter boat airplane rocket ferry tank jeep limousine kayak minibus tricycle locomotive glider "
    "bulldozer raft hovercraft caravan barge trolley bus motorcycle van truck taxi yacht sledge wagon moped unicycle",
    "country": "Germany Italy China Spain Australia Sweden Argentina Morocco Portugal Russia Denmark Indonesia "
    "Ethiopia Finland Colombia Pakistan Hungary Ghana Nepal Iceland Canada India Peru Greece Turkey Cuba Iran Nigeria "
    "Chile Thailand",
}
_TRAIN_EXAMPLES: Final = {"food": "sugar", "country": "Algeria", "animal": "parrot", "vehicle": "airship"}
_HELD_OUT_EXAMPLES: Final = {"vehicle": "rickshaw", "animal": "ant", "country": "Austria", "food": "gravy"}
"""Examples in the prompts; no item asks for them."""
TRAIN_TEMPLATES: Final = ("What is {word}?", "Kind of thing: {word}")
HELD_OUT_TEMPLATE: Final = "Sort into a group: {word}"
KINDS: Final = tuple(_TRAIN)


class Item(TypedDict):
    """A conversation that ends with a question, and the answer."""

    word: str
    messages: list[dict[str, str]]
    answer: str


def make_items(seed: int = 0) -> tuple[list[Item], list[Item]]:
    """Return the 80 training items and the 120 held-out ones, each shuffled."""
    train = [
        _item(template, _TRAIN_EXAMPLES, word, kind)
        for kind, words in _TRAIN.items()
        for word in words.split()
        for template in TRAIN_TEMPLATES
    ]
    held_out = [
        _item(HELD_OUT_TEMPLATE, _HELD_OUT_EXAMPLES, word, kind)
        for kind, words in _HELD_OUT.items()
        for word in words.split()
    ]
    draw = random.Random(seed)
    draw.shuffle(train)
    draw.shuffle(held_out)
    return train, held_out


def _item(template: str, examples: dict[str, str], word: str, kind: str) -> Item:
    messages = [{"role": "system", "content": "Answer with one word."}]
    for shown, example in examples.items():
        messages.append({"role": "user", "content": template.format(word=example)})
        messages.append({"role": "assistant", "content": shown})
    return Item(word=word, messages=[*messages, {"role": "user", "content": template.format(word=word)}], answer=kind)
