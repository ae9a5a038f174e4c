"""`JudgeReward`: a `reward_fn` that calls a model to score an answer.

Source: the kinds of judgement (a score by a rubric, a comparison of two answers) and the swap of their order against
position bias are those of "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena" (arXiv:2306.05685).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args

from agentlightning.chat.asking import NOTE, JudgeError, all_of, ask_judge, field_of, marked, number_of
from agentlightning.chat.bill import Bill, Limits
from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError

RUBRIC = "Is the answer correct, complete, to the point and safe?"
Keep = Literal["all", "counts"]
"""Recorded parts of a judge's calls: `counts` excludes the text of prompts and replies."""


class JudgeSettings(TypedDict, total=False):
    """The settings of a judge's calls, see `agl.Chat`; None uses the default of `agl.Chat`."""

    model: str | None
    temperature: float | None
    concurrency: int | None
    retries: int | None
    timeout_seconds: float | None
    limits: Limits | Mapping[str, Any] | None
    prices: Mapping[str, Sequence[float]] | None


def chat_of(source: object, keep: object, settings: Mapping[str, Any]) -> Chat:
    """Return the chat of a judge after a check of its settings.

    Raises:
        TypeError: a setting is unknown.
        BadRequestError: `keep` is unknown, or settings have no effect because the source is an `agl.Chat`.
    """
    if keep not in get_args(Keep):
        raise BadRequestError(f"keep must be 'all' or 'counts'; got {keep!r}")
    names = JudgeSettings.__annotations__
    if unknown := [name for name in settings if name not in names]:
        raise TypeError(f"A judge has no setting {', '.join(unknown)}; valid settings are {', '.join(names)}")
    own = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(source, Chat):
        return Chat(source, **own)
    if own:
        raise BadRequestError(f"{', '.join(own)} has no effect with an agl.Chat: pass it to the Chat")
    return source


class JudgeReward:
    """Scores an agent's output with a model: `agl.Trainer(reward_fn=agl.JudgeReward(model="gpt-5-mini"))`.

    Returns a reward from 0 to 1: the judge's score on `scale`, rescaled. With `against`, the answer is compared with
    another answer: 1 for better, 0.5 for equally good, 0 for worse; the reward is the mean over both orders of the
    answers.

    The judge's question, reply, tokens and cost are recorded as an annotation of the rollout; its calls do not count as
    the agent's and are not trained. If the judge does not respond, or returns an unreadable verdict twice, the rollout
    ends with an infrastructure error and has no reward (not a low one).

    May be pickled. Each runner has its own bill and limits.

    Args:
        source: the judge; see `agl.Chat`. None uses the server in `OPENAI_API_KEY` and `OPENAI_BASE_URL`.
        rubric: a description of a good answer.
        scale: the lowest and the highest score.
        reference: name of the task's field with a right answer, which the judge sees; dotted for a nested field.
        against: name of the task's field with the answer to compare with.
        keep: the recorded parts of its calls: `all`, or `counts` without the text of prompts and replies. If
            `LLMProxy(keep=...)` records no text, set it here as well.
        model: see `agl.Chat`.
        temperature: see `agl.Chat`.
        concurrency: see `agl.Chat`.
        retries: see `agl.Chat`.
        timeout_seconds: see `agl.Chat`.
        limits: see `agl.Chat`.
        prices: see `agl.Chat`.

    Raises:
        BadRequestError, TypeError: an argument is out of range. The message names it.
    """

    def __init__(
        self,
        source: object = None,
        *,
        rubric: str = RUBRIC,
        scale: tuple[float, float] = (1, 10),
        reference: str | None = None,
        against: str | None = None,
        keep: Keep = "all",
        **settings: Unpack[JudgeSettings],
    ) -> None:
        low, high = scale
        if not (math.isfinite(high - low) and low < high):
            raise BadRequestError(f"scale must be the lowest and the highest score, such as (1, 10); got {scale!r}")
        if not rubric.strip():
            raise BadRequestError("rubric must describe a good answer, but it is empty")
        self.chat = chat_of(source, keep, settings)
        self.rubric, self.scale, self.keep = rubric, (low, high), keep
        self.reference, self.against = reference, against

    @property
    def bill(self) -> Bill:
        """Tokens and cost of its calls in this process."""
        return self.chat.bill

    async def __call__(self, output: object, task: object) -> float:
        """Return the reward of an agent's output for a task, from 0 to 1.

        Raises:
            JudgeError: the task lacks a field, no model is configured, or the verdict is unreadable. ChatError,
            LimitReached: the call of the judge failed, or a limit is reached.
        """
        try:
            if self.against is None:
                return await self._score(output, task)
            other = field_of(task, self.against)
            first, second = await all_of(self._is_better(output, other, task), self._is_better(other, output, task))
        except BadRequestError as error:  # a ValueError, which `policy_faults` may name for errors of agents
            raise JudgeError(f"Cannot call the judge: {error}") from error
        return (first + 1.0 - second) / 2

    def __repr__(self) -> str:
        form = f"against={self.against!r}" if self.against else f"scale={self.scale}"
        return f"JudgeReward(model={self.chat.model!r}, {form})"

    async def _score(self, output: object, task: object) -> float:
        low, high = self.scale

        def read(verdict: Mapping[str, Any]) -> float:
            score = number_of(verdict["score"])
            if not low <= score <= high:
                raise ValueError(f"the score {score:g} is not between {low:g} and {high:g}")
            return (score - low) / (high - low)

        ending = (
            "Think it over in a few sentences. End with one JSON object: "
            f'{{"score": <a number from {low:g} to {high:g}>}}'
        )
        answer = ["The answer to judge:", marked("answer", output)]
        return await self._ask("You judge the answer to a task.", ending, task, answer, read)

    async def _is_better(self, first: object, second: object, task: object) -> float:
        """Return 1 if the first answer is better, 0.5 if both are equally good, 0 if the second is better."""

        def read(verdict: Mapping[str, Any]) -> float:
            better, values = str(verdict["better"]).strip().lower(), {"a": 1.0, "b": 0.0, "tie": 0.5}
            if better not in values:
                raise ValueError(f'"better" is {better!r}, but must be "A", "B" or "tie"')
            return values[better]

        ending = (
            "Their order means nothing. Think it over in a few sentences. End with one JSON object: "
            '{"better": "A"}, {"better": "B"} or {"better": "tie"}'
        )
        answers = ["Answer A:", marked("answer", first), "Answer B:", marked("answer", second)]
        return await self._ask("You compare two answers, A and B, to a task.", ending, task, answers, read)

    async def _ask(
        self, role: str, ending: str, task: object, answers: Sequence[str], read: Callable[[Mapping[str, Any]], float]
    ) -> float:
        system = f"{role} {NOTE}\n\nWhat a good answer is:\n{self.rubric}\n\n{ending}"
        parts = ["The task:", marked("task", task)]
        if self.reference is not None:
            parts += ["A right answer:", marked("reference", field_of(task, self.reference))]
        user, words = "\n".join([*parts, *answers]), self.keep == "all"
        return await ask_judge(self.chat, system, user, read, purpose="judge", words=words)


__all__ = ["JudgeError", "JudgeReward"]
