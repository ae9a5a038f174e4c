"""The answerer's side of the game: things, their properties, and replies to a player.

Every thing has a different set of properties, so that enough questions identify it.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

MOST_TURNS: Final = 20
PROPERTIES: Final = ("alive", "animal", "big", "fly", "water", "edible", "metal", "indoors", "loud", "round")
_TABLE: Final = """
dog alive animal indoors loud     cat alive animal indoors           cow alive animal big edible loud
horse alive animal big loud       sheep alive animal edible loud     rabbit alive animal edible
parrot alive animal fly indoors loud   eagle alive animal fly        duck alive animal edible fly loud water
swan alive animal fly water       goose alive animal fly loud water  penguin alive animal water
whale alive animal big water      dolphin alive animal big loud water   tuna alive animal edible water
bee alive animal fly loud         snail alive animal edible round    oak alive big
rose alive                        cactus alive indoors               apple edible round
bread edible                      car big loud metal                 tram big metal
bicycle metal                     boat big water                     ship big loud metal water
canoe water                       submarine big metal water          plane big fly loud metal
balloon big fly round             kite fly                           drone fly loud
lamp indoors                      radio indoors loud                 oven indoors metal
fridge big indoors loud metal     computer indoors loud metal        television big indoors loud
phone loud                        sofa big indoors                   clock indoors loud round
bell loud metal round             drum loud round                    coin metal round
ball round                        plate indoors round                house big
"""
THINGS: Final[dict[str, frozenset[str]]] = {}
"""The properties of each thing by its name."""
for _word in _TABLE.split():
    if _word in PROPERTIES:
        _name = list(THINGS)[-1]
        THINGS[_name] |= {_word}
    else:
        THINGS[_word] = frozenset()

RULES: Final = (
    f"Find the thing I think of in {MOST_TURNS} turns. Ask about one of these at a time, then guess once: "
    f"{' '.join(PROPERTIES)}"
)
NOT_UNDERSTOOD: Final = "ask about one of these or guess"
NOTHING: Final = "nothing"
_SHOWN: Final = 3


class Said(NamedTuple):
    """A question about a property, or the guess of a thing."""

    kind: Literal["question", "guess"]
    word: str


def understood(text: str) -> Said | None:
    """Return a player's move; None if the text is neither a question about one property nor a guess.

    A guess is a word alone or one after an article at the end: `dog`, `it is a dog!`.
    """
    words = re.findall(r"[a-z]+", text.lower())
    properties = [word for word in PROPERTIES if word in words]
    if len(properties) == 1:
        return Said("question", properties[0])
    guess = re.search(r"(?:^|\b(?:an?|the) )([a-z]+)\W*$", text.strip().lower())
    return Said("guess", guess[1]) if guess and not properties else None


def answer(thing: str, word: str) -> str:
    return f"{word}: {'yes' if word in THINGS[thing] else 'no'}"


def search(query: str) -> str:
    """Return the first three things that have each property of the query, and none of those after a `not`."""
    words = re.findall(r"[a-z]+", query.lower())
    pairs = [(before, word) for before, word in zip(["", *words], words, strict=False) if word in PROPERTIES]
    required = {word for before, word in pairs if before != "not"}
    refused = {word for before, word in pairs if before == "not"}
    fitting = [name for name, has in THINGS.items() if pairs and required <= has and not refused & has]
    return "\n".join(fitting[:_SHOWN]) or NOTHING


def reward(*, found: bool, turns: int) -> float:
    """Return the reward of a game, 0 to 1: 0 without the correct guess, and 1/40 less for each turn before it."""
    return 1.0 - (turns - 1) / (2 * MOST_TURNS) if found else 0.0


def secrets() -> tuple[list[str], list[str]]:
    """Return the things that training uses, and the held-out ones: every fourth thing."""
    names = list(THINGS)
    return [name for place, name in enumerate(names) if place % 4 != 2], names[2::4]
