"""CommandAgent: any program, in any language, as an agent.

The program gets its task as JSON and its model in the usual variables of model clients, calls the model through the
gateway like every agent, and reports its reward. Each attempt has its own process group and folder; both are removed
when the attempt ends for any reason. The program's output is stored with the attempt as an `agentlightning.operation`
span.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from typing_extensions import override

from agentlightning.emitter import operation
from agentlightning.litagent.command.attempt_folder import (
    RESERVED,
    SOURCES,
    AttemptFolder,
    RewardSource,
    attempt_resources,
    environment,
    keys_of,
    model_of,
    remove_left_attempts,
    result_of,
    write_files,
)
from agentlightning.litagent.command.process import Program, ProgramLimits
from agentlightning.litagent.command.sandbox import (
    NOBODY,
    Bubblewrap,
    Sandbox,
    SandboxName,
    addresses_of,
    check_sandbox,
    require_bubblewrap,
)
from agentlightning.litagent.litagent import LitAgent
from agentlightning.types import LLM, AttemptedRollout, NamedResources, Resource, Rollout, RolloutRawResult
from agentlightning.utils.rewards import USABLE_REWARD, as_reward
from agentlightning.utils.setting_checks import check_choice, check_count, check_seconds

STOP_SECONDS = 2.0
"""Default of `stop_seconds`."""


class CommandAgent(LitAgent[Any]):
    """Runs each task as a command.

    Args:
        command: the program and its arguments, such as `["node", "agent.js"]`.
        task: `stdin` writes the task to the standard input as one line of JSON; `file` leaves the input empty. The file
            in `AGL_TASK_FILE` contains the task in both cases.
        reward: source of the reward. `last_line`: the last line of the output that is a JSON number or an object with
            `reward`. `file`: the same form in the file in `AGL_REWARD_FILE`. `exit_code`: 1.0 for 0 and 0.0 for 1. A
            mapping of exit codes to rewards. `reward_fn`: the Trainer's `reward_fn` gets the `ProgramOutput`. `none`:
            the attempt is scored elsewhere.
        llm: name of the model resource that `OPENAI_BASE_URL` and the other variables describe; the first by default.
        env: further environment variables.
        pass_env: names of variables that are copied from the runner's environment if they are set.
        cwd: working folder; by default the runner's.
        user: name or number of the user that runs the program; by default the runner's. Requires a runner that is root.
        sandbox: `bwrap` runs the program in a bubblewrap sandbox (Linux): it reads the system and `cwd`, writes to the
            attempt's folder and /tmp, and reaches only the attempt's models. `agl.Bubblewrap(...)` sets more. The
            working folder is then the attempt's folder by default, and the program of a runner that is root runs as
            the user 65534 (nobody) unless `user` is set. It is killed without SIGTERM at the end.
        timeout_seconds: time limit of the program in seconds, in addition to the limit of the rollout.
        stop_seconds: seconds between SIGTERM and SIGKILL when that limit is reached.
        max_output_bytes: number of bytes to store from the end of each output stream.

    Raises:
        TypeError, ValueError: a setting is invalid.
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
        sandbox: SandboxName | Bubblewrap | None = None,
        timeout_seconds: float | None = None,
        stop_seconds: float = STOP_SECONDS,
        max_output_bytes: int = 64 * 1024,
    ) -> None:
        super().__init__()
        if os.name != "posix":
            raise RuntimeError("CommandAgent requires process groups, which this system does not support (POSIX only)")
        self.command = check_command(command)
        self.task: TaskPlace = check_choice("task", task, get_args(TaskPlace))
        self.reward: RewardSource | Mapping[int, float] = check_reward(reward)
        if llm is not None and not isinstance(llm, str):
            raise TypeError(f"llm must be the name of a resource; got {llm!r}")
        self.llm = llm
        self.needs_resources = llm is not None
        self.env = check_env(env)
        self.pass_env = check_pass_env(pass_env)
        self.cwd = None if cwd is None else os.fspath(cwd)
        self.user = check_user(user)
        self.sandbox = check_sandbox(sandbox)
        if self.sandbox is not None and stop_seconds != STOP_SECONDS:
            raise ValueError(
                f"stop_seconds={stop_seconds} has no effect in a sandbox, which is killed at once. Remove it"
            )
        self.limits = check_limits(timeout_seconds, stop_seconds, max_output_bytes)

    @override
    def set_runner(self, runner: Any) -> None:
        """Store the runner, and remove what killed runners have left on this machine.

        Raises:
            RuntimeError: programs cannot run as `user`, or in the sandbox, on this machine.
        """
        self._user()
        if self.sandbox is not None:
            require_bubblewrap()
        remove_left_attempts()
        super().set_runner(runner)

    @override
    async def rollout_async(self, task: object, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run the command for one task.

        Raises:
            ProgramFailed: the program could not be started, or failed.
            ProgramTimedOut: the program exceeded its time limit.
            ProgramResultError: the program reported no valid reward.
        """
        if not isinstance(rollout, AttemptedRollout):
            raise TypeError(f"CommandAgent requires a rollout with an attempt; got a {type(rollout).__name__}")
        user = self._user()
        ids = None if user is None else (user.uid, user.gid)
        folder = AttemptFolder(ids)
        try:
            own = attempt_resources(resources, rollout)
            data = write_files(folder, task, own)
            own_env = self.env if user is None else {"HOME": user.home, **self.env}
            env = environment(folder.path, rollout, model_of(own, self.llm), self.pass_env, own_env)
            sandbox = None if self.sandbox is None else self._sandbox_of(self.sandbox, folder, own)
            program = Program(self.command, env, self.cwd, self.limits, keys_of(own), ids, sandbox)
            with operation(name=Path(self.command[0]).name) as span:
                span.set_input(command=list(self.command))
                try:
                    output = await program.run(data if self.task == "stdin" else None)
                finally:
                    if (result := program.output()) is not None:
                        span.set_output(asdict(result))
            return cast("RolloutRawResult", await asyncio.to_thread(result_of, output, self.reward, folder))
        finally:
            await asyncio.to_thread(folder.remove)

    def _user(self) -> ProgramUser | None:
        if self.user is not None:
            return user_of(self.user)
        return user_of(NOBODY) if self.sandbox is not None and os.geteuid() == 0 else None

    def _sandbox_of(self, settings: Bubblewrap, folder: AttemptFolder, resources: Mapping[str, Resource]) -> Sandbox:
        addresses = addresses_of(value.get_base_url() for value in resources.values() if isinstance(value, LLM))
        folder.write("hosts", Sandbox.hosts_of(addresses))
        return Sandbox(settings, folder.path, self.cwd, addresses)


TaskPlace = Literal["stdin", "file"]
LEAST_OUTPUT_BYTES = 1024


def check_command(command: Any) -> tuple[str, ...]:
    """Return the program and its arguments."""
    if isinstance(command, (str, bytes)) or not isinstance(command, Sequence):
        example = command.split() if isinstance(command, str) else ["node", "agent.js"]
        raise TypeError(
            f"command must be a list of the program and its arguments, such as {example!r}; got {command!r}. To run a "
            'shell command, use ["bash", "-c", "..."]'
        )
    parts: list[Any] = [
        os.fspath(cast("os.PathLike[str]", part)) if isinstance(part, os.PathLike) else part
        for part in cast("Sequence[Any]", command)
    ]
    if not parts or not all(isinstance(part, str) for part in parts) or not parts[0]:
        raise ValueError(f"command must hold the program and its arguments as strings; got {command!r}")
    if any("\0" in part for part in parts):
        raise ValueError(f"command must not contain NUL characters; got {command!r}")
    return tuple(parts)


def check_reward(reward: object) -> RewardSource | dict[int, float]:
    """Return the setting `reward` if it is valid."""
    if callable(reward):
        raise TypeError(
            f"reward must not be a function; got {reward!r}. Pass it to the Trainer as reward_fn=..., and set "
            "reward='reward_fn' here"
        )
    if not isinstance(reward, Mapping):
        if reward not in SOURCES:
            sources = ", ".join(SOURCES)
            raise ValueError(f"reward must be one of {sources}, or a mapping of exit codes to rewards; got {reward!r}")
        return reward
    codes = dict(cast("Mapping[Any, Any]", reward))
    for code, value in codes.items():
        if isinstance(code, bool) or not isinstance(code, int) or isinstance(value, bool):
            raise TypeError(f"reward must map exit codes to rewards, as in {{0: 1.0, 1: 0.0}}; got {code!r}: {value!r}")
        if as_reward(value) is None:
            raise ValueError(f"reward[{code}] must be {USABLE_REWARD}; got {value!r}")
    if not codes:
        raise ValueError("reward must map at least one exit code to a reward, as in {0: 1.0, 1: 0.0}; got {}")
    return codes


def check_env(env: object) -> dict[str, str]:
    """Return the user's variables."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of variables to strings; got {env!r}")
    for name, value in cast("Mapping[Any, Any]", env).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"env must be a mapping of variables to strings; got {name!r}: {value!r}")
        if "\0" in value:
            raise ValueError(f"env[{name!r}] must not contain NUL characters")
        _check_variable("env", name)
    return dict(cast("Mapping[str, str]", env))


def check_pass_env(names: object) -> tuple[str, ...]:
    """Return the names of variables to copy."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
        raise TypeError(f"pass_env must be a list of variable names; got {names!r}")
    for name in cast("Sequence[Any]", names):
        if not isinstance(name, str):
            raise TypeError(f"pass_env must be a list of variable names; it contains {name!r}")
        _check_variable("pass_env", name)
    return tuple(cast("Sequence[str]", names))


def _check_variable(setting: str, name: str) -> None:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{setting} contains {name!r}, which is not a variable name")
    if name in RESERVED:
        raise ValueError(f"{setting} must not contain {name}, which is set for each attempt")


def check_limits(timeout_seconds: Any, stop_seconds: Any, max_output_bytes: Any) -> ProgramLimits:
    """Return the limits of a run."""
    if timeout_seconds is not None and check_seconds("timeout_seconds", timeout_seconds) == 0:
        raise ValueError(f"timeout_seconds must be more than 0 seconds; got {timeout_seconds!r}")
    output_bytes = check_count("max_output_bytes", max_output_bytes, minimum=LEAST_OUTPUT_BYTES)
    return ProgramLimits(timeout_seconds, check_seconds("stop_seconds", stop_seconds), output_bytes)


_NEEDED = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
"""Capability numbers by name, see capabilities(7): change the folder's owner, end the program, switch to the user."""


@dataclass(frozen=True, slots=True)
class ProgramUser:
    """A user of this machine."""

    uid: int
    gid: int
    home: str


def check_user(user: object) -> str | int | None:
    """Return the setting `user` if it is valid."""
    if user is None:
        return None
    if isinstance(user, bool) or not isinstance(user, (str, int)):
        raise TypeError(f"user must be the name or the number of a user; got {user!r}")
    if user in (0, "root", ""):
        raise ValueError(f"user={user!r}: expected a user other than root, because root can read everything")
    if isinstance(user, int) and user < 0:
        raise ValueError(f"user={user} is not a valid user number")
    return user


def user_of(user: str | int) -> ProgramUser:
    """Return the user's ids and home on this machine. A user number needs no account.

    Raises:
        RuntimeError: the user is unknown on this machine or is root, or this process may not switch to the user.
    """
    import pwd  # POSIX only, like this agent

    try:
        entry = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
        resolved = ProgramUser(entry.pw_uid, entry.pw_gid, entry.pw_dir)
    except KeyError:
        if isinstance(user, str):
            raise RuntimeError(f"CommandAgent(user={user!r}): this machine has no such user") from None
        resolved = ProgramUser(user, user, "/")
    if resolved.uid == 0:
        raise RuntimeError(f"CommandAgent(user={user!r}): this user is root, which can read everything")
    if os.geteuid() != 0:
        raise RuntimeError(
            f"CommandAgent(user={user!r}) requires a runner that is root, so that it can switch to that user; this "
            f"runner is user {os.geteuid()}. Start the runner as root, or omit user=: the program then runs as user "
            f"{os.geteuid()}, with all its permissions."
        )
    try:
        with open("/proc/self/status") as file:
            [effective] = [int(line.split()[1], 16) for line in file if line.startswith("CapEff:")]
    except (OSError, ValueError):  # a system without capabilities
        return resolved
    if missing := [name for name, number in _NEEDED.items() if not effective >> number & 1]:
        raise RuntimeError(
            f"CommandAgent(user={user!r}): the runner is root without the capabilities {', '.join(missing)}. Add them "
            "to the container (--cap-add), or omit user="
        )
    return resolved
