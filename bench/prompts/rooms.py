"""The documents' room selector, with an agent that follows rules instead of a model.

The agent obeys exactly the rules that its prompt states, so the results measure the search and not a model. A task asks
for a room; the reward is 1 for the smallest room that meets all requirements.
"""

from __future__ import annotations

import itertools
import random
from typing import Final, TypedDict

import agentlightning as agl

SEED: Final = "Choose the smallest room that seats {people} people."
SETTINGS: Final[dict[str, dict[str, int]]] = {
    "apo": {"gradient_batch_size": 4, "val_batch_size": 16},
    "gepa": {"reflection_minibatch_size": 4},
}
REQUIREMENTS: Final = ("whiteboard", "accessible", "screen", "quiet")


class Room(TypedDict):
    """A room that can be booked."""

    name: str
    seats: int
    has: set[str]


class Request(TypedDict):
    """One task: the requirements, and the right room."""

    people: int
    whiteboard: bool
    accessible: bool
    screen: bool
    quiet: bool
    room: str


ROOMS: Final[tuple[Room, ...]] = (
    Room(name="A101", seats=4, has={"whiteboard", "accessible", "quiet"}),
    Room(name="B201", seats=6, has={"accessible", "screen", "quiet"}),
    Room(name="B202", seats=8, has={"whiteboard", "screen", "quiet"}),
    Room(name="C301", seats=10, has={"whiteboard", "accessible", "screen"}),
    Room(name="D401", seats=12, has={"whiteboard", "accessible", "screen", "quiet"}),
)


def selected(people: int, needs: set[str]) -> str:
    """Return the smallest room with enough seats and the needed equipment; the last one has everything."""
    return next(room["name"] for room in ROOMS if room["seats"] >= people and needs <= room["has"])


def make_tasks() -> tuple[list[Request], list[Request], list[Request]]:
    """Return all requests for 2 to 12 people, shuffled: 32 for training, 32 for validation, and the held-out ones."""
    tasks = list[Request]()
    either = (False, True)
    for people, *flags in itertools.product(range(2, 13), either, either, either, either):
        whiteboard, accessible, screen, quiet = map(bool, flags)
        room = selected(people, {name for name, flag in zip(REQUIREMENTS, flags, strict=True) if flag})
        tasks.append(
            Request(people=people, whiteboard=whiteboard, accessible=accessible, screen=screen, quiet=quiet, room=room)
        )
    random.Random(0).shuffle(tasks)
    return tasks[:32], tasks[32:64], tasks[64:]


@agl.rollout
def selects_room(task: Request, prompt: agl.PromptTemplate) -> float:
    """Obey the requirements that the prompt names, and no others."""
    rules = prompt.format(people=task["people"]).casefold()
    requirements = {each for each, value in task.items() if value is True}
    chosen = selected(task["people"], {each for each in REQUIREMENTS if each in requirements and each in rules})
    agl.emit_message(f"{chosen} was chosen for {task['people']} people")
    return float(chosen == task["room"])
