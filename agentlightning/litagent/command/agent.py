"""CommandAgent: any program, in any language, as an agent.

The program gets its task as JSON and its model in the variables that clients read anyway, calls the model through the
gateway like every agent, and says its reward. Each attempt is a process group and a folder of its own; both are gone
at its end, however it ends. What the program printed is kept with the attempt as an `agentlightning.operation` span.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from agentlightning.emitter import operation
from agentlightning.litagent.command.attempt_folder import AttemptFolder
from agentlightning.litagent.command.environment import attempt_resources, environment, keys_of, model_of, write_files
from agentlightning.litagent.command.process import Program
from agentlightning.litagent.command.reward import RewardSource, result_of
from agentlightning.litagent.command.settings import (
    TaskPlace,
    check_command,
    check_env,
    check_limits,
    check_pass_env,
    check_reward,
    check_task,
)
from agentlightning.litagent.command.user import check_user, user_of
from agentlightning.litagent.litagent import LitAgent
from agentlightning.types import AttemptedRollout, NamedResources, Rollout, RolloutRawResult


class CommandAgent(LitAgent[Any]):
    """Runs each task as a command.

    Args:
        command: the program and its arguments, such as `["node", "agent.js"]`.
        task: `stdin` writes the task there as one line of JSON; `file` gives no input. The file that `AGL_TASK_FILE`
            names holds it either way.
        reward: `last_line`, the last line of the output that is a JSON number or an object with `reward`; `file`, the
            same in the file that `AGL_REWARD_FILE` names; `exit_code`, 1.0 for 0 and 0.0 for 1, or a mapping of exit
            codes to rewards; `reward_fn`, the `ProgramOutput` goes to the `reward_fn` of the Trainer; `none`, somebody
            else scores.
        llm: name of the model resource that `OPENAI_BASE_URL` and the other variables describe; the first by default.
        env: further variables.
        pass_env: names of variables that are passed on from the runner's environment where they are set.
        cwd: working folder; by default the runner's.
        user: name or number of the user as whom the program runs; by default the runner's. Needs a runner that is root.
        timeout_seconds: time limit of a run, beside the one of the rollout.
        stop_seconds: between SIGTERM and SIGKILL when that limit is reached.
        max_output_bytes: kept of each of the output streams; the end of it.

    Raises:
        TypeError, ValueError: a setting is none of these; names it.
    """

    needs_resources = False

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        task: TaskPlace = "stdin",
        reward: RewardSource | Mapping[int, float] = "last_line",
        llm: str | None = None,
        env: Mapping[str, str] | None = None,
        pass_env: Sequence[str] = (),
        cwd: str | os.PathLike[str] | None = None,
        user: str | int | None = None,
        timeout_seconds: float | None = None,
        stop_seconds: float = 2.0,
        max_output_bytes: int = 64 * 1024,
    ) -> None:
        super().__init__()
        if os.name != "posix":
            raise RuntimeError("CommandAgent needs process groups, which this system does not have (POSIX only)")
        self.command = check_command(command)
        self.task = check_task(task)
        self.reward: RewardSource | Mapping[int, float] = check_reward(reward)
        if llm is not None and not isinstance(llm, str):
            raise TypeError(f"llm must be the name of a resource; got {llm!r}")
        self.llm = llm
        self.needs_resources = llm is not None
        self.env = check_env(env)
        self.pass_env = check_pass_env(pass_env)
        self.cwd = None if cwd is None else os.fspath(cwd)
        self.user = check_user(user)
        self.limits = check_limits(timeout_seconds, stop_seconds, max_output_bytes)

    @override
    def set_runner(self, runner: Any) -> None:
        """Remember the runner.

        Raises:
            RuntimeError: programs cannot run as `user` here.
        """
        if self.user is not None:
            user_of(self.user)
        super().set_runner(runner)

    @override
    async def rollout_async(self, task: object, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run the command for one task.

        Raises:
            ProgramFailed, ProgramTimedOut, ProgramResultError: it could not be started or failed; its time was up; it
                said no reward.
        """
        if not isinstance(rollout, AttemptedRollout):
            raise TypeError(f"A CommandAgent runs attempts; got a {type(rollout).__name__} without one")
        user = None if self.user is None else user_of(self.user)
        ids = None if user is None else (user.uid, user.gid)
        folder = AttemptFolder(ids)
        try:
            own = attempt_resources(resources, rollout)
            data = write_files(folder, task, own)
            own_env = self.env if user is None else {"HOME": user.home, **self.env}
            env = environment(folder.path, rollout, model_of(own, self.llm), self.pass_env, own_env)
            program = Program(self.command, env, self.cwd, self.limits, secrets=keys_of(own), user=ids)
            with operation(name=Path(self.command[0]).name) as span:
                span.set_input(command=list(self.command))
                try:
                    output = await program.run(data if self.task == "stdin" else None)
                finally:
                    if (left := program.output()) is not None:
                        span.set_output(asdict(left))
            return cast("RolloutRawResult", await asyncio.to_thread(result_of, output, self.reward, folder))
        finally:
            await asyncio.to_thread(folder.remove)
