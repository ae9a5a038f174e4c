"""Exit codes of commands and processes. `docs/reference/settings.md` is generated from them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of commands and processes, for shells and service managers."""

    DONE = 0
    """Success, or a server that was stopped by Ctrl+C or SIGTERM."""
    FAILED = 1
    """Failure, or a negative result, for example of `agl doctor`, `agl store check`, `agl promote` or `agl demo`."""
    WRONG_INPUT = 2
    """Wrong usage or wrong input. The message states what was expected, or the closest valid name."""
    STORE_UNREACHABLE = 69
    """`agl run`, `agl runner`: the store did not respond in time (EX_UNAVAILABLE). Retry later."""
    UNFORESEEN = 70
    """An unexpected error (EX_SOFTWARE): a bug in this package or in your code. Use `--debug` to see the traceback."""
    UNAUTHORIZED = 77
    """`agl run`, `agl runner`: the store rejects the token (EX_NOPERM)."""
    INTERRUPTED = 130
    """Stopped by Ctrl+C."""
    TERMINATED = 143
    """Stopped by SIGTERM."""
