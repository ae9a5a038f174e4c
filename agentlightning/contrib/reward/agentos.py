"""`PolicyReward` is a `reward_fn` with a penalty for each action that a policy kernel refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agentlightning.contrib.agentos.attempt import attempt_watch
from agentlightning.contrib.agentos.watch import Kernels
from agentlightning.utils.rewards import USABLE_REWARD, as_reward


class PolicyReward:
    """Return `reward_fn(output, task)` or, without `reward_fn`, `clean`, minus `penalty` per violation.

    For `Trainer(runner=AgentOSRunner(kernel), reward_fn=PolicyReward(kernel))`. Like every `reward_fn`, it is called if
    the agent returns a value that is not its reward. Only violations of these kernels have a penalty.

    Args:
        kernel: same as for `AgentOSRunner`.

    Raises:
        TypeError: the kernel does not report violations, or `reward_fn` cannot be called.
        ValueError: `clean` or `penalty` is not finite.
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
        for name, value in (("clean", clean), ("penalty", penalty)):
            if as_reward(value) is None:
                raise ValueError(f"{name} must be {USABLE_REWARD}; got {value!r}")
        self._kernels = Kernels(kernel)
        self._reward_fn = reward_fn
        self._clean = clean
        self._penalty = penalty

    @property
    def kernel(self) -> object:
        """The kernel, or the list of kernels."""
        return self._kernels.kernel

    async def __call__(self, output: object, task: object) -> float:
        """Return the reward of the current attempt.

        Raises:
            RuntimeError: violations are not counted, because the runner is not an `AgentOSRunner`.
        """
        watch = attempt_watch()
        if watch is None:
            raise RuntimeError("PolicyReward requires the violations of the attempt: use runner=AgentOSRunner(kernel)")
        reward: Any = self._clean if self._reward_fn is None else self._reward_fn(output, task)
        if inspect.isawaitable(reward):
            reward = await reward
        return float(reward) - self._penalty * sum(map(watch.count, self._kernels.sources))
