"""The settings of a `CommandAgent`, checked when they are given; an error names the setting, the value and the way."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

from agentlightning.emitter.reward_values import USABLE_REWARD, as_reward
from agentlightning.litagent.command.environment import RESERVED
from agentlightning.litagent.command.process import ProgramLimits
from agentlightning.litagent.command.reward import SOURCES, RewardSource

TaskPlace = Literal["stdin", "file"]
LEAST_OUTPUT_BYTES = 1024


def check_command(command: Any) -> tuple[str, ...]:
    """Return the program and its arguments.

    Raises:
        TypeError, ValueError: it is no list of texts.
    """
    if isinstance(command, (str, bytes)) or not isinstance(command, Sequence):
        example = command.split() if isinstance(command, str) else ["node", "agent.js"]
        raise TypeError(
            f"command must be a list of the program and its arguments, such as {example!r}; got {command!r}. For a "
            'line of shell: ["bash", "-c", "..."]'
        )
    parts: list[Any] = [
        os.fspath(cast("os.PathLike[str]", part)) if isinstance(part, os.PathLike) else part
        for part in cast("Sequence[Any]", command)
    ]
    if not parts or not all(isinstance(part, str) for part in parts) or not parts[0]:
        raise ValueError(f"command must hold the program and its arguments as text; got {command!r}")
    if any("\0" in part for part in parts):
        raise ValueError(f"command holds a NUL character, which no program can be given: {command!r}")
    return tuple(parts)


def check_task(task: Any) -> TaskPlace:
    """Return where the task goes.

    Raises:
        ValueError: it is no such place.
    """
    if task not in get_args(TaskPlace):
        raise ValueError(f"task must be one of {', '.join(get_args(TaskPlace))}; got {task!r}")
    return task


def check_reward(reward: object) -> RewardSource | dict[int, float]:
    """Return where the reward comes from.

    Raises:
        TypeError, ValueError: it is no source, and no mapping of exit codes to finite numbers.
    """
    if callable(reward):
        raise TypeError(
            f"reward={reward!r}: a function that scores goes to the Trainer as reward_fn=..., and here stands "
            "reward='reward_fn'"
        )
    if not isinstance(reward, Mapping):
        if reward not in SOURCES:
            known = ", ".join(SOURCES)
            raise ValueError(f"reward must be one of {known}, or a mapping of exit codes to rewards; got {reward!r}")
        return reward
    codes = dict(cast("Mapping[Any, Any]", reward))
    for code, value in codes.items():
        if isinstance(code, bool) or not isinstance(code, int) or isinstance(value, bool):
            raise TypeError(f"reward maps exit codes to rewards, such as {{0: 1.0, 1: 0.0}}; got {code!r}: {value!r}")
        if as_reward(value) is None:
            raise ValueError(f"reward[{code}] must be {USABLE_REWARD}; got {value!r}")
    if not codes:
        raise ValueError("reward={} gives no exit code a reward; such as {0: 1.0, 1: 0.0}")
    return codes


def check_env(env: object) -> dict[str, str]:
    """Return variables of the user's own.

    Raises:
        TypeError, ValueError: it is no mapping of names to texts, or names one that is set for each attempt.
    """
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of variables to texts; got {env!r}")
    for name, value in cast("Mapping[Any, Any]", env).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"env must be a mapping of variables to texts; got {name!r}: {value!r}")
        if "\0" in value:
            raise ValueError(f"env[{name!r}] holds a NUL character, which no variable can")
        _check_variable("env", name)
    return dict(cast("Mapping[str, str]", env))


def check_pass_env(names: object) -> tuple[str, ...]:
    """Return names of variables to pass on.

    Raises:
        TypeError, ValueError: it is no list of names, or holds one that is set for each attempt.
    """
    if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
        raise TypeError(f"pass_env must be a list of names of variables; got {names!r}")
    for name in cast("Sequence[Any]", names):
        if not isinstance(name, str):
            raise TypeError(f"pass_env must be a list of names of variables; got {name!r} in it")
        _check_variable("pass_env", name)
    return tuple(cast("Sequence[str]", names))


def _check_variable(setting: str, name: str) -> None:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{setting} names {name!r}, which is no name of a variable")
    if name in RESERVED:
        raise ValueError(f"{setting} names {name}, which is set for each attempt: its own address, key and files")


def check_limits(timeout_seconds: Any, stop_seconds: Any, max_output_bytes: Any) -> ProgramLimits:
    """Return the bounds of a run.

    Raises:
        TypeError, ValueError: one is no number, or out of its range.
    """
    if timeout_seconds is not None:
        _check_seconds("timeout_seconds", timeout_seconds, zero=False)
    _check_seconds("stop_seconds", stop_seconds, zero=True)
    if isinstance(max_output_bytes, bool) or not isinstance(max_output_bytes, int):
        raise TypeError(f"max_output_bytes must be a whole number; got {max_output_bytes!r}")
    if max_output_bytes < LEAST_OUTPUT_BYTES:
        raise ValueError(f"max_output_bytes must be at least {LEAST_OUTPUT_BYTES}; got {max_output_bytes}")
    return ProgramLimits(timeout_seconds, stop_seconds, max_output_bytes)


def _check_seconds(name: str, value: object, *, zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds; got {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be {'at least' if zero else 'more than'} 0 seconds and finite; got {value!r}")
