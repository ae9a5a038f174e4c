"""Evaluation of a policy on held-out tasks: one rollout per task, through the same path as training."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentlightning.base.terminal import counted
from agentlightning.training.context import TrainingContext
from agentlightning.training.result import Evaluation
from agentlightning.training.rollouts import Watcher, collect, evidence
from agentlightning.training.tasks import metadata_of
from agentlightning.types import EnqueueRolloutRequest


class HeldOut:
    """Measures the policy on the held-out tasks during a run. Belongs to the loop."""

    def __init__(self, context: TrainingContext, tasks: list[object]) -> None:
        self._context = context
        self._tasks = tasks

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after a step."""
        every, last = self._context.settings.eval_steps, step == self._context.settings.max_steps
        return bool(self._tasks) and (last or bool(every and step % every == 0))

    async def measure(self, step: int, *, greedy: bool, earlier: Sequence[Evaluation] = ()) -> list[Evaluation]:
        """Run the tasks at the training temperature and, if requested, greedily. Record and return the evaluations in
        this order; an empty list without tasks. `earlier`: the evaluations of the run so far."""
        if not self._tasks:
            return []
        context = self._context
        evaluations = [await self.evaluate(step, "sampled", context.settings.temperature, earlier)]
        if greedy:
            evaluations.append(await self.evaluate(step, "greedy", 0.0, [*earlier, *evaluations]))
        for evaluation in evaluations:
            await context.recorder.evaluation(step, evaluation, self._tasks)
        await context.updater.after_evaluation(step, evaluations[0], context.store)
        if context.group_reward is not None and all(e.failed == len(e.rewards) for e in evaluations):
            context.alarm(
                "No held-out rollout has a reward: group_reward compares the rollouts of a task, but a held-out task "
                "has only one. Return a number from the agent, pass a reward_fn to the Trainer, or omit val_dataset",
                "held_out_without_reward",
            )
        context.note(
            f"held-out after {counted(context.updater.weight_version, 'update')}: {'; '.join(map(str, evaluations))}"
        )
        return evaluations

    async def evaluate(self, step: int, sampling: str, temperature: float, earlier: Sequence[Evaluation]) -> Evaluation:
        """Run each task once and return the rewards."""
        context, settings, take = self._context, self._context.settings, self._context.resume.take_of(step)
        resources_id = await context.publish(sampling, temperature)
        version, began = context.updater.weight_version, time.monotonic()
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode="val",
                resources_id=resources_id,
                config=context.limits(),
                metadata={**metadata_of(step, number, 0, take), "sampling": sampling},
            )
            for number, task in enumerate(self._tasks)
        ]
        rollouts = await collect(
            context.store,
            requests,
            timeout_seconds=settings.step_timeout_seconds,
            watcher=Watcher(
                on_done=lambda done: context.progress.rollouts(done, len(requests), f"held-out tasks, {sampling}")
            ),
        )
        rewards = [(await evidence(context.store, rollout)).reward for rollout in rollouts]
        ids, seconds = [rollout.rollout_id for rollout in rollouts], time.monotonic() - began
        follows_graded = any(evaluation.is_graded for evaluation in earlier)
        return Evaluation(version, sampling, rewards, ids, seconds, settings.solved_above, follows_graded)
