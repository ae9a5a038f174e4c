"""Exit codes of processes that serve a run, so that whoever started them can tell what to do."""

from __future__ import annotations

from agentlightning.errors import StoreUnreachableError, UnauthorizedError

FAILED = 1
"""Anything that has no code of its own; the traceback tells."""
STORE_UNREACHABLE = 69
"""The store did not answer for `store_unreachable_timeout` seconds (EX_UNAVAILABLE): try again later."""
UNAUTHORIZED = 77
"""The store refuses the token (EX_NOPERM): set AGL_TOKEN."""
INTERRUPTED = 130
"""Ctrl+C."""


def exit_code_of(error: BaseException) -> int:
    """Return the code with which a process ends because of `error`. 0 is for one that was told to stop."""
    match error:
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return INTERRUPTED
        case UnauthorizedError():
            return UNAUTHORIZED
        case StoreUnreachableError():
            return STORE_UNREACHABLE
        case _:
            return FAILED
