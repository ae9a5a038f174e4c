"""`PolicyReward` is a `reward_fn` with a penalty for each action that a policy kernel refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agentlightning.contrib.agentos import check_kernel, violations_of_attempt


class PolicyReward:
    """Gives `reward_fn(output, task)`, or `clean` without one, less `penalty` for each violation of the attempt.

    For `Trainer(runner=AgentOSRunner(kernel), reward_fn=PolicyReward(kernel))`. As every `reward_fn` it is asked where
    the agent returns something else than its reward.

    Raises:
        TypeError: the kernel does not tell of violations, or `reward_fn` cannot be called.
    """

    def __init__(
        self,
        kernel: object,
        reward_fn: Callable[[Any, Any], float] | None = None,
        *,
        clean: float = 1.0,
        penalty: float = 1.0,
    ) -> None:
        if reward_fn is not None and not callable(reward_fn):
            raise TypeError(f"reward_fn must be callable, such as (output, task) -> float; got {reward_fn!r}")
        self.kernel = check_kernel(kernel)
        self._reward_fn = reward_fn
        self._clean = clean
        self._penalty = penalty

    async def __call__(self, output: object, task: object) -> float:
        """Return the reward of the attempt that is being judged.

        Raises:
            RuntimeError: nobody counted violations: the runner is no `AgentOSRunner`.
        """
        found = violations_of_attempt.get()
        if found is None:
            raise RuntimeError("PolicyReward needs the violations of the attempt: use runner=AgentOSRunner(kernel)")
        reward: Any = self._clean if self._reward_fn is None else self._reward_fn(output, task)
        if inspect.isawaitable(reward):
            reward = await reward
        return float(reward) - self._penalty * sum(kernel is self.kernel for kernel, _ in found)
