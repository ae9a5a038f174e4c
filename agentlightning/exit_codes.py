"""The codes with which commands and processes end. `docs/reference/settings.md` is made of them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What each code means; shells and service managers see nothing else of how a process ended."""

    DONE = 0
    """Done. Of a command that serves: it was ended by Ctrl+C or SIGTERM."""
    FAILED = 1
    """Failed, or a verdict that is not the one hoped for (`agl demo`, `agl store check`, `agl doctor`)."""
    WRONG_INPUT = 2
    """Wrong use or wrong input: the line says what was expected, and the nearest right word."""
    STORE_UNREACHABLE = 69
    """`agl run`, `agl runner`: the store did not answer for too long (EX_UNAVAILABLE); try again later."""
    UNFORESEEN = 70
    """An error that nobody foresaw (EX_SOFTWARE): a bug, ours or of code of yours; `--debug` shows where."""
    UNAUTHORIZED = 77
    """`agl run`, `agl runner`: the store refuses the token (EX_NOPERM)."""
    INTERRUPTED = 130
    """Ended by Ctrl+C."""
    TERMINATED = 143
    """Ended by SIGTERM."""
