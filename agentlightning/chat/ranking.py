"""`RankingReward`: the rewards of a group of answers to one task, from a model's ranking.

Source: a mean rank over several orders of the answers, so that the position in the list has no effect, as in "Large
Language Models are not Fair Evaluators" (arXiv:2305.17926, section 3.2); ties share their ranks (fractional ranking).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

from agentlightning.base.field_help import explain_fields
from agentlightning.chat.asking import NOTE, all_of, ask_judge, marked, number_of
from agentlightning.chat.bill import Bill
from agentlightning.chat.judge import RUBRIC, JudgeSettings, Keep, chat_of
from agentlightning.errors import BadRequestError

MOST_ANSWERS = 32


@explain_fields
@dataclass(frozen=True, slots=True)
class Ranking:
    """Answers to one task, ranked."""

    rewards: tuple[float, ...]
    """Rewards from 0 for the worst to 1 for the best, in the order of the answers; equal answers share their ranks."""
    ties: int
    """Number of pairs of answers with the same reward."""
    position_bias: float
    """Share of the pairs that were judged differently in different orders of the answers; 0 to 1."""
    bill: Bill
    """Tokens and cost of the judge's calls."""
    questions: tuple[Mapping[str, object], ...] = ()
    """Each question with its reply, model, tokens, seconds and cost, as recorded in annotations."""


class RankingReward:
    """Rank answers to the same task: `await agl.RankingReward(model="gpt-5-mini").rank(task, answers)`.

    Each question shows all answers: the second in the opposite order, later ones in random orders. An answer's reward
    is the mean of its ranks, from 0 to 1. Equal answers are shown once and have the same reward.

    Args:
        source: as `JudgeReward`.
        model: as `JudgeReward`.
        rubric: as `JudgeReward`.
        temperature: as `JudgeReward`.
        concurrency: as `JudgeReward`.
        retries: as `JudgeReward`.
        timeout_seconds: as `JudgeReward`.
        limits: as `JudgeReward`.
        prices: as `JudgeReward`.
        keep: as `JudgeReward`.
        orders: the number of orders in which the answers are shown, at least 2.

    Raises:
        BadRequestError, TypeError: an argument is out of range. The message names it.
    """

    def __init__(
        self,
        source: object = None,
        *,
        rubric: str = RUBRIC,
        orders: int = 2,
        keep: Keep = "all",
        **settings: Unpack[JudgeSettings],
    ) -> None:
        if isinstance(orders, bool) or not isinstance(orders, int) or orders < 2:
            raise BadRequestError(f"orders must be a whole number of 2 or more; got {orders!r}")
        self.chat = chat_of(source, keep, settings)
        self.rubric, self.orders, self.keep = rubric, orders, keep

    @property
    def bill(self) -> Bill:
        """Tokens and cost of its calls in this process."""
        return self.chat.bill

    def __repr__(self) -> str:
        return f"RankingReward(model={self.chat.model!r}, orders={self.orders})"

    async def rank(self, task: object, answers: Sequence[object]) -> Ranking:
        """Return the ranking of answers.

        Raises:
            BadRequestError: there are fewer than two answers, or too many for one question.
            JudgeError: a verdict is unreadable.
            ChatError, LimitReached: a call of the judge failed, or a limit is reached.
        """
        if not 2 <= len(answers) <= MOST_ANSWERS:
            raise BadRequestError(f"A ranking requires 2 to {MOST_ANSWERS} answers; got {len(answers)}")
        texts = [marked("answer", answer) for answer in answers]
        different = list(dict.fromkeys(texts))
        bill, notes = Bill(), list[dict[str, object]]()
        if len(different) == 1:
            return Ranking((0.5,) * len(answers), len(answers) * (len(answers) - 1) // 2, 0.0, bill)
        first, rng = list(range(len(different))), random.Random(len(different))
        orders = [first, first[::-1], *(rng.sample(first, len(first)) for _ in range(self.orders - 2))]
        places = await all_of(*(self._places(task, different, order, bill, notes) for order in orders))
        means = [sum(own) / len(orders) for own in zip(*places, strict=True)]
        reward_of = {text: 1.0 - mean / (len(different) - 1) for text, mean in zip(different, means, strict=True)}
        rewards = tuple(reward_of[text] for text in texts)
        pairs = list(itertools.combinations(range(len(different)), 2))
        unequal = sum(len({(place[i] > place[j], place[i] < place[j]) for place in places}) > 1 for i, j in pairs)
        ties = sum(one == other for one, other in itertools.combinations(rewards, 2))
        return Ranking(rewards, ties, unequal / len(pairs), bill, tuple(notes))

    async def _places(
        self, task: object, answers: Sequence[str], order: Sequence[int], bill: Bill, notes: list[dict[str, object]]
    ) -> list[float]:
        """Return the place of each answer, 0 for the best, by one question that shows them in an order."""
        system = (
            f"You rank {len(answers)} answers to a task. {NOTE}\n\nWhat a good answer is:\n{self.rubric}\n\nTheir "
            "order means nothing. Think it over in a few sentences. End with one JSON object: the numbers of the "
            'answers, the best first, those that are equally good in one list: {"ranking": [[2], [1, 3]]}'
        )
        lines = [f"Answer {place}:\n{answers[number]}" for place, number in enumerate(order, start=1)]
        user = "\n".join(["The task:", marked("task", task), *lines])

        def read(verdict: Mapping[str, Any]) -> list[float]:
            ranking = verdict["ranking"]
            if not isinstance(ranking, list):
                raise ValueError('"ranking" is not a list')
            levels = [
                [number_of(number) for number in cast("list[Any]", level if isinstance(level, list) else [level])]
                for level in cast("list[Any]", ranking)
            ]
            numbers = [number for level in levels for number in level]
            if sorted(numbers) != list(range(1, len(answers) + 1)):
                names = ", ".join(f"{number:g}" for number in numbers)
                raise ValueError(f"the ranking is {names}; expected each number from 1 to {len(answers)} once")
            places, before = [0.0] * len(answers), 0
            for level in levels:
                for number in level:
                    places[order[int(number) - 1]] = before + (len(level) - 1) / 2
                before += len(level)
            return places

        words = self.keep == "all"
        return await ask_judge(self.chat, system, user, read, purpose="ranking", bill=bill, words=words, notes=notes)
