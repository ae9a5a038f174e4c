"""`JudgeReward`: a `reward_fn` that asks a model how good an answer is.

Source: the forms of a judgement (a score by a rubric, a comparison of two answers) and the swap of their order against
the bias for a position are those of "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena" (arXiv:2306.05685).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args

from agentlightning.chat.bill import Bill, Limits
from agentlightning.chat.chat import Chat
from agentlightning.errors import BadRequestError
from agentlightning.judge.asking import NOTE, JudgeError, Question, all_of, ask_judge, field_of, marked, number_of

RUBRIC = "Is the answer correct, complete, to the point and safe?"


Keep = Literal["all", "counts"]
"""What of a judge's calls is recorded: `counts` has no word of what it was shown and said."""


def check_keep(keep: object) -> None:
    """Let pass a `Keep`.

    Raises:
        BadRequestError: it is none.
    """
    if keep not in get_args(Keep):
        raise BadRequestError(f"keep must be 'all' or 'counts'; got {keep!r}")


class JudgeSettings(TypedDict, total=False):
    """How a judge is asked, as `agl.Chat` takes it; None is its default."""

    model: str | None
    temperature: float | None
    concurrency: int | None
    retries: int | None
    timeout_seconds: float | None
    limits: Limits | Mapping[str, Any] | None
    prices: Mapping[str, Sequence[float]] | None


def chat_of(source: object, settings: Mapping[str, Any]) -> Chat:
    """Return the chat of a judge.

    Raises:
        TypeError: there is no such setting.
        BadRequestError: settings that would have no effect beside an `agl.Chat`.
    """
    known = JudgeSettings.__annotations__
    if unknown := [name for name in settings if name not in known]:
        raise TypeError(f"A judge has no setting {', '.join(unknown)}; of its calls there are {', '.join(known)}")
    given = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(source, Chat):
        return Chat(source, **given)
    if given:
        raise BadRequestError(f"{', '.join(given)} would have no effect beside an agl.Chat: give them to the Chat")
    return source


class JudgeReward:
    """Scores what an agent returns by asking a model: `agl.Trainer(reward_fn=agl.JudgeReward(model="gpt-5-mini"))`.

    Gives a reward from 0 to 1: the judge's score on `scale`, moved there. With `against`, the answer is compared with
    another one: 1 for better, 0.5 for equally good, 0 for worse, the mean of both orders in which the two are shown.

    The judge's question, reply, tokens and cost are an annotation of the rollout; its calls are none of the agent's and
    are not trained. A judge that does not answer, or whose verdict cannot be read twice, is a fault of the
    infrastructure: the rollout has no reward, rather than a low one.

    May be pickled; each runner has its own bill and its own limits.

    Args:
        source: who judges; see `agl.Chat`. None is the server that `OPENAI_API_KEY` and `OPENAI_BASE_URL` name.
        rubric: what a good answer is, in words.
        scale: the lowest and the highest score.
        reference: a field of the task with a right answer, which the judge is shown; dotted for a nested one.
        against: a field of the task with an answer that this one is compared with.
        keep: what of its calls is recorded: `all`, or `counts` without a word of what it was shown and said. Beside an
            `LLMProxy(keep=...)` that leaves out words, say so here as well.
        model: see `agl.Chat`.
        temperature: see `agl.Chat`.
        concurrency: see `agl.Chat`.
        retries: see `agl.Chat`.
        timeout_seconds: see `agl.Chat`.
        limits: see `agl.Chat`.
        prices: see `agl.Chat`.

    Raises:
        BadRequestError, TypeError: an argument is out of its range; names it.
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
            raise BadRequestError("rubric must say what a good answer is; it is empty")
        check_keep(keep)
        self.chat = chat_of(source, settings)
        self.rubric, self.scale, self.reference, self.against = rubric, (low, high), reference, against
        self.keep = keep

    @property
    def bill(self) -> Bill:
        """What its calls have used in this process."""
        return self.chat.bill

    async def __call__(self, output: object, task: object) -> float:
        """Return the reward of what an agent returned for a task, from 0 to 1.

        Raises:
            JudgeError: the task lacks a field, there is nobody to ask, or the verdict cannot be read.
            ChatError, LimitReached: the judge does not answer.
        """
        try:
            if self.against is None:
                return await self._score(output, task)
            other = field_of(task, self.against)
            first, second = await all_of(self._is_better(output, other, task), self._is_better(other, output, task))
        except BadRequestError as error:  # a ValueError, which `policy_faults` may name for what agents do
            raise JudgeError(f"The judge cannot be asked: {error}") from error
        return (first + 1.0 - second) / 2

    def __repr__(self) -> str:
        how = f"against={self.against!r}" if self.against else f"scale={self.scale}"
        return f"JudgeReward(model={self.chat.model!r}, {how})"

    async def _ask(self, question: Question, read: Callable[[Mapping[str, Any]], float]) -> float:
        return await ask_judge(self.chat, question, read, purpose="judge", words=self.keep == "all")

    async def _score(self, output: object, task: object) -> float:
        low, high = self.scale
        system = (
            f"You judge the answer to a task. {NOTE}\n\nWhat a good answer is:\n{self.rubric}\n\nThink it over in a "
            f'few sentences. End with one JSON object: {{"score": <a number from {low:g} to {high:g}>}}'
        )
        parts = ["The task:", marked("task", task)]
        if self.reference is not None:
            parts += ["A right answer:", marked("reference", field_of(task, self.reference))]
        question = Question(system, "\n".join([*parts, "The answer to judge:", marked("answer", output)]))

        def read(verdict: Mapping[str, Any]) -> float:
            score = number_of(verdict["score"])
            if not low <= score <= high:
                raise ValueError(f"the score {score:g} is not from {low:g} to {high:g}")
            return (score - low) / (high - low)

        return await self._ask(question, read)

    async def _is_better(self, first: object, second: object, task: object) -> float:
        """Return 1 if the first answer is better, 0.5 if both are as good, 0 if the second is."""
        system = (
            f"You compare two answers, A and B, to a task. {NOTE}\n\nWhat a good answer is:\n{self.rubric}\n\nTheir "
            "order means nothing. Think it over in a few sentences. End with one JSON object: "
            '{"better": "A"}, {"better": "B"} or {"better": "tie"}'
        )
        parts = ["The task:", marked("task", task)]
        if self.reference is not None:
            parts += ["A right answer:", marked("reference", field_of(task, self.reference))]
        answers = ["Answer A:", marked("answer", first), "Answer B:", marked("answer", second)]

        def read(verdict: Mapping[str, Any]) -> float:
            said = str(verdict["better"]).strip().lower()
            worth = {"a": 1.0, "b": 0.0, "tie": 0.5}
            if said not in worth:
                raise ValueError(f'"better" is {said!r}, and neither "A", "B" nor "tie"')
            return worth[said]

        return await self._ask(Question(system, "\n".join([*parts, *answers])), read)


__all__ = ["JudgeError", "JudgeReward"]
