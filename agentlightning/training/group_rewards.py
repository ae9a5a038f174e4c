"""Rewards computed for all rollouts of a task together, such as by a judge that ranks them."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.base.terminal import counted
from agentlightning.chat.asking import all_of
from agentlightning.chat.ranking import MOST_ANSWERS, Ranking, RankingReward
from agentlightning.emitter.reward import reward_attributes
from agentlightning.errors import BadRequestError, ServiceError
from agentlightning.semconv import AGL_ANNOTATION
from agentlightning.store.base import LightningStore
from agentlightning.training.rollouts import Evidence
from agentlightning.types import Attempt, Span
from agentlightning.utils.otel import flatten_attributes
from agentlightning.utils.rewards import USABLE_REWARD, as_reward


@runtime_checkable
class Ranker(Protocol):
    """A class that ranks answers, such as `agl.RankingReward`."""

    def rank(self, task: object, answers: Sequence[object]) -> Awaitable[Any]:
        """Return a value whose `rewards` are those of the answers, in their order."""
        ...


GroupReward = Ranker | Callable[[object, Sequence[object]], Any]
"""A ranker, or a function `(task, answers) -> rewards`. A sync function runs on threads, an async one on the loop of
the run. An answer is the agent's conversation after its first prompt, as chat messages."""
Questions = Sequence[Mapping[str, object]]
"""The questions to a judge about a group, and its replies; see `Ranking.questions`."""
_AT_ONCE = 8
"""Maximum number of groups judged, and of rewards written, concurrently."""


def check_group_reward(group_reward: object, size: int, *, solve_rates: bool = False) -> GroupReward | None:
    """Check and return a group reward for groups of `size`. `solve_rates`: tasks are drawn by their solve rates.

    Raises:
        TypeError: the value is neither a ranker nor a function.
        BadRequestError: the ranker cannot rank this many answers, or ranks that are the same in every group would be
            solve rates.
    """
    if solve_rates and isinstance(group_reward, Ranker):
        raise BadRequestError(
            "curriculum='solve_rate' and a group_reward that ranks cannot be combined: the ranks of each group have "
            "the same mean, so all tasks would have the same solve rate. Omit curriculum"
        )
    if isinstance(group_reward, RankingReward) and size > MOST_ANSWERS:
        raise BadRequestError(f"num_generations={size}: a judge can rank at most {MOST_ANSWERS} answers per task")
    if group_reward is None or isinstance(group_reward, Ranker) or callable(group_reward):
        return cast("GroupReward | None", group_reward)
    raise TypeError(
        f"group_reward must be an agl.RankingReward or a function (task, answers) -> rewards; got {group_reward!r}"
    )


def name_of_group_reward(group_reward: GroupReward) -> str:
    """Return the name of a group reward in the records of a run: equal in every process, without arguments."""
    if isinstance(group_reward, RankingReward):
        return repr(group_reward)
    named: Any = group_reward if hasattr(group_reward, "__qualname__") else type(group_reward)
    return f"{named.__module__}.{named.__qualname__}"


async def with_group_rewards(
    group_reward: GroupReward, collected: Sequence[Evidence], groups: Sequence[int], note: Callable[[str], None]
) -> tuple[list[Evidence], dict[str, Questions]]:
    """Return the rollouts with the rewards of their groups instead of their own, and the questions to a judge with its
    replies, by the first rollout of each group.

    Only successful rollouts are judged; a policy fault keeps its reward. If the judge of a group fails, the rollouts of
    the group have no reward (not a low one), and `note` is called once. Rollouts without a group (-1) have no reward.
    """
    members: dict[int, list[int]] = {}
    for place, (one, group) in enumerate(zip(collected, groups, strict=True)):
        if (latest := one.latest) and latest.status == "succeeded" and latest.outcome in ("scored", "unscored", None):
            members.setdefault(group, []).append(place)
    slots, judged, questions_by_rollout = asyncio.Semaphore(_AT_ONCE), list(collected), dict[str, Questions]()
    failed: list[tuple[int, str]] = []  # rollouts of a group that was not judged, and why

    async def judge(places: Sequence[int]) -> None:
        first, answers = collected[places[0]].rollout, [_answer_of(collected[place]) for place in places]
        rewards: Sequence[float | None] = [None] * len(places)
        try:
            if not any(answers):
                raise ServiceError("none of their replies was recorded as text")
            async with slots:
                rewards, questions = await _rewards(group_reward, first.input, answers)
            if questions:
                questions_by_rollout[first.rollout_id] = questions
        except ServiceError as error:
            failed.append((len(places), str(error)))
        for place, reward in zip(places, rewards, strict=True):
            judged[place] = _with_reward(collected[place], reward)

    for place in members.pop(-1, []):
        judged[place] = _with_reward(collected[place], None)
    await all_of(*map(judge, members.values()))
    if failed:
        rollouts = counted(sum(count for count, _ in failed), "rollout")
        note(
            f"no reward for {rollouts} of {counted(len(failed), 'task')}, because they were not judged: {failed[0][1]}"
        )
    return judged, questions_by_rollout


async def store_group_rewards(
    store: LightningStore, judged: Sequence[Evidence], asked: Mapping[str, Questions]
) -> None:
    """Store the rewards of `with_group_rewards` with the attempts, where lists and pages read them. Store the questions
    to the judge and its replies as annotations of the first rollout of each group."""
    latest = {one.rollout.rollout_id: one.latest for one in judged}
    spans = [
        _annotation(attempt, flatten_attributes({"judge": question}), sequence_id=-1)
        for rollout_id, questions in asked.items()
        for question in questions
        if (attempt := latest[rollout_id]) is not None
    ]
    if spans:
        await store.add_many_spans(spans)
    slots = asyncio.Semaphore(_AT_ONCE)

    async def write(attempt: Attempt) -> None:
        async with slots:
            await store.update_attempt(
                attempt.rollout_id,
                attempt.attempt_id,
                outcome=attempt.outcome or "unscored",
                outcome_reason=attempt.outcome_reason,
                reward=attempt.reward,
            )

    attempts = [one.latest for one in judged if one.latest is not None]
    await all_of(*(write(each) for each in attempts if each.outcome_reason in ("group_reward", "not_judged")))


def _answer_of(rollout: Evidence) -> list[Mapping[str, Any]]:
    """Return the chat messages of a rollout from the first reply on: its longest conversation."""
    try:
        calls = TraceToMessages().adapt(rollout.counted)
    except ValueError:
        return []
    messages = max((call["messages"] for call in calls), key=len, default=[])
    first = next((place for place, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
    return [cast("Mapping[str, Any]", each) for each in messages[first:]]


async def _rewards(group_reward: GroupReward, task: object, answers: Sequence[object]) -> tuple[list[float], Questions]:
    if len(answers) == 1 and isinstance(group_reward, Ranker):
        return [0.5], ()
    result: Any
    if isinstance(group_reward, Ranker):
        result = group_reward.rank(task, answers)
    elif inspect.iscoroutinefunction(group_reward):
        result = group_reward(task, answers)
    else:  # it may wait for a server, and must not block the gateway
        result = await asyncio.to_thread(group_reward, task, answers)
    if inspect.isawaitable(result):
        result = await result
    rewards: Any = getattr(result, "rewards", result)
    numbers = [as_reward(reward) for reward in rewards] if isinstance(rewards, (list, tuple)) else []
    if len(numbers) != len(answers) or None in numbers:
        raise BadRequestError(
            f"group_reward must return {len(answers)} finite numbers, one per answer; it returned {result!r}. Each "
            f"must be {USABLE_REWARD}"
        )
    return cast("list[float]", numbers), result.questions if isinstance(result, Ranking) else ()


def _with_reward(one: Evidence, reward: float | None) -> Evidence:
    outcome, reason = ("unscored", "not_judged") if reward is None else ("scored", "group_reward")
    latest = one.attempts[-1].model_copy(update={"outcome": outcome, "outcome_reason": reason, "reward": reward})
    judged = dataclasses.replace(one, attempts=[*one.attempts[:-1], latest])
    if reward is None:
        return judged
    sequence_id = 1 + max((span.sequence_id for span in one.counted), default=0)
    return dataclasses.replace(
        judged, spans=[*one.spans, _annotation(latest, reward_attributes(reward), sequence_id=sequence_id)]
    )


def _annotation(attempt: Attempt, attributes: Mapping[str, Any], *, sequence_id: int) -> Span:
    end = attempt.end_time or attempt.start_time
    return Span.from_attributes(
        attributes=dict(attributes),
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        sequence_id=sequence_id,
        name=AGL_ANNOTATION,
        start_time=end,
        end_time=end,
    )
