"""An OpenEnv environment and its server: guess a number between 1 and 100 with at most seven guesses.

uvicorn --app-dir examples/openenv server:app --port 8001
"""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportImplicitOverride=false
# OpenEnv is in a separate environment (constraints.txt), where its types are known.

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

GUESSES = 7


class Guess(Action):
    number: int = Field(ge=1, le=100, description="Your guess, between 1 and 100")


class Hint(Observation):
    hint: str


class Guessing(Environment[Guess, Hint, State]):
    """The reward of the right guess is 1, and that of all other guesses is 0."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    _number = 0
    _state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._number = random.Random(seed).randint(1, 100)
        self._state = State(episode_id=episode_id)
        return Hint(hint=f"Guess a number between 1 and 100. You have {GUESSES} guesses.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        if action.number == self._number:
            return Hint(hint="Right.", reward=1.0, done=True)
        hint = "The number is larger." if action.number < self._number else "The number is smaller."
        return Hint(hint=hint, reward=0.0, done=self._state.step_count == GUESSES)

    @property
    def state(self) -> State:
        return self._state


app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=64)
