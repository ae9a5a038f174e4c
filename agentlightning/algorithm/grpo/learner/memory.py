"""How much memory a run needs, what there is, and how a lack of it looks."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had.

    On a GPU torch has a class for it. On a CPU its allocator raises a plain `RuntimeError` (a limit of the process or a
    strict overcommit policy was reached), and Python itself a `MemoryError`; a control group or a machine that runs out
    of pages kills the process instead, which nobody can catch.
    """
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "std::bad_alloc" in text)
    )
