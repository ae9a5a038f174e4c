"""The user as whom a program runs, where that is not the runner's."""

from __future__ import annotations

import os
from dataclasses import dataclass

_NEEDED = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
"""Capabilities by number, of capabilities(7): to give away the folder, to end the program, and to become the user."""


@dataclass(frozen=True, slots=True)
class ProgramUser:
    """A user of this machine."""

    uid: int
    gid: int
    home: str


def check_user(user: object) -> str | int | None:
    """Return the setting.

    Raises:
        TypeError, ValueError: it is no name and no number of a user, or it is root.
    """
    if user is None:
        return None
    if isinstance(user, bool) or not isinstance(user, (str, int)):
        raise TypeError(f"user must be the name or the number of a user; got {user!r}")
    if user in (0, "root", ""):
        raise ValueError(f"user={user!r}: expected a user that is not root; as root a program can read everything")
    if isinstance(user, int) and user < 0:
        raise ValueError(f"user={user} is no number of a user")
    return user


def user_of(user: str | int) -> ProgramUser:
    """Return who the user is here. One that is given by number need not have an account.

    Raises:
        RuntimeError: this machine does not know the name, it is root's, or this process may not become the user.
    """
    import pwd  # POSIX only, as programs are

    try:
        entry = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
        found = ProgramUser(entry.pw_uid, entry.pw_gid, entry.pw_dir)
    except KeyError:
        if isinstance(user, str):
            raise RuntimeError(f"CommandAgent(user={user!r}): this machine has no such user") from None
        found = ProgramUser(user, user, "/")
    if found.uid == 0:
        raise RuntimeError(f"CommandAgent(user={user!r}): that is root, who can read everything")
    if os.geteuid() != 0:
        raise RuntimeError(
            f"CommandAgent(user={user!r}) needs a runner that is root, so that it can become that user; this one is "
            f"the user {os.geteuid()}. Start the runner as root, or leave user= away: the program is then this user, "
            "and can do whatever it may."
        )
    try:
        with open("/proc/self/status") as file:
            [effective] = [int(line.split()[1], 16) for line in file if line.startswith("CapEff:")]
    except (OSError, ValueError):  # the system has no capabilities
        return found
    if missing := [name for name, number in _NEEDED.items() if not effective >> number & 1]:
        raise RuntimeError(
            f"CommandAgent(user={user!r}): the runner is root without {', '.join(missing)}; a container needs them "
            "added (--cap-add), or leave user= away"
        )
    return found
