"""The exchange of an attempt with its program: the folder with task and resources, the environment, the reward.

The folder is kept open: if the program replaces it, the replacement is never used.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from agentlightning.base.terminal import cut
from agentlightning.env_var import PROGRAM_VARIABLES
from agentlightning.litagent.command.process import ProgramFailed, ProgramOutput, ProgramResultError
from agentlightning.litagent.command.sandbox import remove_left_groups
from agentlightning.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, Resource

logger = logging.getLogger(__name__)

PREFIX = f"agl-program-{re.sub('[^A-Za-z0-9]', '-', socket.gethostname())[:32]}-"
"""With the name of the machine: several machines may share the folder, and locks may hold on one machine only."""
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}


class UnusableFile(ValueError):
    """A file may not be read, for example because it is a link; the message describes it."""


class AttemptFolder:
    """A new folder for one attempt: mode 0700, owned by `owner` (user and group) or by us. Its methods block."""

    def __init__(self, owner: tuple[int, int] | None = None) -> None:
        self.path, self._descriptor = held_folder(PREFIX)
        self._owner = owner
        if owner is not None:
            os.fchown(self._descriptor, *owner)

    def write(self, name: str, data: bytes) -> None:
        """Write a new file, mode 0600."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=self._descriptor), "wb") as file:
            file.write(data)
            if self._owner is not None:
                os.fchown(file.fileno(), *self._owner)

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return the contents of a file: a regular one, owned by the program, with one name and at most `most_bytes`.

        Opening it follows no link and does not block.

        Raises:
            FileNotFoundError: the file does not exist.
            UnusableFile: the file is of another kind, or cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            what = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
            raise UnusableFile(f"{what}; expected a regular file") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
                raise UnusableFile(f"is {kind}; expected a regular file")
            if status.st_nlink > 1:
                raise UnusableFile(f"has {status.st_nlink} names (hard links); expected exactly one")
            if status.st_uid != (os.geteuid() if self._owner is None else self._owner[0]):
                raise UnusableFile(f"belongs to the user {status.st_uid}; expected the program's user")
            if status.st_size > most_bytes:
                raise UnusableFile(f"holds {status.st_size} bytes, which is more than {most_bytes}")
            data = os.read(descriptor, most_bytes + 1)
            while len(data) <= most_bytes and (more := os.read(descriptor, most_bytes + 1 - len(data))):
                data += more
        except OSError as error:
            raise UnusableFile(f"cannot be read ({error.strerror})") from None
        finally:
            os.close(descriptor)
        if len(data) > most_bytes:
            raise UnusableFile(f"holds more than {most_bytes} bytes")
        return data

    def remove(self) -> None:
        """Remove the folder and its contents, even if the program has moved it; warn if something cannot be removed."""
        try:
            _remove(self.path, self._descriptor)
        finally:
            os.close(self._descriptor)


def held_folder(prefix: str, parent: Path | None = None) -> tuple[Path, int]:
    """Make a folder and return its path and descriptor, which holds a lock until it is closed or this process ends."""
    import fcntl  # POSIX only, like CommandAgent

    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            descriptor = _open_folder(path)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink > 0:
                return path, descriptor
            os.close(descriptor)  # another process has removed it, before it had its lock


def left_folders(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield each folder whose runner was killed, so that it has no lock, and its descriptor.

    It is locked until the next one is requested.
    """
    import fcntl

    for path in paths:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # it is locked or has been removed
            descriptor = _open_folder(path)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink > 0 and remove_left_groups(path.name):
                yield path, descriptor


def remove_left_attempts() -> None:
    """Remove the folders and the control groups of attempts whose runner was killed on this machine."""
    for path, descriptor in left_folders(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if os.geteuid() in (0, os.fstat(descriptor).st_uid):
            _remove(path, descriptor)


def _remove(path: Path, descriptor: int) -> None:
    try:
        if os.geteuid() != 0:  # root needs no permissions
            os.fchmod(descriptor, 0o700)
        try:
            here = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the system does not report it
            here = path
        _empty(descriptor)
        if os.fstat(descriptor).st_nlink > 0:  # the program may have removed it
            os.rmdir(here)
        _remove_impostor(path)
    except OSError as error:
        logger.warning("Could not remove the folder %s of an attempt: %s", path, error)


def _remove_impostor(path: Path) -> None:
    """Remove the file or folder that a program has put in the folder's place. A link is removed, its target is not."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
    except FileNotFoundError:
        return
    descriptor = _opened(path, None)
    try:
        _empty(descriptor)
    finally:
        os.close(descriptor)
    path.rmdir()


def _empty(folder: int) -> None:
    """Remove the contents of an open folder. Nested folders are first moved up into it, so that no depth needs
    recursion, a descriptor for each level, or a path that is too long."""
    names = (f".agl-{number}" for number in itertools.count())
    while entries := list(itertools.islice(_entries(folder), 10_000)):
        for name, is_folder in entries:
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            inner = _opened(name, folder)
            try:
                while below := list(itertools.islice(_entries(inner), 10_000)):
                    for entry, is_folder_too in below:
                        if is_folder_too:
                            _free(entry, inner)
                            os.rename(entry, _unused(folder, names), src_dir_fd=inner, dst_dir_fd=folder)
                        else:
                            os.unlink(entry, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)


def _entries(folder: int) -> Iterator[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _opened(name: str | Path, folder: int | None) -> int:
    _free(name, folder)
    return _open_folder(name, folder)


def _open_folder(path: str | Path, folder: int | None = None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _free(name: str | Path, folder: int | None) -> None:
    """Restore our permissions on a folder after its program has revoked them."""
    if os.geteuid() != 0:
        os.chmod(name, 0o700, dir_fd=folder)


def _unused(folder: int, names: Iterator[str]) -> str:
    for name in names:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return name
    raise AssertionError("unreachable")


PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that every program gets from the runner."""
RESERVED = frozenset(PROGRAM_VARIABLES)
"""Variables that are set for each attempt; users may not set them."""
REWARD_FILE = "reward.json"
SHORTEST_KEY = 8
NO_KEY = "unused"
"""The key for a model without a key: clients do not start without one, and servers without keys ignore it."""


def attempt_resources(resources: NamedResources, rollout: AttemptedRollout) -> dict[str, Resource]:
    """Return the resources for this attempt: models behind the gateway have the attempt's address and key."""
    return {
        name: value.with_attempted_rollout(rollout) if isinstance(value, ProxyLLM) else value
        for name, value in resources.items()
    }


def model_of(resources: Mapping[str, Resource], name: str | None) -> LLM | None:
    """Return the model for the usual variables: the one with this `name`, else the first; None without models.

    Raises:
        ValueError: `name` is not a model.
    """
    if name is None:
        return next((value for value in resources.values() if isinstance(value, LLM)), None)
    resource = resources.get(name)
    if isinstance(resource, LLM):
        return resource
    published = ", ".join(f"{key} ({value.resource_type})" for key, value in resources.items()) or "nothing"
    raise ValueError(f"llm={name!r} is not the name of an LLM resource; published: {published}")


def keys_of(resources: Mapping[str, Resource]) -> list[str]:
    """Return the keys that a program gets, without placeholders; they are hidden in its output."""
    keys = [value.api_key or "" for value in resources.values() if isinstance(value, LLM)]
    return [key for key in keys if len(key) >= SHORTEST_KEY]


def write_files(folder: AttemptFolder, task: object, resources: Mapping[str, Resource]) -> bytes:
    """Write the task and the resources into the attempt's folder, and return the task as JSON."""
    data = json.dumps(task, ensure_ascii=False).encode() + b"\n"
    folder.write("task.json", data)
    described = {name: value.model_dump(mode="json") for name, value in resources.items()}
    folder.write("resources.json", json.dumps(described, ensure_ascii=False).encode())
    return data


def environment(
    folder: Path, rollout: AttemptedRollout, model: LLM | None, passed: Iterable[str], own: Mapping[str, str]
) -> dict[str, str]:
    """Return the complete environment of a program: the copied variables, the user's, and those of the attempt."""
    inherited = {name: os.environ[name] for name in (*PASSED, *passed) if name in os.environ}
    attempt = {
        "AGL_ROLLOUT_ID": rollout.rollout_id,
        "AGL_ATTEMPT_ID": rollout.attempt.attempt_id,
        "AGL_MODE": rollout.mode or "",
        "AGL_TASK_FILE": str(folder / "task.json"),
        "AGL_RESOURCES_FILE": str(folder / "resources.json"),
        "AGL_REWARD_FILE": str(folder / REWARD_FILE),
        "TMPDIR": str(folder),
    }
    if model is None:
        return {**inherited, **own, **attempt}
    base, key = model.get_base_url(), model.api_key or NO_KEY
    return {
        **inherited,
        **own,
        **attempt,
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model.model,
        "ANTHROPIC_BASE_URL": base.removesuffix("/").removesuffix("/v1"),  # its clients add /v1/messages
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model.model,
        "AGL_MODEL": model.model,
    }


RewardSource = Literal["last_line", "file", "exit_code", "reward_fn", "none"]
SOURCES: tuple[RewardSource, ...] = ("last_line", "file", "exit_code", "reward_fn", "none")
PASS_OR_FAIL: Mapping[int, float] = {0: 1.0, 1: 0.0}
"""Rewards by exit code for `exit_code`; any other code is a failure of the program."""
MOST_BYTES = 64 * 1024
"""Maximum number of bytes of the file or line with the reward."""
_SHOWN = 400


def result_of(output: ProgramOutput, source: RewardSource | Mapping[int, float], folder: AttemptFolder) -> Any:
    """Return the result of a program's attempt: a reward, rewards by name, None, or the output itself.

    Raises:
        ProgramFailed: the exit code is a failure.
        ProgramResultError: it succeeded and its reward is missing or invalid.
    """
    if source == "reward_fn":
        return output
    if source == "exit_code" or isinstance(source, Mapping):
        rewards = PASS_OR_FAIL if source == "exit_code" else source
        if output.exit_code in rewards:
            return rewards[output.exit_code]
        codes = ", ".join(str(code) for code in rewards)
        raise ProgramFailed(
            f"The program {_ended(output)}, but only these exit codes have a reward: {codes}. {_last_words(output)}"
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
        raise ProgramResultError("The program did not write the file in AGL_REWARD_FILE") from None
    except UnusableFile as error:
        raise ProgramResultError(f"The file in AGL_REWARD_FILE {error}") from None
    except ValueError as error:
        raise ProgramResultError(f"The file in AGL_REWARD_FILE is not valid JSON: {error}") from error
    return _reward_in(value, "the file in AGL_REWARD_FILE")


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
        'The output of the program has no line such as {"reward": 1.0} or 1.0. Print one at the end, or set another '
        f"reward= of CommandAgent. {_last_words(output)}"
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
        raise ProgramResultError(f'Expected {{"reward": ...}} in {where}; got {named}')
    return fields["reward"]


def _ended(output: ProgramOutput) -> str:
    code = output.exit_code
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


def _last_words(output: ProgramOutput) -> str:
    text = output.stderr.strip() or output.stdout.strip()
    return f"Its last output: {text[-_SHOWN:]}" if text else "It printed no output."
