"""Games of TextWorld made from seeds, and the agent that runs a game as one conversation with the model."""

from __future__ import annotations

import importlib
import re
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import openai

import agentlightning as agl

# The package is in a separate environment (constraints.txt), and it has no types.
textworld: Any = importlib.import_module("textworld")
simple: Any = importlib.import_module("textworld.challenges.tw_simple.simple")
warnings.filterwarnings("ignore", message="Game .* is not fully supported")  # the games keep their own score

INSTRUCTION = (
    "You are in a text game. Reply with one command and nothing else, such as: look, inventory, go east, "
    "open fridge, take key from drawer, unlock drawer with key, put lettuce on stove."
)
INFOS = textworld.EnvInfos(objective=True, description=True, score=True, max_score=True)
FORBIDDEN = {"save", "restore", "script", "transcrip", "recording", "replay", "restart", "quit", "q"}
"""Commands that write and read files or end a game. A game reads nine letters of a word."""


def make_games(folder: Path, seeds: Iterable[int], *, goal: str = "detailed", turns: int = 30) -> list[dict[str, Any]]:
    """Make a game for each seed, unless the folder has it, and return the tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {seed: folder.resolve() / f"simple-{goal}-{seed}.z8" for seed in seeds}
    for seed, file in files.items():
        if file.exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            options = textworld.GameOptions()
            options.seeds, options.path = seed, str(Path(scratch, file.name))
            game = simple.make({"rewards": "balanced", "goal": goal, "test": False}, options)
            compiled = Path(textworld.generator.compile_game(game, options))
            compiled.with_suffix(".json").rename(file.with_suffix(".json"))
            compiled.rename(file)  # last, so that a file that exists is complete
    return [{"file": str(file), "goal": goal, "turns": turns} for file in files.values()]


def command_of(reply: str) -> str:
    """Return the first line of a reply without other characters than letters, digits, - and '; "look" if it is empty.

    A game reads a full stop as the start of another command, and a null character crashes the process.
    """
    words = re.findall(r"[a-z0-9'-]+", reply.strip().partition("\n")[0].lower())
    return " ".join(words)[:100] or "look"


@agl.rollout
def adventurer(task: dict[str, Any], llm: agl.LLM) -> float:
    """Run a game until it ends or the turns are used up. The reward is the share of the maximum score."""
    game = textworld.start(task["file"], INFOS)
    state = game.reset()
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": ""}]
    messages[-1]["content"] = f"{state.objective}\n\n{state.description}".strip()
    with closing(game), openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "unused") as client:
        completions: Any = client.chat.completions
        for _ in range(task["turns"]):
            reply = completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
            text = reply.choices[0].message.content or ""
            command = command_of(text)
            feedback, done = "This command is not available.", False
            if FORBIDDEN.isdisjoint(word[:9] for word in command.split()):
                state, _, done = game.step(command)
                feedback = state.feedback.partition("\n>")[0].strip()  # without the prompt, which has the score
            if done:
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": feedback}]
    return state.score / state.max_score
