"""The setup of torch and transformers in this process: imports, threads, kernels, memory and output.

`algorithm/grpo.py` imports this module before every other one that needs torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

from agentlightning.errors import MissingExtraError

try:
    import torch
    from transformers.utils import logging as transformers_logging
except ModuleNotFoundError as error:
    raise MissingExtraError("agl.GRPO", "grpo", error.name or "torch") from error

SMALL_MODEL_PARAMETERS: Final = 10_000_000
_OUT_OF_MEMORY: Final = (
    *("DefaultCPUAllocator", "std::bad_alloc"),
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


@contextmanager
def one_thread() -> Generator[None]:
    """Restrict torch to the calling thread.

    The operations of a small model are too short to split. A second thread does not help on idle cores, and on busy
    cores each operation waits for it (the warm start of the demo took 50 s with one thread and 140 s with two, while
    another process used the two cores).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leave_out_cudnn_attention(device: torch.device) -> None:
    """Disable cuDNN's attention on a GPU for this process, because it creates a plan for each new shape.

    Every generated token, and most rows, have a new shape; a plan takes up to a second (pytorch pull request 155958).
    The other kernels need no plans.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def no_progress_bar() -> Generator[None]:
    """Disable the progress bars of transformers while it loads and saves, and then restore its setting."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def deterministic_torch(device: str) -> Generator[None]:
    """Make torch use deterministic algorithms in the body; an operation that has none then raises RuntimeError.

    Call it before the first use of a GPU by this process (PyTorch, "Reproducibility", section on cuBLAS).
    """
    if torch.device(device).type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated.

    On a GPU torch has a class for it, but not for the memory of CUDA and its libraries. On a CPU its allocator raises a
    `RuntimeError` (a limit of the process or a strict overcommit policy was reached), and Python a `MemoryError`; a
    control group or a machine that runs out of pages kills the process instead.
    """
    text = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
    )


def short_cause(error: BaseException) -> str:
    """Return the first sentence of an out-of-memory error; torch adds the memory of every process on the GPU."""
    return str(error).partition("\n")[0].partition(" GPU ")[0] or type(error).__name__


def free_cached_memory(device: torch.device) -> None:
    """Release cached memory that is no longer in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()


def return_freed_memory() -> None:
    """Return the freed memory of this process to the system, where the C library has a call for it (glibc).

    By default glibc keeps it in the arena of the thread that used it. Each update has a new thread and can get another
    arena, so that the freed memory of several updates adds up (SmolLM2-135M: 23 GB after five, each of which needs 5).
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
