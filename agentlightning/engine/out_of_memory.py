"""Errors that say that memory could not be had."""

from __future__ import annotations

import gc
from typing import Final

import torch

_OUT_OF_MEMORY: Final = (
    *("DefaultCPUAllocator", "std::bad_alloc"),
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had.

    On a GPU torch has a class for it, but not for what CUDA and its libraries take beside torch. On a CPU its allocator
    raises a plain `RuntimeError` (a limit of the process or a strict overcommit policy was reached), and Python itself
    a `MemoryError`; a control group or a machine that runs out of pages kills the process instead, which nobody can
    catch.
    """
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
    )


def short_cause(error: BaseException) -> str:
    """Return what an error of this kind says first; torch goes on with the memory of every process on the GPU."""
    return str(error).partition("\n")[0].partition(" GPU ")[0] or type(error).__name__


def free_cached_memory(device: torch.device) -> None:
    """Give back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
