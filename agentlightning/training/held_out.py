"""Evaluation of a policy on tasks that are never trained: one rollout per task, through the same path as training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from agentlightning.store.base import LightningStore
from agentlightning.training.context import RunContext
from agentlightning.training.groups import metadata_of
from agentlightning.training.result import Evaluation
from agentlightning.training.rollouts import collect, evidence
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig


async def evaluate_tasks(
    store: LightningStore,
    tasks: Sequence[object],
    *,
    step: int,
    sampling: str,
    resources_id: str,
    config: RolloutConfig,
    timeout_seconds: float,
    place: Mapping[str, object],
    on_done: Callable[[int], None] | None = None,
    solved_above: float | None = None,
    follows_graded: bool = False,
) -> Evaluation:
    """Run the agent on each task once with the given resources and return the rewards.

    `place` says where in the run this is: the rollouts have it in their metadata, with the number of their task.
    """
    began = time.monotonic()
    requests = [
        EnqueueRolloutRequest(
            input=task, mode="val", resources_id=resources_id, config=config, metadata={**place, "task": number}
        )
        for number, task in enumerate(tasks)
    ]
    rollouts = await collect(store, requests, timeout_seconds=timeout_seconds, on_done=on_done)
    rewards = [(await evidence(store, rollout)).reward for rollout in rollouts]
    ids = [rollout.rollout_id for rollout in rollouts]
    return Evaluation(step, sampling, rewards, ids, time.monotonic() - began, solved_above, follows_graded)


class HeldOut:
    """Measures the policy on the held-out tasks during a run. Belongs to the loop."""

    def __init__(self, context: RunContext, tasks: list[object]) -> None:
        self._context = context
        self._tasks = tasks

    def is_due(self, step: int) -> bool:
        """Return whether something is to be measured after a step."""
        every, last = self._context.settings.eval_steps, step == self._context.settings.max_steps
        return bool(self._tasks) and (last or bool(every and step % every == 0))

    async def measure(self, step: int, *, greedy: bool, earlier: Sequence[Evaluation] = ()) -> list[Evaluation]:
        """Run the tasks at the training temperature and, if wanted, greedily; record and return the evaluations, the
        former first; none without a task. `earlier`: those of the run so far."""
        if not self._tasks:
            return []
        context = self._context
        evaluations = [await self._measure_one(step, "sampled", context.settings.temperature, earlier)]
        if greedy:
            evaluations.append(await self._measure_one(step, "greedy", 0.0, [*earlier, *evaluations]))
        for evaluation in evaluations:
            await context.recorder.evaluation(step, evaluation, self._tasks)
        await context.updater.after_evaluation(step, evaluations[0], context.store)
        if context.group_reward is not None and all(e.failed == len(e.rewards) for e in evaluations):
            context.alarm(
                "no held-out rollout has a reward: group_reward compares the rollouts of a task, and a held-out task "
                "has one. Let the agent return a number too, or give the Trainer a reward_fn, or leave val_dataset out",
                "held_out_without_reward",
            )
        context.note(f"held-out after {context.updater.weight_version} updates: {', '.join(map(str, evaluations))}")
        return evaluations

    async def _measure_one(
        self, step: int, sampling: str, temperature: float, earlier: Sequence[Evaluation]
    ) -> Evaluation:
        context = self._context
        resources_id = await context.publish(sampling, temperature)
        what = f"held-out tasks, {sampling}"
        return await evaluate_tasks(
            context.store,
            self._tasks,
            step=context.updater.weight_version,
            sampling=sampling,
            resources_id=resources_id,
            config=context.limits(),
            timeout_seconds=context.settings.step_timeout_seconds,
            place={**metadata_of(step, 0, 0, context.resume.take_of(step)), "sampling": sampling},
            on_done=lambda done: context.progress.rollouts(done, len(self._tasks), what),
            solved_above=context.settings.solved_above,
            follows_graded=any(evaluation.is_graded for evaluation in earlier),
        )
