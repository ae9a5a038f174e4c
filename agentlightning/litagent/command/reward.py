"""How a program says what its attempt has earned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

from agentlightning.litagent.command.attempt_folder import AttemptFolder, UnusableFile
from agentlightning.litagent.command.environment import REWARD_FILE
from agentlightning.litagent.command.process import ProgramFailed, ProgramOutput, ProgramResultError
from agentlightning.terminal import cut

RewardSource = Literal["last_line", "file", "exit_code", "reward_fn", "none"]
SOURCES: tuple[RewardSource, ...] = ("last_line", "file", "exit_code", "reward_fn", "none")
PASS_OR_FAIL: Mapping[int, float] = {0: 1.0, 1: 0.0}
"""What `exit_code` means; any other code is a failure of the program and no reward."""
MOST_BYTES = 64 * 1024
"""Of the file, or of the line, that says a reward."""
_SHOWN = 400


def result_of(output: ProgramOutput, source: RewardSource | Mapping[int, float], folder: AttemptFolder) -> Any:
    """Return what a program's attempt gives to the runner: a reward, rewards by name, None, or the output itself.

    Raises:
        ProgramFailed: the exit code says that it failed.
        ProgramResultError: it ended well and left no reward where it was expected.
    """
    if source == "reward_fn":
        return output
    if source == "exit_code" or isinstance(source, Mapping):
        rewards = PASS_OR_FAIL if source == "exit_code" else source
        if output.exit_code in rewards:
            return rewards[output.exit_code]
        known = ", ".join(str(code) for code in rewards)
        raise ProgramFailed(
            f"The program {_ended(output)}, which stands for no reward (those that do: {known}). {_last_words(output)}"
        )
    if output.exit_code != 0:
        raise ProgramFailed(f"The program {_ended(output)}. {_last_words(output)}")
    if source == "none":
        return None
    if source == "last_line":
        return _from_last_line(output)
    try:
        value = _json(folder.read(REWARD_FILE, MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise ProgramResultError("The program wrote no file where AGL_REWARD_FILE said") from None
    except UnusableFile as error:
        raise ProgramResultError(f"What lies where AGL_REWARD_FILE said {error}") from None
    except ValueError as error:
        raise ProgramResultError(f"The file that AGL_REWARD_FILE names holds no JSON: {error}") from error
    return _reward_in(value, "the file that AGL_REWARD_FILE names")


def _from_last_line(output: ProgramOutput) -> Any:
    for line in reversed(output.stdout.splitlines()):
        if len(line) > MOST_BYTES:
            continue
        try:
            value: object = _json(line)
        except ValueError:
            continue
        if value is None or isinstance(value, (int, float, dict)):
            where = f"the last JSON line of the program's output ({cut(line, 80)})"
            return _reward_in(cast(object, value), where)
    raise ProgramResultError(
        'The output of the program has no line such as {"reward": 1.0} or 1.0. Print one at the end, or give the '
        f"CommandAgent another reward=. {_last_words(output)}"
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _reward_in(value: object, where: str) -> Any:
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if "reward" not in fields:
        named = ", ".join(map(str, fields)) or "nothing"
        raise ProgramResultError(f'Expected {{"reward": ...}} in {where}; it holds {named}')
    return fields["reward"]


def _ended(output: ProgramOutput) -> str:
    code = output.exit_code
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


def _last_words(output: ProgramOutput) -> str:
    said = output.stderr.strip() or output.stdout.strip()
    return f"It said last: {said[-_SHOWN:]}" if said else "It said nothing."
