"""Exit codes of commands and processes. `docs/reference/settings.md` is generated from them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes; shells and service managers see nothing else of how a process ended."""

    DONE = 0
    """Done. A command that serves was ended by Ctrl+C or SIGTERM."""
    FAILED = 1
    """Failed, or a negative verdict (`agl demo`, `agl store check`, `agl doctor`)."""
    WRONG_INPUT = 2
    """Wrong use or wrong input: the message says what was expected, and the closest valid word."""
    STORE_UNREACHABLE = 69
    """`agl run`, `agl runner`: the store did not answer for too long (EX_UNAVAILABLE); retry later."""
    UNFORESEEN = 70
    """An unexpected error (EX_SOFTWARE): a bug in this package or in your code; `--debug` shows where."""
    UNAUTHORIZED = 77
    """`agl run`, `agl runner`: the store rejects the token (EX_NOPERM)."""
    INTERRUPTED = 130
    """Ended by Ctrl+C."""
    TERMINATED = 143
    """Ended by SIGTERM."""
