"""CPU seconds of the threads of this process, by the beginning of their name."""

from __future__ import annotations

import threading
import time


def thread_cpu_seconds(prefixes: tuple[str, ...]) -> float:
    """Return the CPU time that the running threads with these names have used so far; 0.0 where it cannot be read."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(prefixes) and thread.ident is not None:
            try:
                total += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except (AttributeError, OSError):  # not offered here, or the thread has just ended
                continue
    return total
